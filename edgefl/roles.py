"""Roles of a recipe: what a method of each declares, and which functions the core calls (``edgefl.hooks``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

from edgefl.errors import Problem
from edgefl.registry import Method, Recipe, Signature, offers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgefl.hooks import (
        ClusterGroup,
        ClusterOwnModels,
        CombineAccount,
        CombineAccumulate,
        CombineKeeps,
        CombineMerge,
        CombineNoise,
        CombineResolve,
        CombineScreen,
        FusionBuild,
        ObjectiveKeep,
        ObjectiveLoss,
        OptimiseAdjust,
        OptimiseStep,
        PaceFewest,
        PaceJudge,
        PaceObserve,
        PrototypesCandidates,
        PrototypesLocal,
        PrototypesLocalRows,
        PrototypesMerge,
        PrototypesRows,
        PrototypesStart,
        RepairAsk,
        RepairLend,
        RepairMend,
        RepairObserve,
        RepairPeriod,
        RepairUnlikely,
        RepairUnreadable,
        ScheduleStages,
        SelectDraw,
        StandInBuild,
        StandInCompletedCounts,
        StandInCompletedData,
        StandInMake,
        StandInOffered,
        UploadMost,
        UploadSend,
        WeightPersonal,
        WeightSimilarity,
        WeightWeigh,
    )
    from edgefl.models.spec import ModelSpec


#: What a term of the loss needs beside the model.
Auxiliary = Literal["reconstruction", "private_head", "teacher", "received"]


@dataclass(frozen=True)
class Schedule(Method):
    """Which parts exist and are trained in each stage. ``stages``: (model, rounds of each stage, options) -> stages.

    ``by_budget``: devices of one round train different depths. ``freezes``: later stages or rounds take parts that
    earlier ones trained from the global model, frozen.
    """

    role: ClassVar[str] = "schedule"
    stages: ScheduleStages | None = None
    by_budget: bool = False
    freezes: bool = False


@dataclass(frozen=True)
class Pace(Method):
    """When a stage ends, at the latest after its planned rounds.

    ``judge``: (rounds of the stage so far, each an ``edgefl.aggregation.pace.StageRound``; options) -> the ``Verdict``.
    None: every planned round takes place. A stage that ends early leaves the model of its best round. ``fewest``:
    (options) -> rounds after which it ends at the soonest.
    ``observe``: (state or None, tensors of a trained part before the round, after it, options) -> (its facts {name:
    number}, the next state); the state begins with each stage.
    """

    role: ClassVar[str] = "pace"
    judge: PaceJudge | None = None
    observe: PaceObserve | None = None
    fewest: PaceFewest | None = None


@dataclass(frozen=True)
class Sharing(Method):
    """Sharing of weights between the encoders: the default shares none.

    Others share the attention of their blocks (``edgefl.models.multiway``). None from outside: the core builds it.
    """

    role: ClassVar[str] = "sharing"


@dataclass(frozen=True)
class Fusion(Method):
    """Fusion of the modalities' projections into one representation [B, width].

    ``build``: (model, options) -> the module, called with two lists in the order of the model's encoders: projections
    [B, d], stand-ins where a row lacks a modality; and which rows show one or a stand-in that says something [B], or
    None for all rows. It imports torch. ``tokens``: it is called with a list of ``edgefl.models.joint_fusion.Given`` in
    their place, the modalities' tokens. ``weights``: it has any. ``wide``: its width is ``model.fusion_width``; else
    that of a projection.
    """

    role: ClassVar[str] = "fusion"
    build: FusionBuild | None = None
    tokens: bool = False
    weights: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cluster(Method):
    """How devices are grouped.

    ``signature``: what each device sends once for it. ``group``: ({device: tensors of its signature}, generator,
    options) -> {device: cluster, from 0}. ``own_models``: (options) -> whether each cluster has a model of its own.
    """

    role: ClassVar[str] = "cluster"
    signature: Signature | None = None
    group: ClusterGroup | None = None
    own_models: ClusterOwnModels | None = None


@dataclass(frozen=True)
class Select(Method):
    """Which of the eligible devices train a round. ``draw``: (devices, generator, history, options) -> the chosen."""

    role: ClassVar[str] = "select"
    draw: SelectDraw | None = None


@dataclass(frozen=True, kw_only=True)
class StandIn(Method):
    """A stand-in for an absent modality.

    ``make``: (modality, what is at hand) -> its stand-ins (``edgefl.training.fill``), in training, evaluation and
    exported graphs. ``build``: (model, options) -> the module with its weights, the model's part ``missing``, which is
    ``module`` of what is at hand; it imports torch.
    ``offered``: (model, prototype tables) -> whether inference can make it; None: where the model was built for it.
    ``inferred``: what it is at inference, in a report's words; "": its summary.
    ``complete_only``: samples that lack a modality are not trained on. ``completed_data``: (dataset, encoders, options)
    -> the data completed before training; ``completed_counts``: the same of (samples of each modality, encoders).
    """

    role: ClassVar[str] = "missing"
    make: StandInMake
    build: StandInBuild | None = None
    offered: StandInOffered | None = None
    inferred: str = ""
    complete_only: bool = False
    completed_data: StandInCompletedData | None = None
    completed_counts: StandInCompletedCounts | None = None

    @property
    def tables(self) -> bool:
        """Whether it is made of the prototypes that its rules ask for."""
        return any(rule.role == Prototypes.role and rule.wanted for rule in self.rules)

    def offers(self, model: ModelSpec, tables: Mapping[str, object]) -> bool:
        """Whether inference can make it."""
        return self.name in (model.stand_in or ()) if self.offered is None else self.offered(model, tables)


@dataclass(frozen=True)
class Prototypes(Method):
    """Prototypes, computed on the devices and merged.

    ``local``: (job, model, auxiliary, dataset, generator, options) -> {table: ``prototypes.table.ClassMeans``} of one
    device; None: there are no prototypes.
    ``merge``: ({device: loader of its tables}, loader of the global ones or None, generator, options) -> the outcome
    (``edgefl.aggregation.prototype_merge``). ``start``: (model, generator, options) -> tables before the first ones.
    ``rows``: (model, options) -> {table: (rows, width)} of the global tables.
    ``local_rows``: (job, candidate, its modalities, options) -> the same of the device's own, predicted.
    ``candidates``: (options) -> numbers of classes to mix at inference, ascending, of which the best on the devices'
    hold-outs is taken; (): their number is fixed; None: their rows are no classes.
    """

    role: ClassVar[str] = "prototypes"
    local: PrototypesLocal | None = None
    merge: PrototypesMerge | None = None
    start: PrototypesStart | None = None
    rows: PrototypesRows | None = None
    local_rows: PrototypesLocalRows | None = None
    candidates: PrototypesCandidates | None = None


@dataclass(frozen=True)
class Objective(Method):
    """A term of the local loss; its options have a ``weight``, else it is 1.

    ``loss``: (forward pass, *, options) -> a scalar tensor, not yet weighted (``edgefl.training.forward.Forward``). It
    stays in the graph (``forward.nothing()`` for an empty one), and neither its shapes nor its branches depend on
    values: it is priced on the meta device.

    ``labels``, ``pairs``: it gives the model a task, learned from labels or from pairs of modalities. Together such
    terms decide which samples a device trains on, whether the model has a classifier, and whether the planner prices
    batches with labels; a term with neither sees what the others let through.
    ``one_label``: it has no meaning for samples of several.
    ``modalities``: fewest of a model that it is for.
    ``joint``: it compares the fused representation with projections, which have to be as wide.
    ``unlabelled``: it trains the fusion on samples without a label too.
    ``auxiliaries``: what it needs beside the model: ``reconstruction`` networks that predict a modality's projection
    from the others', which it trains; a ``private_head``, a copy of their mappings that devices without labels train on
    pseudo-labels; a ``teacher``, the mappings as received; the trained parameters as ``received``. What these make for
    a round is in ``edgefl.training.forward.auxiliary_of``, and for the planner in ``edgefl.pricing.round_price``.
    ``keep``: (kept, received, trained, options) -> what the device keeps until its next round, of one parameter: arrays
    of one shape, ``kept`` zeros at first. Its loss reads ``forward.auxiliary.kept``, and ``received`` as well.
    """

    role: ClassVar[str] = "objective"
    loss: ObjectiveLoss | None = None
    labels: bool = False
    pairs: bool = False
    one_label: bool = False
    modalities: int = 1
    joint: bool = False
    unlabelled: bool = False
    auxiliaries: tuple[Auxiliary, ...] = ()
    keep: ObjectiveKeep | None = None

    def has(self, trait: str) -> bool:
        """As a method's; an auxiliary is a trait too."""
        return trait in self.auxiliaries if trait in get_args(Auxiliary) else super().has(trait)

    @property
    def task(self) -> bool:
        """Whether it gives the model something to learn by itself."""
        return self.labels or self.pairs


@dataclass(frozen=True)
class Upload(Method):
    """Upload of the parts that a device trained.

    ``send``: (``edgefl.registry.Trained``, generator, options) -> ({part: its tensors} to send, tensors that the device
    keeps for it until its next round); None: every part as it was trained.
    ``most``: ({part: its bytes}, options) -> the most bytes of these that an update has, which may then leave parts
    out, all but one; None: it has all.
    With ``returns`` it is given the losses by the modalities at hand.
    """

    role: ClassVar[str] = "upload"
    send: UploadSend | None = None
    most: UploadMost | None = None


@dataclass(frozen=True)
class Repair(Method):
    """Repair of updates before they are aggregated.

    ``mend``: (updates, state, store, {device: cluster}, {device: samples in its last round}, options) -> ({(device,
    part): tensors in place of its own}, the record {device: what was done or why not}). Devices keep what they trained,
    and are sent these tensors for a model of their own, as a part of the method's name.
    ``unlikely``: ({device: its samples}, modalities, options) -> why nothing can be replaced; "": something can.
    ``observe``: (job, model, options) -> the observer of a device's training.
    ``unreadable``: (local optimiser, options) -> why it cannot observe it.
    With periods (``edgefl.plan.periods``): ``period``: (options) -> the ``Period``; None: one of one round.
    ``ask``: ({device: ``Member``}, options) -> {device: layers to upload}. ``lend``: (updates, {device: its layer by
    the update before}, store, {device: cluster}, options) -> ({device: {layer: values}}, the record of ``mend``).
    """

    role: ClassVar[str] = "repair"
    mend: RepairMend | None = None
    unlikely: RepairUnlikely | None = None
    observe: RepairObserve | None = None
    unreadable: RepairUnreadable | None = None
    period: RepairPeriod | None = None
    ask: RepairAsk | None = None
    lend: RepairLend | None = None


@dataclass(frozen=True)
class Weight(Method):
    """Aggregation weights of the devices in one part, sum 1.

    ``weigh``: ({device: samples}, {device: modalities it trained}, options) -> {device: weight}. ``similarity``:
    ({device: outputs [m, d] on the same probe samples}, options) -> {device: weight}, by the models' outputs.
    ``personal``: ({device: loader of a mapping}, options) -> {device: {device: weight}}: each has a mean of its own.
    ``exchange``: which trained parts travel.
    """

    role: ClassVar[str] = "weight"
    weigh: WeightWeigh | None = None
    similarity: WeightSimilarity | None = None
    personal: WeightPersonal | None = None
    exchange: Literal["all", "mappings", "nothing"] = "all"


@dataclass(frozen=True)
class Combine(Method):
    """How updates become one.

    ``accumulate``: (layout of the part, options) -> an accumulator with add and result. ``merge``: ({device: loader of
    the part}, layout, options) -> (its tensors, {device: share of its values that do not count}). ``screen``, before
    either: ({part: ``aggregation.pieces.Changes``}, options) -> the ``Screening``, or its first two.
    ``equal``: all devices count alike, whatever the slot weight says. ``keeps``: (options) ->
    whether devices that left an encoder stage out count as keeping it.
    ``resolve``: (devices that a round is planned for, rounds of the run, options) -> the slots that are other than
    the recipe has them: its own, whose options every function here is then called with, and upload, for the devices.
    ``noise``: (options) -> the ``Noise`` on every part that the stage trains, whoever trained it. ``account``: (spent
    so far, the most updates that a device has sent, options) -> the ``Account`` after one more round. A method with an
    account is refused beside whatever takes more of the devices' data than their clipped changes.
    """

    role: ClassVar[str] = "combine"
    screen: CombineScreen | None = None
    accumulate: CombineAccumulate | None = None
    merge: CombineMerge | None = None
    equal: bool = False
    keeps: CombineKeeps | None = None
    resolve: CombineResolve | None = None
    noise: CombineNoise | None = None
    account: CombineAccount | None = None

    def problems(self, role: str, recipe: Recipe) -> list[Problem]:
        """As of any method, and where it has an account what that does not cover."""
        why = f"{self.name} accounts for the devices' changes alone, and"
        beside = _UNCOVERED if self.account else ()
        found = [Problem(role, f"{why} {text}") for other, trait, text in beside if offers(recipe, other, trait)]
        return super().problems(role, recipe) + found


#: (role, trait of a method that takes more of the devices' data, why and the way out).
_UNCOVERED = (
    ("prototypes", "local", "prototypes are means of samples; set slots.prototypes to none"),
    ("cluster", "signature", "clusters are made of their signatures; set slots.cluster to none"),
    ("repair", "mend", "a repair puts one device's weights in another's; set slots.repair to none"),
    ("upload", "most", "which parts a device sends depends on its data; set slots.upload to whole"),
    ("pace", "returns", "this pace goes by their hold-outs; set slots.pace to planned"),
    ("select", "returns", "this selection goes by their hold-outs; set slots.select to all or random"),
    ("optimise", "returns", "this step goes by their hold-outs; set another slots.optimise"),
)


@dataclass(frozen=True)
class Optimise(Method):
    """How the aggregated update changes the global model.

    ``step``: (state, previous tensors, combined tensors, options) -> (next tensors, next state).
    ``adjust``: (history, {device: cluster}, {device: weight}, options) -> (options of this round's steps, the record).
    """

    role: ClassVar[str] = "optimise"
    step: OptimiseStep | None = None
    moves: bool = True
    adjust: OptimiseAdjust | None = None


class Role(NamedTuple):
    """One slot of a recipe. ``plural``: it holds several methods at once."""

    decides: str
    kind: type[Method]
    plural: bool = False


ROLES: dict[str, Role] = {
    Schedule.role: Role("which parts exist and are trained in each stage", Schedule),
    Pace.role: Role("when a stage ends", Pace),
    Sharing.role: Role("what the modalities' encoders share", Sharing),
    Fusion.role: Role("how the modalities become one representation", Fusion),
    Cluster.role: Role("how devices are grouped", Cluster),
    Select.role: Role("who is asked in a round, among the eligible", Select),
    StandIn.role: Role("what stands in for an absent modality during training", StandIn),
    Prototypes.role: Role("prototypes, computed on the devices and merged", Prototypes),
    Objective.role: Role("terms of the local loss, summed", Objective, plural=True),
    Upload.role: Role("what a device sends of what it trained", Upload),
    Repair.role: Role("what is replaced in uploads before they are combined", Repair),
    Weight.role: Role("weights of the devices", Weight),
    Combine.role: Role("how uploads become one", Combine),
    Optimise.role: Role("how the mean changes the global model", Optimise),
}

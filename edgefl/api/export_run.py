"""A run's final state as ONNX bundles, written beside its ledger and recorded in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgefl.api.runs import BUNDLES, read_run
from edgefl.encoder_kinds import kinds_not_installed
from edgefl.errors import DataError, ExportError, RunError
from edgefl.export.bundle_format import BOTH, TOLERANCE, USUAL, ZERO, MaskName, OwnMask
from edgefl.export.form import OPSETS, PLAIN, Form
from edgefl.export.precision_record import EXACT
from edgefl.label_spaces import spaces_in
from edgefl.models.spec import PROTOTYPES, is_task
from edgefl.plan.job import RunPlan, Stage
from edgefl.plan.packed_sizes import object_bytes
from edgefl.plan.stages import of_spaces
from edgefl.records import Manifest
from edgefl.registry import chosen
from edgefl.run_records import BundleRow, RunReport
from edgefl.storage.checkpoint_paths import is_own
from edgefl.storage.disk import ledger_of
from edgefl.storage.objects import ObjectStore

if TYPE_CHECKING:
    from edgefl.export.drafts import TrainedState
    from edgefl.export.measure import Samples
    from edgefl.training.embeddings import Tensors

#: Folder of a run's encoders as checkpoints of `transformers`.
CHECKPOINTS = "checkpoints"
WEIGHTS = "weights.safetensors"
MaskChoice = Literal["auto", OwnMask, "both"]


@dataclass(frozen=True)
class FinalState:
    """State of a run after its last finished round. ``first``: the initial state."""

    report: RunReport
    plan: RunPlan
    stage: Stage
    round: int
    manifest: Manifest
    first: Manifest

    @property
    def untrained(self) -> tuple[str, ...]:
        """Parts that the recipe trains and that still are what the run began with: no device sent an update of them.

        A part without tensors, such as the head of a model that has none, is the same object whoever sends it.
        """
        meant, empty = {part for stage in self.plan.stages for part in stage.trained}, object_bytes({})
        same = [p for p in self.stage.present if p in meant and self.manifest.get(p) == self.first.get(p)]
        return tuple(p for p in same if p not in self.manifest or self.manifest[p].size > empty)


@dataclass(frozen=True)
class Exported:
    """An export: the state it came from, the mask, the folder and its bundles."""

    state: FinalState
    mask: str
    directory: Path
    rows: list[BundleRow]


def export_run(
    directory: Path,
    *,
    output: Path | None = None,
    mask: MaskChoice = "auto",
    labels: str = "",
    capacity: int | None = None,
    tolerance: float = TOLERANCE,
    form: Form = PLAIN,
    calibrate: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Export the run in ``directory`` and record the bundles in its ledger; ``say`` takes its progress in words.

    ``labels``: the label set that bundles answer, "": of several each, in a folder of its name. ``calibrate``: samples
    for precisions below f32; None: the run's test set. Raises RunError (nothing finished yet), ExportError (nothing is
    published then), DataError, StoreError.
    """
    from coordinator.ledger.ledger import Ledger
    from edgefl.export.bundle import export_bundles

    if form.opset not in OPSETS:
        raise ExportError(f"unknown operator set {form.opset}", remedy=f"Choose {', '.join(map(str, OPSETS))}.")
    state, target, rows = final_state(directory), output or directory / BUNDLES, []
    if state.plan.model.declared:
        way_out = f"Write its weights: edgefl export {state.report.run} --to safetensors"
        raise ExportError("only the devices' own code can build the run's model (model.own)", remedy=way_out)
    spaces = spaces_in(state.plan.model.label_names)
    apart = len(spaces) > 1 and not (labels and output)  # a folder for each set
    asked = [labels] if labels else list(spaces) if apart else [""]
    for space in asked:
        one = with_labels(state, space)
        say(_what(one) + (f"; label set {space}" if space else ""))
        trained = _trained(one, ObjectStore(directory / "objects"))
        offered = _own_mask(one.plan, trained.parts, say) if mask == "auto" else mask
        found = export_bundles(
            trained,
            target / space if apart else target,
            capacity=capacity,
            mask=offered,
            tolerance=tolerance,
            form=form,
            samples=_samples(one.plan, calibrate) if set(form.precisions) - {EXACT} else None,
            progress=lambda line: say(f"  {line}"),
        )
        if one.untrained:
            say(f"warning: {_never_trained(one)}")
        rows += [msgspec.structs.replace(row, name=f"{space}/{row.name}") for row in found] if apart else found
    with Ledger(ledger_of(directory), create=False) as ledger:
        for row in rows:  # those inside the run's directory by their path from there
            path = Path(row.path)
            kept = str(path.relative_to(directory)) if path.is_relative_to(directory) else row.path
            name = row.name if row.precision == EXACT else f"{row.name} {row.precision}"
            ledger.add_bundle(state.report.run, msgspec.structs.replace(row, path=kept, name=name))
    return Exported(state, offered, target, rows)


def export_checkpoints(directory: Path, *, output: Path | None = None) -> dict[str, Path]:
    """Write a run's encoders that began with checkpoints of `transformers` as such; modality -> its folder.

    Raises RunError (nothing finished yet), ExportError where there is none or a folder is in use, ModelError.
    """
    from edgefl.models.way_back import write_checkpoint

    state = final_state(directory)
    trained = _trained(state, ObjectStore(directory / "objects"))
    encoders = {m: e for m, e in trained.model.encoders.items() if e.pretrained and not is_own(e.pretrained)}
    root = output or directory / CHECKPOINTS
    if not encoders or state.stage.depth < trained.model.stages:
        raise ExportError(
            "no encoder of the run began with a checkpoint of transformers and has all its blocks",
            remedy="Export it as ONNX, without --to.",
        )
    if root.exists() and any(root.iterdir()):
        raise ExportError(f"{root} is not empty", remedy="Name a new or empty directory with -o DIR.")
    folders = {m: root / m for m in encoders}
    for modality, folder in folders.items():
        write_checkpoint(trained.model, modality, trained.parts, folder)
    return folders


def export_weights(directory: Path, *, output: Path | None = None) -> Path:
    """Write the weights of a run with ``model.own`` as ``edgefl.client.save`` does; the file.

    Raises RunError (nothing finished yet), ExportError for a model of EdgeFL's own, StoreError.
    """
    from edgefl.models.declared import write_declared
    from edgefl.protocol.tensors import decode_part

    state, store = final_state(directory), ObjectStore(directory / "objects")
    declared = state.plan.model.declared
    if not declared:
        text = "the run's model is EdgeFL's own"
        raise ExportError(text, remedy="Export it as ONNX, without --to, or its encoders with --to transformers.")
    file = output or directory / WEIGHTS
    write_declared(file, {part: decode_part(store.read(state.manifest[part].id)) for part in declared.parts})
    return file


def _trained(state: FinalState, store: ObjectStore) -> TrainedState:
    """The state's parts, from the store."""
    from edgefl.aggregation.history import load as load_memory
    from edgefl.export.drafts import TrainedState
    from edgefl.protocol.tensors import decode_part
    from edgefl.training.fill import matcher_of

    memory = load_memory(store, state.manifest)
    networks = memory.networks
    wanted = {*state.stage.present, PROTOTYPES, *(name for one in networks.values() for name in one)}
    parts = {part: decode_part(store.read(state.manifest[part].id)) for part in sorted(wanted & set(state.manifest))}
    fresh = _statistics(state, parts)
    return TrainedState(
        state.plan.model,
        state.stage,
        parts | fresh,
        {part: ref for part, ref in state.manifest.items() if part not in fresh},
        matcher_of(state.plan.slots, networks, memory.k),
        networks,
        tuple(state.untrained),
        _default_mask(state.plan),
        state.plan.slots.missing,
    )


def _samples(plan: RunPlan, calibrate: Path | None) -> Samples:
    """Samples to measure lower precisions with. Raises ExportError when there are none, DataError for bad ones."""
    from edgefl.export.measure import Samples
    from edgefl.training.evaluate import load_test_set

    path = str(calibrate or plan.test)
    if not path or path == ".":
        raise ExportError(
            "the run has no test set to measure a lower precision with",
            remedy="Give samples of your own with --calibrate DATA: an .npz file or a folder with manifest.jsonl.",
        )
    try:
        return Samples(load_test_set(path, plan.model), "given by --calibrate" if calibrate else "the run's test set")
    except DataError as error:
        raise DataError(
            f"lower precisions are measured with samples: {error.message}",
            remedy="Give samples of your own with --calibrate DATA.",
        ) from error


def final_state(directory: Path) -> FinalState:
    """The state of the run in ``directory`` after its last finished round.

    Raises RunError when there is none yet, ExportError for a kind of encoder that is not known here.
    """
    from coordinator.ledger.ledger import Ledger

    report = read_run(directory)
    with Ledger(ledger_of(directory), create=False) as ledger:
        plan = ledger.plan(report.run)
        position = ledger.position(report.run)
        first = ledger.states(report.run)[0, 0]
    if position.stage == 0:
        raise RunError(
            f"run {report.run!r} has not finished a round: there is nothing to export",
            remedy="Wait for its first round, or export another run; `edgefl runs` lists them.",
        )
    if unknown := kinds_not_installed(encoder.kind for encoder in plan.model.encoders.values()):
        raise ExportError(
            f"run {report.run}: {unknown}",
            remedy="A module of a program's own is exported there, without training: edgefl.run(…, in_process=True, "
            f"resume={report.run!r}); or here by an entry point of that name (docs/python.md).",
        )
    stage = next(stage for stage in plan.stages if stage.index == position.stage)
    return FinalState(report, plan, stage, position.round, position.manifest, first)


def with_labels(state: FinalState, space: str) -> FinalState:
    """The state with the classifier of one label set alone, "": as it is. Raises ExportError for an unknown set."""
    model = state.plan.model
    spaces = spaces_in(model.label_names)
    if not space:
        return state
    if space not in spaces:
        known = f"it has {', '.join(spaces)}" if spaces else "its labels are of no set"
        raise ExportError(
            f"the run has no label set {space!r:.60}: {known}", remedy="Leave --labels out, or name one of its sets."
        )
    names = tuple(model.label_names[place] for place in spaces[space])
    own = msgspec.structs.replace(model, classes=len(names), label_names=names)
    stages = tuple(of_spaces(stage, [space]) for stage in state.plan.stages)
    plan = msgspec.structs.replace(state.plan, model=own, stages=stages)
    return replace(state, plan=plan, stage=of_spaces(state.stage, [space]))


def _statistics(state: FinalState, parts: dict[str, Tensors]) -> dict[str, Tensors]:
    """The heads with batch statistics taken on the test set's inputs, where those of the state are other weights'."""
    if not state.plan.slots.statistics:
        return {}
    from edgefl.training.embeddings import heads_with_statistics
    from edgefl.training.evaluate import load_test_set

    try:
        test = load_test_set(state.plan.test, state.plan.model)
    except DataError as error:
        raise ExportError(
            f"the heads' batch statistics are taken on the run's test set: {error.message}",
            remedy=f"Put {state.plan.test or 'data.test'} back, or train with model.head.norm: layer.",
        ) from error
    return heads_with_statistics(state.plan.model, state.stage, parts, test)


def _default_mask(plan: RunPlan) -> MaskName:
    """Default mask of a bundle, used by calls without one: zeros if the recipe trained with zeros (decision 0055)."""
    return ZERO if chosen("missing", plan.slots.missing)[0].name == ZERO else USUAL


def _own_mask(plan: RunPlan, parts: Collection[str], say: Callable[[str], None]) -> str:
    """The stand-in that the recipe trained its model with, or where inference cannot make it those in its place."""
    from edgefl.training.fill import at_inference

    own, mask = chosen("missing", plan.slots.missing)[0], at_inference(plan.slots.missing, plan.model, {})
    if mask != ZERO:
        return mask
    made = chosen("prototypes", plan.slots.prototypes)[0].method
    clusters = made.local is not None and made.candidates is None
    mask = BOTH if PROTOTYPES in parts and not clusters else ZERO
    if own.name != ZERO and not (own.method.tables and mask == BOTH):
        say(f"stand-ins in the bundles: {mask}; those of missing: {own.name} are made in training alone")
    return mask


def _what(state: FinalState) -> str:
    last = max((stage for stage in state.plan.stages if stage.rounds), key=lambda stage: stage.index)
    place = f"stage {state.stage.index} of {last.index}, round {state.round} of {state.stage.rounds}"
    unfinished = "" if state.report.status == "done" else f" (the run is {state.report.status})"
    return f"exporting run {state.report.run} after {place}{unfinished}; this takes some seconds a bundle"


def _never_trained(state: FinalState) -> str:
    text = f"no device sent an update of {', '.join(state.untrained)}: in the bundles these are as the run began"
    if not any(map(is_task, state.untrained)):
        return text
    why = " (its classifiers stay on the devices)" if state.plan.slots.exchange != "all" else ""
    return f"{text}{why}, and labels are made by an untrained classifier"

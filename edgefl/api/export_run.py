"""A run's final state as ONNX bundles, written beside its ledger and recorded in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from edgefl.api.runs import BUNDLES, read_run
from edgefl.budget.stage_cost import object_bytes
from edgefl.errors import DataError, ExportError, RunError
from edgefl.export.bundle_format import TOLERANCE, USUAL, ZERO, Mask, MaskName
from edgefl.export.form import OPSETS, PLAIN, Form
from edgefl.export.precision_record import EXACT
from edgefl.models.spec import PROTOTYPES
from edgefl.plan.job import RunPlan, Stage
from edgefl.records import Manifest
from edgefl.registry import chosen, method
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
MaskChoice = Literal["auto", Mask]


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
    capacity: int | None = None,
    tolerance: float = TOLERANCE,
    form: Form = PLAIN,
    calibrate: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Export the run in ``directory`` and record the bundles in its ledger; ``say`` takes its progress in words.

    ``calibrate``: samples for precisions below f32; None: the run's test set. Raises RunError (nothing finished yet),
    ExportError (nothing is published then), DataError, StoreError.
    """
    from coordinator.ledger.ledger import Ledger
    from edgefl.export.bundle import export_bundles

    if form.opset not in OPSETS:
        raise ExportError(f"unknown operator set {form.opset}", remedy=f"Choose {', '.join(map(str, OPSETS))}.")
    state = final_state(directory)
    say(_what(state))
    trained = _trained(state, ObjectStore(directory / "objects"))
    offered = _own_mask(state.plan, trained.parts) if mask == "auto" else mask
    target = output or directory / BUNDLES
    rows = export_bundles(
        trained,
        target,
        capacity=capacity,
        mask=offered,
        tolerance=tolerance,
        form=form,
        samples=_samples(state.plan, calibrate) if set(form.precisions) - {EXACT} else None,
        progress=lambda line: say(f"  {line}"),
    )
    if state.untrained:
        say(f"warning: {_never_trained(state)}")
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
    """The state of the run in ``directory`` after its last finished round. Raises RunError when there is none yet."""
    from coordinator.ledger.ledger import Ledger
    from edgefl.plan.compile import with_statistics

    report = read_run(directory)
    with Ledger(ledger_of(directory), create=False) as ledger:
        plan = with_statistics(ledger.plan(report.run))
        position = ledger.position(report.run)
        first = ledger.states(report.run)[0, 0]
    if position.stage == 0:
        raise RunError(
            f"run {report.run!r} has not finished a round: there is nothing to export",
            remedy="Wait for its first round, or export another run; `edgefl runs` lists them.",
        )
    stage = next(stage for stage in plan.stages if stage.index == position.stage)
    return FinalState(report, plan, stage, position.round, position.manifest, first)


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


def _own_mask(plan: RunPlan, parts: Collection[str]) -> Mask:
    """The stand-in that the recipe trained its model with."""
    masks: tuple[MaskName, ...] = get_args(MaskName)
    for mask in masks:
        one = method("missing", mask)
        if mask in plan.slots.missing and not one.default and one.offered(plan.model, {}):
            return mask
    made = chosen("prototypes", plan.slots.prototypes)[0].method
    clusters = made.local is not None and not made.classes
    return "both" if PROTOTYPES in parts and not clusters else ZERO


def _what(state: FinalState) -> str:
    last = max((stage for stage in state.plan.stages if stage.rounds), key=lambda stage: stage.index)
    place = f"stage {state.stage.index} of {last.index}, round {state.round} of {state.stage.rounds}"
    unfinished = "" if state.report.status == "done" else f" (the run is {state.report.status})"
    return f"exporting run {state.report.run} after {place}{unfinished}; this takes some seconds a bundle"


def _never_trained(state: FinalState) -> str:
    text = f"no device sent an update of {', '.join(state.untrained)}: in the bundles these are as the run began"
    if "task" not in state.untrained:
        return text
    why = " (its classifiers stay on the devices)" if state.plan.slots.exchange != "all" else ""
    return f"{text}{why}, and labels are made by an untrained classifier"

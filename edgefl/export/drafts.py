"""Drafts of bundles before they are files: trained state, graphs and manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgefl.errors import ExportError
from edgefl.export.bundle_format import USUAL, ZERO, Manifest, MaskName, table_names
from edgefl.export.tables import table_arrays, unmarked
from edgefl.models.spec import ModelSpec, is_lora
from edgefl.plan.job import Stage
from edgefl.plan.stages import restrict
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.table import ClassMeans
from edgefl.records import Manifest as State
from edgefl.registry import Slot

if TYPE_CHECKING:
    from edgefl.export.graph import BundleGraph
    from edgefl.training.matching import Networks, WeightedNetworks


Parts = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class TrainedState:
    """A run's trained model, as input to an export.

    ``parts``: part -> tensors, for every part in ``stage.present``, and "prototypes" where a mask uses them. ``refs``:
    stored objects of the run's state, without heads with recomputed statistics. ``matcher``: prototype matching method;
    ``networks``: names of the matching networks of a trained matcher, all among ``parts``. ``untrained``: parts without
    any training. ``plain``: default mask of an inference call. ``missing``: recipe slot for missing modalities.
    """

    model: ModelSpec
    stage: Stage
    parts: Parts
    refs: State = field(default_factory=dict)
    matcher: Matcher = DEFAULT_MATCHER
    networks: Networks = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    plain: MaskName = USUAL
    missing: Slot = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A bundle's graph, the manifest of its ports, and its prototype tables by input, in the graph's order."""

    graph: BundleGraph
    manifest: Manifest
    tables: Mapping[str, np.ndarray]


def drafted(state: TrainedState, manifests: Sequence[Manifest], padded: Mapping[str, ClassMeans]) -> list[Draft]:
    """Drafts of the bundles described by the manifests; low-rank terms are merged into the weights.

    Raises ExportError when a network that a matcher needs is missing.
    """
    from edgefl.export.graph import BundleGraph
    from edgefl.models.low_rank import merged
    from edgefl.models.parts import loaded
    from edgefl.training.fill import inferred

    model, matcher = state.model, state.matcher
    every = list(dict.fromkeys(m for one in manifests for m in one.modalities))
    present = [part for part in restrict(state.stage, every).present if not is_lora(part)]
    plain = msgspec.structs.replace(model, lora=msgspec.UNSET)
    built = loaded(plain, present, merged(state.parts, model.lora))
    matching = matcher.trained and any(one.capacity for one in manifests)
    networks = {m: _networks(state, m) for m in every} if matching else {}
    drafts = []
    for one in manifests:
        given = one.modalities
        make, options = inferred(one.masks[0] if one.masks else ZERO, state.missing)
        tables = {m: padded[m] for m in table_names(model, given, matcher) if one.capacity}
        own = {m: networks[m] for m in given if tables and matcher.trained}
        weights = tuple(weight for each in own.values() for weight, _ in each)
        graph = BundleGraph(built, one.depth, given, make, matcher, own, options)
        arrays = table_arrays(tables)
        own_tables = unmarked(arrays) if one.mask == ZERO else arrays
        drafts.append(Draft(graph, msgspec.structs.replace(one, networks=weights), own_tables))
    return drafts


def _networks(state: TrainedState, modality: str) -> WeightedNetworks:
    """The matcher networks of ``modality`` with weights. Raises ExportError without any."""
    from edgefl.training.matching import matcher_networks

    part = f"match/{modality}"
    weights = state.networks.get(part, {})
    missing = [name for name in weights if name not in state.parts]
    if missing or not weights:
        raise ExportError(
            f"the matcher '{state.matcher.metric}' needs a small network of '{modality}', and the state "
            + (f"lacks {', '.join(missing[:5])}" if missing else "holds none"),
            remedy="Export the state of a run's last round, or with --mask zero.",
        )
    return matcher_networks(state.model, state.parts, part, weights)

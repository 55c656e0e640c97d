"""A whole round on the server: from the devices' updates to the next state, part by part, and the record of it.

Each part is the mean over the devices that trained it, with those that could have and kept it, so devices with other
depths, modalities or shares can be in one round; where the recipe says so, there is one mean for each audience. One
device's part is in memory at a time. Devices are taken in sorted order: the result does not depend, not even in its
last bit, on who arrived first. Whatever is left out is in the record with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl.aggregation import clusters as groups
from edgefl.aggregation import history
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.mean import (
    Layout,
    MisfitError,
    Outcome,
    Tensors,
    check,
    check_finite,
    faded,
    moved,
    stored_layout,
)
from edgefl.aggregation.prototype_merge import merge_prototypes
from edgefl.aggregation.server_state import (
    RESIDUAL,
    SERVER,
    AudiencePart,
    fold_residuals,
    is_shared,
    publish,
    shared,
    without_packed,
)
from edgefl.aggregation.weights import Standing, absent_from, shares_of
from edgefl.errors import ProtocolError
from edgefl.models.spec import PROTOTYPES, SIGNATURE, is_matcher
from edgefl.plan.job import Exchange, Transfer
from edgefl.plan.stages import exchange_of
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest, ObjectRef
from edgefl.registry import Choice, Recipe, choose
from edgefl.storage.objects import ObjectStore

#: The slots that act on updates, in this order. Selection comes before a round.
_ROLES = ("cluster", "repair", "weight", "combine", "optimise", "prototypes")
#: Largest "prototypes" part: 310 classes of 3 tables at width 768 are 2.9 MB.
_PROTOTYPES_LIMIT_BYTES = 64 * 2**20

#: In the record, of a device's whole update.
_MODEL = "model"

Load = Callable[[], Tensors]


class RoundTerms(NamedTuple):
    """The terms a round is aggregated by, beside the updates and the recipe.

    ``similarity``: the devices' weights by the models' outputs, where the slot weight has such; those without one are
    left out (part "model"). ``transfer``: how the new state will travel, and so what devices will hold of it.
    ``largest_share``: the most that a device may weigh in a part.
    """

    similarity: Mapping[str, float] = {}
    seed: int = 0
    transfer: Transfer = Transfer()
    largest_share: float = 1.0


def aggregate_round(
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    previous: Manifest,
    recipe: Recipe | None = None,
    terms: RoundTerms | None = None,
) -> tuple[Manifest, dict[str, Any]]:
    """The next state, whose new objects are in ``store``, and the record of the round as plain values.

    ``previous`` holds every part of the model; parts that no device trained keep their object.
    A device may bring two updates, made from different states; in the record they have the names of ``UpdateInfo``.
    In the record: per slot, role -> {choice, options}; ``parts`` {part: {devices: {name: weight}, kept: weight}},
    weights as they took effect, sum 1, ``kept`` that of the part as it was, where devices kept it;
    ``refused`` [{device, part, reason, detail}], reason names, shape, dtype, not_finite, range, malformed or
    unknown_part; ``ignored`` {part: [devices without samples of it]}; ``kept`` {part: why it stays as it was
    although it was sent}; ``stale`` {name: {device, staleness, factor}}, of updates made from earlier states, whose
    changes are damped by the factor; ``clusters``, ``repaired`` and ``momentum`` where a slot made them.
    Raises StoreError when the store fails (no fault of a device), ConfigError for a recipe with unknown methods,
    ValueError when two updates have one name.
    """
    with store.write_batch() as made:
        return _aggregated(updates, made, previous, recipe or {}, terms or RoundTerms())


def _aggregated(
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    previous: Manifest,
    recipe: Recipe,
    terms: RoundTerms,
) -> tuple[Manifest, dict[str, Any]]:
    slots = {role: choose(role, recipe) for role in _ROLES}
    if len({update.name for update in updates}) != len(updates):
        raise ValueError("a device appears twice among the updates of one round")
    updates, diverged = _alike(sorted(updates, key=lambda update: update.name), slots["weight"], terms.similarity)
    record: dict[str, Any] = {role: {"choice": slot.name, **slot.options} for role, slot in slots.items()}
    record |= {"parts": {}, "refused": [], "ignored": {}, "kept": {}}
    if any(update.staleness for update in updates):
        record["stale"] = {
            u.name: {"device": u.device, "staleness": u.staleness, "factor": u.factor} for u in updates if u.staleness
        }
    state = without_packed(previous)
    _refuse(record, _MODEL, diverged)
    signatures, strange = groups.sign(slots["cluster"], updates, store)
    state |= signatures
    _refuse(record, SIGNATURE, strange)
    memory = history.load(store, previous)
    clusters = groups.assign(slots["cluster"], state, store, memory, terms.seed)
    memory = history.note(memory, updates, clusters)
    if clusters:
        record["clusters"] = clusters
    step = history.server_step(slots["optimise"], memory, updates, clusters, record)
    standing = _standing(updates, clusters, slots, terms)
    exchange = exchange_of(recipe.get("weight") or {})
    work = _Work(store, previous, slots, updates, standing, step, terms, exchange, {})
    mended, personal = _mended(slots["repair"], updates, shared(previous), store, clusters, record)
    names = {part for update in updates for part in update.manifest}
    for part in sorted(names - {SIGNATURE}):
        objects = {u.name: u.manifest[part] for u in updates if part in u.manifest}
        for key, ref, outcome in _outcomes(work, part, objects, mended):
            if outcome is not None and outcome.tensors is not None:
                state.pop(RESIDUAL + key, None)
            if ref is not None:
                state[key] = ref
            if outcome is not None:
                _note(record, key, outcome)
    if terms.transfer.whole:
        state = fold_residuals(store, state)
    state |= {key: store.put(encode_part(tensors)) for key, tensors in personal.items()}
    if work.whole:
        record["whole"] = dict(work.whole)
    memory = msgspec.structs.replace(memory, networks={**memory.networks, **history.networks(record)})
    state[history.KEY] = store.put(msgspec.json.encode(memory))
    return state, record


def _alike(
    updates: list[UpdateInfo], slot: Choice, similarity: Mapping[str, float]
) -> tuple[list[UpdateInfo], dict[str, tuple[str, str]]]:
    """The updates with a weight, where models are weighed by their likeness; and device -> why the others have none."""
    if slot.method.similarity is None:
        return updates, {}
    why = ("not_finite", "its outputs on the probe samples are not finite numbers: its training has diverged")
    diverged = {update.device: why for update in updates if update.device not in similarity}
    return [update for update in updates if update.device in similarity], diverged


def _mended(
    slot: Choice,
    updates: Sequence[UpdateInfo],
    model: Manifest,
    store: ObjectStore,
    clusters: Mapping[str, int],
    record: dict[str, Any],
) -> tuple[Mapping[tuple[str, str], Tensors], Mapping[str, Tensors]]:
    """(device, part) -> tensors in place of its own; and the parts for personal models. Noted in the record."""
    if slot.method.mend is None:
        return {}, {}
    mended, personal, record["repaired"] = slot.bind(slot.method.mend)(updates, model, store, clusters)
    return mended, personal


def _replaced(state: Tensors | None, previous: Tensors, combined: Tensors) -> tuple[dict[str, Any], None]:
    """The step of what is trained once: the combined tensors are the next ones."""
    return dict(combined), None


class _Work(msgspec.Struct, frozen=True):
    """What every part of a round is made with."""

    store: ObjectStore
    previous: Manifest
    slots: dict[str, Choice]
    updates: Sequence[UpdateInfo]
    standing: Standing
    step: Callable[..., Any]
    terms: RoundTerms
    exchange: Exchange
    whole: dict[str, str]  # key -> why it travels whole although it was to be packed


_Result = tuple[str, ObjectRef | None, Outcome | None]


def _standing(
    updates: Sequence[UpdateInfo],
    clusters: Mapping[str, int],
    slots: Mapping[str, Choice],
    terms: RoundTerms,
) -> Standing:
    return Standing(
        modalities={u.name: u.modalities for u in updates},
        clusters={u.device: clusters[u.device] for u in updates if u.device in clusters},
        similarity=terms.similarity,
        own_models=slots["cluster"].options.get("models") == "own",
        small=str(slots["prototypes"].options.get("combine", "average")),
        most=terms.largest_share,
    )


def _outcomes(
    work: _Work, part: str, objects: Mapping[str, ObjectRef], mended: Mapping[tuple[str, str], Tensors]
) -> list[_Result]:
    """(key in the state, new object, what became of it) for each audience of ``part``."""
    if part == PROTOTYPES:
        outcome = _prototypes(work, objects)
        return [(part, _stored(work.store, outcome), outcome)]
    if part not in work.previous:
        return [(part, None, _unknown(objects))]
    limit = 2 * work.previous[part].size + 2**20  # another encoding differs by two at most, headers by less than 1 MiB
    loaders = {
        device: _mending(_loader(work.store, ref, limit), mended.get((device, part))) for device, ref in objects.items()
    }
    counts = {u.name: u.samples.get(part, 0) for u in work.updates if u.name in objects}
    ignored = tuple(device for device, count in counts.items() if count <= 0)
    layout = cache(lambda: stored_layout(work.store, work.previous[part]))
    for update in work.updates:
        if update.staleness and update.name in objects:
            start, now = (_loader(work.store, refs[part], limit) for refs in (update.base, work.previous))
            loaders[update.name] = moved(loaders[update.name], start, now, update.factor, layout())
    keeps = work.slots["combine"].options.get("absent") == "keep"
    absent = absent_from(part, {u.name: u.samples for u in work.updates}) if keeps else {}
    shares = shares_of(
        part, counts, work.slots["weight"], work.standing, lambda device: _fitting(loaders[device](), layout()), absent
    )
    if not shares:
        none = Outcome(None, {"devices": {}}, {}, "no device trained it on any sample", ignored)
        return [(part, None, none)]
    if is_matcher(part):  # small networks are trained once, from nothing
        work = msgspec.structs.replace(work, step=_replaced)
    results: list[_Result] = []
    for audience, weights in shares.items():
        key = audience + part
        one = AudiencePart(key, part, work.previous.get(key, work.previous[part]))
        outcome = _mean(work, one, weights, loaders, ignored, results)
        started = work.exchange == "all" and (audience or len(shares) == 1)  # whether devices train from this state
        results += _published(work, one, outcome, feedback=bool(started))
    return results


def _published(work: _Work, part: AudiencePart, outcome: Outcome, *, feedback: bool) -> list[_Result]:
    """The part as devices will hold it, then what is kept for the next round: in this order into the state."""
    if outcome.tensors is None or is_matcher(part.name):
        return [(part.key, _stored(work.store, outcome), outcome)]
    made = publish(work.store, work.previous, part, outcome.tensors, work.terms.transfer, feedback=feedback)
    if made.whole:
        work.whole[part.key] = made.whole
    return [(part.key, made.ref, outcome), *((name, ref, None) for name, ref in made.kept.items())]


def _mean(
    work: _Work,
    part: AudiencePart,
    weights: Mapping[str, float],
    loaders: Mapping[str, Load],
    ignored: tuple[str, ...],
    results: list[_Result],
) -> Outcome:
    """The weighted mean of one part for one audience, and the server's step from the state before."""
    mean = work.slots["combine"].method.accumulate(stored_layout(work.store, part.base))
    refused: dict[str, tuple[str, str]] = {}
    kept_share = sum(weight for device, weight in weights.items() if device not in loaders)
    for device, weight in weights.items():
        if device not in loaders:
            continue
        try:
            mean.add(weight, loaders[device]())
        except MisfitError as error:
            refused[device] = (error.reason, error.message)
        except ProtocolError as error:
            refused[device] = ("malformed", error.message)
    taken = {device: weight for device, weight in weights.items() if device in loaders and device not in refused}
    if not taken:
        return Outcome(None, {"devices": {}}, refused, "every device that trained it was refused", ignored)
    total = sum(taken.values()) + kept_share
    told: dict[str, Any] = {"devices": {device: weight / total for device, weight in taken.items()}}
    kept = f"{SERVER}optimise/{part.key}"
    known = decode_part(work.store.read(work.previous[kept].id)) if kept in work.previous else None
    previous = _loader(work.store, part.base, 2 * part.base.size)()
    if kept_share > 0:  # after the others, so that integer buffers are a device's
        mean.add(kept_share, previous)
        told["kept"] = kept_share / total
    tensors, state = work.step(known, dict(previous), mean.result())
    try:
        check_finite(tensors)
    except MisfitError as error:
        refused |= dict.fromkeys(taken, (error.reason, f"of the new part {error.message}"))
        return Outcome(None, {"devices": {}}, refused, "its new values can not be calculated with", ignored)
    if state is not None:
        results.append((kept, work.store.put(encode_part(state)), None))
    return Outcome(tensors, told, refused, "", ignored)


def _stored(store: ObjectStore, outcome: Outcome) -> ObjectRef | None:
    return store.put(encode_part(outcome.tensors)) if outcome.tensors is not None else None


def _unknown(objects: Mapping[str, ObjectRef]) -> Outcome:
    detail = "the model has no such part"
    return Outcome(None, {"devices": {}}, dict.fromkeys(objects, ("unknown_part", detail)), detail)


def _prototypes(work: _Work, objects: Mapping[str, ObjectRef]) -> Outcome:
    loaders = {device: _loader(work.store, ref, _PROTOTYPES_LIMIT_BYTES) for device, ref in objects.items()}
    for update in work.updates:
        if update.staleness and update.name in loaders:
            loaders[update.name] = faded(loaders[update.name], update.factor)
    before = work.previous.get(PROTOTYPES)
    load_previous = _loader(work.store, before, _PROTOTYPES_LIMIT_BYTES) if before is not None else None
    return merge_prototypes(loaders, load_previous, work.slots["prototypes"], np.random.default_rng(work.terms.seed))


def _loader(store: ObjectStore, ref: ObjectRef, limit: int) -> Load:
    def load() -> Tensors:
        size = store.size(ref.id)
        if size > limit:
            raise ProtocolError(f"its object has {size} bytes, at most {limit} can be right")
        return decode_part(store.view(ref.id), limit, copy=False)

    return load


def _fitting(tensors: Tensors, layout: Layout) -> Tensors:
    """Raises MisfitError for tensors that are not those of the part."""
    check(tensors, layout)
    return tensors


def _mending(load: Load, better: Tensors | None) -> Load:
    """A device's part with some tensors replaced."""
    return load if better is None else lambda: {**load(), **better}


def _note(record: dict[str, Any], part: str, outcome: Outcome) -> None:
    if outcome.tensors is None:
        record["kept"][part] = outcome.kept
    else:
        record["parts"][part] = outcome.weights
    if outcome.ignored and is_shared(part):
        record["ignored"][part] = list(outcome.ignored)
    _refuse(record, part, outcome.refused)


def _refuse(record: dict[str, Any], part: str, refused: Mapping[str, tuple[str, str]]) -> None:
    for device, (reason, detail) in sorted(refused.items()):
        record["refused"].append({"device": device, "part": part, "reason": reason, "detail": detail})

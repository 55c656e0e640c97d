"""A whole round on the server: from the devices' updates to the next state, part by part, and the record of it.

Each part is the mean over the devices that trained it, with those that could have and kept it, so devices with other
depths, modalities or shares can be in one round; where the recipe says so, there is one mean for each audience. One
device's part is in memory at a time, and where values are compared between devices, pieces of all. Devices are taken in
sorted order: the result does not depend, not even in its last bit, on who arrived first. Whatever is left out is in the
record with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl.aggregation import history
from edgefl.aggregation.history import Record, Step, UpdateInfo
from edgefl.aggregation.mean import (
    Layout,
    Load,
    MisfitError,
    Outcome,
    Tensors,
    check,
    check_finite,
    faded,
    moved,
    refusal,
    stored_layout,
)
from edgefl.aggregation.noise import Entropy, Noise, with_noise
from edgefl.aggregation.pace import StageRound, StageTrack, noted
from edgefl.aggregation.pieces import Changes, changes_of
from edgefl.aggregation.prototype_merge import merge_prototypes
from edgefl.aggregation.server_state import (
    EVERYONE,
    RESIDUAL,
    SERVER,
    AudiencePart,
    fold_residuals,
    is_shared,
    of_device,
    publish,
    without_passing,
)
from edgefl.aggregation.weights import RoundContext, absent_from, assign, shares_of, sign
from edgefl.errors import ProtocolError
from edgefl.models.spec import PROTOTYPES, SIGNATURE, is_matcher, is_scheduled
from edgefl.plan.choice_of_k import recorded, summed
from edgefl.plan.job import Transfer
from edgefl.plan.privacy import resolved
from edgefl.plan.stages import compared_k, exchange_of
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest, ObjectRef
from edgefl.registry import Recipe, Screening, choose
from edgefl.storage.objects import ObjectStore

#: The slots that act on updates, in this order. Selection comes before a round.
_ROLES = ("pace", "cluster", "repair", "weight", "combine", "optimise", "prototypes")
#: Largest "prototypes" part: 310 classes of 3 tables at width 768 are 2.9 MB.
_PROTOTYPES_LIMIT_BYTES = 64 * 2**20

#: Before a part's name: what the pace keeps of it through a stage.
_OBSERVED = f"{SERVER}pace/"
#: In the record, of a device's whole update.
_MODEL = "model"
_DIVERGED = ("not_finite", "its outputs on the probe samples are not finite numbers: its training has diverged")


class RoundTerms(NamedTuple):
    """The terms a round is aggregated by, beside the updates and the recipe.

    ``similarity``: the devices' weights by the models' outputs, where the slot weight has such; those without one are
    left out (part "model"). ``transfer``: how the new state will travel, and so what devices will hold of it.
    ``largest_share``: the most that a device may weigh in a part. ``signatures``: of devices' hellos. ``stage``: that
    of the round; 0: none that a pace could end. ``trained``: the parts that it trains. ``devices``, ``rounds``: as
    many as a round, and the run, are planned for. ``attempts``: of this round, in each of which a device may have sent
    an update. ``entropy``: of the noise.
    """

    similarity: Mapping[str, float] = {}
    seed: int = 0
    transfer: Transfer = Transfer()
    largest_share: float = 1.0
    signatures: Mapping[str, bytes] = {}
    stage: int = 0
    trained: tuple[str, ...] = ()
    devices: int = 1
    rounds: int = 1
    attempts: int = 1
    entropy: Entropy = os.urandom


def aggregate_round(
    updates: Sequence[UpdateInfo],
    store: ObjectStore,
    previous: Manifest,
    recipe: Recipe | None = None,
    terms: RoundTerms | None = None,
) -> tuple[Manifest, Record]:
    """The next state, whose new objects are in ``store``, and the record of the round as plain values.

    ``previous`` holds every part of the model; parts that no device trained keep their object.
    A device may bring two updates, made from different states; in the record they have the names of ``UpdateInfo``.
    In the record: per slot, role -> {choice, options}; ``parts`` {part: {devices: {name: weight}, kept: weight}},
    weights as they took effect, sum 1, ``kept`` that of the part as it was, where devices kept it;
    ``refused`` [{device, part, reason, detail}], reason names, shape, dtype, not_finite, range, malformed or
    unknown_part; ``ignored`` {part: [devices without samples of it]}; ``kept`` {part: why it stays as it was
    although it was sent}; ``stale`` {name: {device, staleness, factor}}, of updates made from earlier states, whose
    changes are damped by the factor; ``stage`` {rounds, best, over} of a pace that judges; ``screened`` {factors:
    {name: factor of its change, 0: left out}, and what the method adds}; ``noise`` (``Noise``) and
    ``account`` {epsilon, delta, budget, server}, so far, of a private run, whose parts have ``added`` (standard
    deviation of the server's noise) where devices add some; ``clusters``, ``repaired`` and ``momentum`` where a slot
    made them;
    ``choice_of_k`` where devices counted for it (``edgefl.plan.choice_of_k.recorded``).
    Raises StoreError when the store fails (no fault of a device), ConfigError for a recipe with unknown methods,
    ValueError when two updates have one name.
    """
    with store.write_batch() as made:
        this = _Round(updates, made, previous, recipe or {}, terms or RoundTerms())
        for part in this.parts():
            this.aggregate(part)
        return this.finish()


class _Round:
    """A round's inputs and what every part of it is made with; its next ``state`` and ``record`` as they grow."""

    def __init__(
        self, updates: Sequence[UpdateInfo], store: ObjectStore, previous: Manifest, recipe: Recipe, terms: RoundTerms
    ) -> None:
        slots, memory = {role: choose(role, recipe) for role in _ROLES}, history.load(store, previous)
        now = memory.combine or {}
        slots["combine"] = slots["combine"]._replace(options={**slots["combine"].options, **now})
        if len({update.name for update in updates}) != len(updates):
            raise ValueError("a device appears twice among the updates of one round")
        self.record: Record = {role: {"choice": slot.name, **slot.options} for role, slot in slots.items()}
        self.record |= {"parts": {}, "refused": [], "ignored": {}, "kept": {}}
        updates = sorted(updates, key=lambda update: update.name)
        if slots["weight"].method.similarity is not None:
            self._refuse(_MODEL, {u.device: _DIVERGED for u in updates if u.device not in terms.similarity})
            updates = [u for u in updates if u.device in terms.similarity]
        stale = [u for u in updates if u.staleness]
        if stale:
            self.record["stale"] = {
                u.name: {"device": u.device, "staleness": u.staleness, "factor": u.factor} for u in stale
            }
        self.updates, self.store, self.previous, self.slots, self.terms = updates, store, previous, slots, terms
        combine = choose("combine", resolved(recipe, terms.devices, terms.rounds))
        combine = slots["combine"] = combine._replace(options={**combine.options, **now})
        self.noise: Noise | None = combine.bind(combine.method.noise)() if combine.method.noise else None
        if self.noise is not None:
            self.record["noise"] = {name: value for name, value in self.noise._asdict().items() if value}
        self.exchange = exchange_of(recipe.get("weight") or {})
        signatures, strange = sign(slots["cluster"], updates, store, terms.signatures, previous)
        self._refuse(SIGNATURE, strange)
        self.state = without_passing(previous) | signatures
        groups = assign(slots["cluster"], self.state, store, memory, terms.seed)
        if groups:
            self.record["clusters"] = groups
        self.memory = history.note(memory, updates, groups)
        if self.memory.stage.index != terms.stage:
            self.state = {key: ref for key, ref in self.state.items() if not key.startswith(_OBSERVED)}
        self.step = history.server_step(slots["optimise"], self.memory, updates, groups, self.record)
        self.mended: Mapping[tuple[str, str], Tensors] = {}
        self.factors: Mapping[str, float] = {}  # while they are screened, changes are as they came
        self.factors = self._screen()
        self.updates = updates = [u for u in updates if self.factors.get(u.name) != 0]
        self.context = RoundContext(
            modalities={u.name: u.modalities for u in updates},
            clusters={u.device: groups[u.device] for u in updates if u.device in groups},
            similarity=terms.similarity,
            own_models=slots["cluster"].flag("own_models"),
            small=str(slots["prototypes"].options.get("combine", "average")),
            most=terms.largest_share,
        )
        repair = slots["repair"]
        if repair.method.mend is not None:
            mend = repair.bind(repair.method.mend)
            known = {device: track.weight for device, track in self.memory.devices.items()}
            self.mended, self.record["repaired"] = mend(updates, previous, store, groups, known)
        self.facts: dict[str, dict[str, float]] = {}  # part -> what the pace observed
        self.whole: dict[str, str] = {}  # key -> why it travels whole although it was to be packed

    def parts(self) -> list[str]:
        """The parts that were sent; with noise all of the stage: one left as it was would tell who was missing."""
        sent = {part for update in self.updates for part in update.manifest} - {SIGNATURE}
        return sorted(sent.union(self.terms.trained) if self.noise else sent)

    def finish(self) -> tuple[Manifest, Record]:
        """The next state and the record, once every part is aggregated."""
        state = fold_residuals(self.store, self.state) if self.terms.transfer.whole else self.state
        personal: dict[str, dict[str, np.ndarray]] = {}
        for (device, part), tensors in self.mended.items():
            layers = personal.setdefault(of_device(device) + self.slots["repair"].name, {})
            layers |= {f"{part}|{name}": value for name, value in tensors.items()}
        state |= {key: self.store.put(encode_part(layers)) for key, layers in personal.items()}
        if self.whole:
            self.record["whole"] = self.whole
        networks = {**self.memory.networks, **history.networks(self.record)}
        memory = msgspec.structs.replace(self.memory, networks=networks)
        counts = history.counted(self.updates)
        total = summed(counts.values())
        if total is not None and compared_k(self.slots["prototypes"]):
            self.record["choice_of_k"] = recorded(total, list(counts))
            memory = msgspec.structs.replace(memory, k=total.best)
        memory = msgspec.structs.replace(memory, stage=self._track(memory.stage))
        if memory.stage.over:
            state |= {key: ref for key, ref in memory.stage.state.items() if key != history.KEY}
            memory = msgspec.structs.replace(memory, stage=msgspec.structs.replace(memory.stage, state={}))
        combine = self.slots["combine"]
        if combine.method.account is not None:
            uploads = (memory.uploads or 0) + self.terms.attempts
            account = combine.bind(combine.method.account)(memory.spent or 0.0, uploads)
            self.record["account"] = account.record
            memory = msgspec.structs.replace(memory, spent=account.spent, over=account.over)
            if self.noise is not None and self.noise.shares:
                memory = msgspec.structs.replace(memory, uploads=uploads)
        return state | {history.KEY: self.store.put(msgspec.json.encode(memory))}, self.record

    def _track(self, track: StageTrack) -> StageTrack:
        """The stage with this round; the record has what its pace says of it."""
        if not self.terms.stage:
            return StageTrack()
        this = StageRound(history.losses(self.updates), self.facts)
        track = noted(track, self.slots["pace"], self.terms.stage, this, self.previous)
        if track.index:
            self.record["stage"] = {"rounds": len(track.rounds), "best": track.best, "over": track.over}
        return track

    def aggregate(self, part: str) -> None:
        """The next values of ``part`` for each audience, into state and record."""
        updates = [u for u in self.updates if part in u.manifest]
        if part == PROTOTYPES:
            outcome = self._prototypes(updates)
            if outcome.tensors is not None:
                self.state[part] = self.store.put(encode_part(outcome.tensors))
            self._note(part, outcome)
        elif part not in self.previous:
            detail = "the model has no such part"
            refused = dict.fromkeys((u.name for u in updates), ("unknown_part", detail))
            self._note(part, Outcome(refused=refused, kept=detail))
        else:
            self._means(part, updates)

    def _screen(self) -> Mapping[str, float]:
        """Name -> factor of its change, of updates that count less, or for nothing, beside the others of the round."""
        combine = self.slots["combine"]
        if combine.method.screen is None:
            return {}
        holders: dict[str, list[UpdateInfo]] = {}
        for update in self.updates:
            for part in filter(is_scheduled, update.manifest.keys() & self.previous.keys()):
                holders.setdefault(part, []).append(update)
        changes = {part: self._changes(part, own) for part, own in sorted(holders.items())}
        factors, told, options = Screening(*combine.bind(combine.method.screen)(changes))
        self.record["screened"] = {"factors": factors, **told}
        if options:
            self.memory = msgspec.structs.replace(self.memory, combine={**(self.memory.combine or {}), **options})
        left = {part for u in self.updates if factors.get(u.name) != 0 for part in u.manifest}
        self.record["kept"] |= dict.fromkeys(sorted(holders.keys() - left), "every device that trained it was left out")
        return factors

    def _changes(self, part: str, updates: Sequence[UpdateInfo]) -> Changes:
        base = self.previous[part]
        loaders, layout = self._loaders(part, updates)
        return changes_of(loaders, _from_store(self.store, base, _limit(base)), layout)

    def _loaders(self, part: str, updates: Sequence[UpdateInfo]) -> tuple[dict[str, Load], Layout]:
        base = self.previous[part]
        layout = stored_layout(self.store, base)
        return {u.name: self._loader(u, part, _limit(base), layout) for u in updates}, layout

    def _means(self, part: str, updates: Sequence[UpdateInfo]) -> None:
        base = self.previous[part]
        loaders, layout = self._loaders(part, updates)
        counts = {u.name: u.samples.get(part, 0) for u in updates}
        ignored = tuple(device for device, count in counts.items() if count <= 0)
        keeps = self.slots["combine"].flag("keeps")
        absent = absent_from(part, {u.name: u.samples for u in self.updates}) if keeps else {}

        def fitting(device: str) -> Tensors:
            tensors = loaders[device]()
            check(tensors, layout)
            return tensors

        shares = shares_of(part, counts, self.slots["weight"], self.context, fitting, absent)
        if self.noise is not None:
            shares = {EVERYONE: dict.fromkeys(shares.get(EVERYONE, ()), 1 / self.noise.denominator)}
        if not shares:
            self._note(part, Outcome(kept="no device trained it on any sample", ignored=ignored))
        for audience, weights in shares.items():
            if self.slots["combine"].method.equal and self.noise is None:
                weights = dict.fromkeys(weights, 1 / len(weights))
            key = audience + part
            one = AudiencePart(key, part, self.previous.get(key, base))
            outcome = self._mean(one, weights, loaders, layout)._replace(ignored=ignored)
            started = self.exchange == "all" and (audience or len(shares) == 1)  # whether devices train from this state
            self._close(one, outcome, feedback=bool(started))

    def _loader(self, update: UpdateInfo, part: str, limit: int, layout: Layout) -> Load:
        """A device's part as it counts: repaired, and as if trained from the present state."""
        load = _from_store(self.store, update.manifest[part], limit)
        better = self.mended.get((update.name, part))
        mended = load if better is None else lambda: {**load(), **better}
        weight = update.factor * self.factors.get(update.name, 1.0)
        if not update.staleness and (weight == 1 or not is_scheduled(part)):
            return mended
        now = _from_store(self.store, self.previous[part], limit)
        start = _from_store(self.store, update.base[part], limit) if update.staleness else now
        return moved(mended, start, now, weight, layout)

    def _prototypes(self, updates: Sequence[UpdateInfo]) -> Outcome:
        loaders: dict[str, Load] = {}
        for u in updates:
            load = _from_store(self.store, u.manifest[PROTOTYPES], _PROTOTYPES_LIMIT_BYTES)
            loaders[u.name] = faded(load, u.factor) if u.staleness else load
        before = self.previous.get(PROTOTYPES)
        load_previous = _from_store(self.store, before, _PROTOTYPES_LIMIT_BYTES) if before is not None else None
        rng = np.random.default_rng(self.terms.seed)
        return merge_prototypes(loaders, load_previous, self.slots["prototypes"], rng)

    def _mean(
        self, part: AudiencePart, weights: Mapping[str, float], loaders: Mapping[str, Load], layout: Layout
    ) -> Outcome:
        """The combined updates of one part for one audience, and the server's step by them from the state before."""
        combine = self.slots["combine"]
        mean = combine.bind(combine.method.accumulate)(layout) if combine.method.accumulate else None
        refused: dict[str, tuple[str, str]] = {}
        for device in [device for device in weights if device in loaders]:
            take = partial(mean.add, weights[device]) if mean else partial(check, layout=layout)
            if why := refusal(loaders[device], take):
                refused[device] = why
        taken = {device: weight for device, weight in weights.items() if device in loaders and device not in refused}
        if not taken and self.noise is None:
            return Outcome(refused=refused, kept="every device that trained it was refused")
        kept_share = sum(weight for device, weight in weights.items() if device not in loaders)
        if self.noise is not None:  # below 0 where more devices came than were planned for
            kept_share = 1 - sum(taken.values())
        total = sum(taken.values()) + kept_share
        told: dict[str, Any] = {"devices": {device: weight / total for device, weight in taken.items()}}
        previous = decode_part(self.store.view(part.base.id), copy=False)
        if kept_share:
            told["kept"] = kept_share / total
        if mean is None:
            combined, told["trimmed"] = combine.bind(combine.method.merge)({d: loaders[d] for d in taken}, layout)
        else:
            if kept_share:  # after the others, so that integer buffers are a device's
                mean.add(kept_share, previous)
            combined = mean.result()
        combined = {name: previous[name] if _is_fixed(name, tensor) else tensor for name, tensor in combined.items()}
        if self.noise is not None:
            added = self.noise.lacking(len(taken.keys() - self.factors.keys()))
            if self.noise.shares:
                told["added"] = added
            combined = with_noise(combined, previous, added, self.terms.entropy)
        return self._stepped(part, Outcome(combined, told, refused), previous)

    def _stepped(self, part: AudiencePart, mean: Outcome, previous: Tensors) -> Outcome:
        """The server's step from the state before by combined updates, its own state kept."""
        kept = f"{SERVER}optimise/{part.key}"
        known = decode_part(self.store.read(self.previous[kept].id)) if kept in self.previous else None
        step: Step = _trained_once if is_matcher(part.name) else self.step
        tensors, state = step(known, dict(previous), mean.tensors or {})
        try:
            check_finite(tensors)
        except MisfitError as error:
            refused = dict.fromkeys(mean.weights["devices"], (error.reason, f"of the new part {error.message}"))
            return Outcome(refused={**mean.refused, **refused}, kept="its new values cannot be calculated with")
        if state is not None:
            self.state[kept] = self.store.put(encode_part(state))
        if part.key == part.name and self.terms.stage:
            self._observe(part.name, previous, tensors)
        return mean._replace(tensors=tensors)

    def _observe(self, part: str, previous: Tensors, now: Tensors) -> None:
        """The facts of a part's change in this round, for the recipe's pace."""
        pace, key = self.slots["pace"], _OBSERVED + part
        if pace.method.observe is None:
            return
        state = decode_part(self.store.read(self.state[key].id)) if key in self.state else None
        self.facts[part], state = pace.bind(pace.method.observe)(state, previous, now)
        self.state[key] = self.store.put(encode_part(state))

    def _close(self, part: AudiencePart, outcome: Outcome, *, feedback: bool = False) -> None:
        """Into the state, where there are new values: the part as devices will hold it, then what is kept of it."""
        if outcome.tensors is not None:
            self.state.pop(RESIDUAL + part.key, None)
            if is_matcher(part.name):
                self.state[part.key] = self.store.put(encode_part(outcome.tensors))
            else:
                transfer = self.terms.transfer
                made = publish(self.store, self.previous, part, outcome.tensors, transfer, feedback=feedback)
                self.state |= {part.key: made.ref, **made.kept}
                if made.whole:
                    self.whole[part.key] = made.whole
        self._note(part.key, outcome)

    def _note(self, key: str, outcome: Outcome) -> None:
        if outcome.tensors is None:
            self.record["kept"][key] = outcome.kept
        else:
            self.record["parts"][key] = outcome.weights
        if outcome.ignored and is_shared(key):
            self.record["ignored"][key] = list(outcome.ignored)
        self._refuse(key, outcome.refused)

    def _refuse(self, part: str, refused: Mapping[str, tuple[str, str]]) -> None:
        for device, (reason, detail) in sorted(refused.items()):
            self.record["refused"].append({"device": device, "part": part, "reason": reason, "detail": detail})


def _limit(base: ObjectRef) -> int:
    """Most bytes of a device's part: another encoding differs by two at most, headers by less than 1 MiB."""
    return 2 * base.size + 2**20


def _is_fixed(name: str, tensor: np.ndarray) -> bool:
    """True for whole numbers that no mean is of, such as position ids; a count of batches is a device's."""
    return tensor.dtype.kind != "f" and not name.endswith("num_batches_tracked")


def _trained_once(state: Tensors | None, previous: Tensors, combined: Tensors) -> tuple[Tensors, None]:
    """The step of small networks, which are trained once, from nothing: the combined tensors are the next ones."""
    return combined, None


def _from_store(store: ObjectStore, ref: ObjectRef, limit: int) -> Load:
    def load() -> Tensors:
        size = store.size(ref.id)
        if size > limit:
            raise ProtocolError(f"its object has {size} bytes, at most {limit} can be right")
        return decode_part(store.view(ref.id), limit, copy=False)

    return load

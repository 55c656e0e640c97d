"""Checks of an offer at the device: age, protocol, data, disk; each refusal with both numbers. Pure.

A signature proves who made an offer, not when. Attempts of a run only go up, and each run of a fleet is made later than
the one before; so a device with an identity takes up nothing older than what it took up last, also after a restart.
``machine`` refuses a second offer while busy, and the trainer what only torch or the data shows
(``device_agent/trainer/local_trainer.py``); docs/rounds.md has the table.
"""

from __future__ import annotations

from device_agent.core.retained import retained_before
from device_agent.core.state import DataFacts, Disk, State
from edgefl import PROTOCOL_VERSION
from edgefl.models.spec import ModelSpec, part_names
from edgefl.plan.job import WHOLE_ROUND
from edgefl.protocol.messages import Offer
from edgefl.protocol.releases import mismatch, works_with
from edgefl.records import METHOD, OUT_OF_STEP, Attempt, Refusal, digest_of

#: Parts named in a refusal.
MOST_NAMED = 5


def is_over(closed: Attempt | None, attempt: Attempt) -> bool:
    """True if ``attempt`` is ``closed``, or older in the same run."""
    return closed is not None and closed.same_run(attempt) and attempt <= closed


def has_newer(state: State, attempt: Attempt) -> bool:
    """True if the device has accepted or declined a newer attempt of the run."""
    declined, waiting = (pair[0] if pair is not None else None for pair in (state.declined, state.waiting))
    known = (one.attempt for one in (state.task, state.update, declined, waiting) if one is not None)
    return any(other.same_run(attempt) and attempt < other for other in known)


def stale(state: State, offer: Offer) -> str:
    """Reason to drop an offer as outdated; "" for none."""
    attempt = offer.attempt
    if is_over(state.closed, attempt):
        return "closed-attempt"
    return "stale-offer" if has_newer(state, attempt) else ""


def is_repeated(offer: Offer, before: Offer) -> bool:
    """True if two offers have the same attempt, job and manifest."""
    return (offer.attempt, offer.job, offer.manifest) == (before.attempt, before.job, before.manifest)


def newest_closed(closed: Attempt | None, attempt: Attempt) -> Attempt:
    """The newer of ``closed`` and ``attempt``, which is now closed too."""
    return closed if closed is not None and is_over(closed, attempt) else attempt


def is_older_run(state: State, run: Attempt) -> bool:
    """True if a run (given as an attempt) was made before the newest accepted here."""
    newest = state.newest
    if not state.strict or newest is None or not run.run or newest.same_run(run):
        return False
    return run.made_ms <= newest.made_ms


def replayed(state: State, attempt: Attempt) -> Refusal | None:
    """Refusal of an offer older than the newest accepted here (a replay); None otherwise."""
    newest = state.newest
    if newest is not None and is_older_run(state, attempt):
        detail = f"run {newest.run} is newer; a device with an identity never goes back to an older run"
        return Refusal("replay", detail=detail)
    if state.strict and newest is not None and newest.same_run(attempt) and attempt < newest:
        return Refusal("replay", detail=f"attempt {newest} of the same run came before")
    return None


def check_offer(state: State, facts: DataFacts, offer: Offer, disk: Disk) -> Refusal | None:
    """Refusal of an offer by protocol, data or disk; None: accept. The coordinator judged memory and FLOPs."""
    theirs = state.protocol
    if theirs is not None and not works_with(theirs):
        detail = mismatch("this agent", "the coordinator", state.release, theirs)
        return Refusal("protocol", float(theirs), float(PROTOCOL_VERSION), "version", detail)
    return _data(facts, offer) or _out_of_step(state, offer) or _disk(state, offer, disk)


def _data(facts: DataFacts, offer: Offer) -> Refusal | None:
    model, batch_size = offer.job.model, offer.job.hyper.batch_size
    if model.declared or facts.code:
        return _code(facts, model)
    common = [modality for modality in facts.modalities if modality in model.encoders]
    if not common:
        here, there = ", ".join(facts.modalities) or "nothing", ", ".join(model.encoders) or "nothing"
        return Refusal("data", detail=f"this device has {here}, the model takes {there}")
    for modality in common if not facts.elastic else []:
        shape, taken = list(facts.modalities[modality]), list(model.encoders[modality].input_shape)
        if shape != taken:
            return Refusal("data", detail=f"{modality}: a sample here is {shape}, the model takes {taken}")
    if refusal := _labels(facts, model):
        return refusal
    samples = facts.samples.get("", 0)
    if samples < batch_size:
        detail = "the local share does not fill one batch"
        return Refusal("data", float(batch_size), float(samples), "samples", detail)
    return None


def _code(facts: DataFacts, model: ModelSpec) -> Refusal | None:
    """Refusal of a declared model without own training code, or of EdgeFL's own model with it."""
    if not model.declared:
        return Refusal(
            METHOD, detail=f"this device trains by its own code ({facts.code[:200]}), and the run by EdgeFL's"
        )
    if not facts.code:
        way_out = "start the agent with --trainer FILE.py:FUNCTION"
        return Refusal(METHOD, detail=f"the run's model (model.own) needs the device's own training code; {way_out}")
    return None


def _labels(facts: DataFacts, model: ModelSpec) -> Refusal | None:
    if not model.classes or not facts.class_counts:
        return None
    if model.label_names and facts.label_names:  # the trainer numbers labels by name, so the order is free
        used = [name for name, count in zip(facts.label_names, facts.class_counts, strict=False) if count]
        unknown = [name for name in used if name not in model.label_names]
        if unknown:
            there = ", ".join(model.label_names)
            return Refusal("data", detail=f"labels the model does not know: {', '.join(unknown)}; it knows {there}")
    elif len(facts.class_counts) > model.classes:
        detail = "the local data has more classes than the model"
        return Refusal("data", float(len(facts.class_counts)), float(model.classes), "classes", detail)
    return None


def _out_of_step(state: State, offer: Offer) -> Refusal | None:
    """Refusal of a resumed round based on other parts than those retained here."""
    if not (offer.job.period or WHOLE_ROUND).resumes:
        return None
    held = retained_before(state, offer.attempt)
    if held and digest_of(held[-1].manifest) == offer.base:
        own = set(held[-1].manifest).intersection(part_names(offer.job.model))
        if not (differing := own.symmetric_difference(offer.job.stage.trained)):
            return None
        named = ", ".join(sorted(differing)[:MOST_NAMED])
        detail = f"planned again, this device trains other parts than the period began with: {named}"
        return Refusal(OUT_OF_STEP, detail=f"{detail}; it waits for the next period")
    here = f"of round {held[-1].attempt.round} of stage {held[-1].attempt.stage}" if held else "of no round"
    detail = f"the parts retained here are {here}, not those that the period goes on from; wait for the next period"
    return Refusal(OUT_OF_STEP, detail=detail)


def _disk(state: State, offer: Offer, disk: Disk) -> Refusal | None:
    """Refusal for disk space: an offer's objects, its period's retained parts, and new versions of trained parts."""
    sizes = {ref.id: ref.size for ref in offer.manifest.values()}
    held = retained_before(state, offer.attempt)
    own = held[-1].manifest if held else {}
    known = {**own, **offer.manifest}
    trained = sum(known[part].size for part in offer.job.stage.trained if part in known)
    if offer.job.period is not None:
        sizes |= {ref.id: ref.size for ref in own.values()}
    for needed, allowed, place in (
        (sum(sizes.values()), state.budget.disk_bytes, "budget.disk_bytes"),
        (disk.missing_bytes, disk.free_bytes, "free space"),
    ):
        if allowed is not None and needed + trained > allowed:
            detail = f"objects of this round against {place}"
            return Refusal("disk", float(needed + trained), float(allowed), "B", detail)
    return None

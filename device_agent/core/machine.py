"""The agent's machine: ``step(state, event, now)`` -> new state and instructions. No I/O, clock or randomness.

An offer goes fetching → ready → training → update → acknowledged. Only the newest attempt of a run counts: older and
repeated messages are dropped and counted by reason. What has to survive a restart is saved before it is announced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import asdict, replace

from device_agent.core import state as v
from device_agent.core.offer_check import check_offer, is_older_run, is_repeated, newest_closed, replayed, stale
from device_agent.core.retained import restore_residuals, retained, retained_before, taken_over
from device_agent.core.spent import spent, spent_before
from device_agent.core.state import Event, Instruction, State, TaskPhase, TrainerPhase
from device_agent.core.traffic import measured
from edgefl.errors import ProtocolError
from edgefl.protocol import messages as m
from edgefl.records import Attempt, Figures, Refusal, digest_of

#: The first welcome is taken for the answer to the hello when it comes within this; later, the hello went out before
#: that coordinator was there, and is sent again. Longer than a round trip of a bad mobile link.
GREETING_S: Final = 2.0
#: Progress is for people watching: once a second is as fast as anyone reads; 200 devices make 200 messages a second.
PROGRESS_S: Final = 1.0
#: An update without an answer is announced again. A coordinator that restarts needs seconds to read its ledger, and
#: a second announcement is harmless.
ANNOUNCE_S: Final = 15.0
#: How many past events an illegal move is explained with.
STORY_LENGTH = 24
Step = tuple[State, list[Instruction]]
#: What moves an accepted offer on: (phase, event or instruction) -> the next phase; None: it is not in hand any more.
#: The same event in another phase, or for another attempt, came too late and is dropped.
TASK_PHASES: dict[tuple[TaskPhase, type[Event | Instruction]], TaskPhase | None] = {
    (TaskPhase.FETCHING, v.Fetched): TaskPhase.READY,  # declined where it failed
    (TaskPhase.READY, v.Train): TaskPhase.TRAINING,
    (TaskPhase.TRAINING, v.Progressed): TaskPhase.TRAINING,
    (TaskPhase.TRAINING, v.TrainingEnded): None,  # an update, or declined
}
#: What moves the trainer: (phase, event or instruction) -> the next phase. Anything else is a fault of this program.
TRAINER_PHASES: dict[tuple[TrainerPhase, type[Event | Instruction]], TrainerPhase] = {
    (TrainerPhase.DOWN, v.StartTrainer): TrainerPhase.WARMING,
    (TrainerPhase.IDLE, v.StartTrainer): TrainerPhase.WARMING,  # the data is described anew
    (TrainerPhase.WARMING, v.TrainerReady): TrainerPhase.IDLE,
    (TrainerPhase.WARMING, v.TrainerLost): TrainerPhase.DOWN,
    (TrainerPhase.IDLE, v.Train): TrainerPhase.TRAINING,
    (TrainerPhase.IDLE, v.StopTrainer): TrainerPhase.DOWN,
    (TrainerPhase.TRAINING, v.TrainingEnded): TrainerPhase.IDLE,  # DOWN where it died
}


class MachineError(ProtocolError):
    """An event impossible in this state: a fault of this program. Carries the recent history."""

    remedy = "This is a fault of EdgeFL: please report it with the story above."


def initial(identity: State, saved: v.Saved, facts: v.DataFacts | None) -> State:
    """State at the start: ``identity`` with the work and data facts saved by an earlier process."""
    task = v.Task(saved.offer) if saved.offer is not None else None
    known = {"closed": saved.closed, "retained": saved.retained, "newest": saved.newest}
    return replace(identity, task=task, update=saved.update, facts=facts, **known)


def step(state: State, event: Event, now: float) -> Step:
    """New state and instructions after an event. ``now``: monotonic seconds. Raises MachineError if illegal."""
    if not isinstance(event, v.Tick | v.Progressed):
        what = event.message if isinstance(event, v.Received) else event
        task = state.task.phase.value if state.task else "-"
        line = f"{type(what).__name__} {getattr(what, 'attempt', '')} [trainer {state.trainer.value}, task {task}]"
        state = replace(state, story=(*state.story, line)[-STORY_LENGTH:])
    state, out = _EVENTS[type(event)](state, event, now)
    state, more = _keep_trainer_busy(state)
    return state, out + more


# --- connection and time


def _connected(state: State, event: v.Connected, now: float) -> Step:
    state, hello = _hello(replace(state, connected=True, heartbeat_at=now), now)
    return _repeat(state, [v.Send(m.Presence(state.device, state.session, online=True)), *hello], now)


def _repeat(state: State, out: list[Instruction], now: float) -> Step:
    """Repeat messages possibly lost: acceptance of an offer, requests for objects, the update."""
    if state.task is not None:
        out.append(v.Send(m.Accept(state.device, state.task.attempt)))
        if state.task.phase is TaskPhase.FETCHING:
            out.append(v.Fetch(state.task.offer))
    return _announce(state, out, now)


def _tick(state: State, event: v.Tick, now: float) -> Step:
    state = measured(state, event, now)
    if not state.connected:
        return state, []
    out: list[Instruction] = []
    if now - state.heartbeat_at >= state.heartbeat_s:
        beats = bool(state.run or state.working_on)  # else MQTT's keep-alive holds the connection, for a tenth
        state = replace(state, heartbeat_at=now, sequence=state.sequence + beats)
        beat = m.Heartbeat(state.device, state.session, state.sequence, state.working_on, event.memory_free_bytes)
        out += [v.Send(beat)] * beats
    announce = now - state.announced_at >= ANNOUNCE_S
    return _announce(state, out, now) if announce else (state, out)


def _hello(state: State, now: float) -> Step:
    """Send a hello; nothing until the data's shapes are known, without which no device is placed."""
    facts = state.facts
    if facts is None or not state.connected:
        return state, []
    capabilities = replace(
        state.capabilities,
        trainer_base_bytes=facts.base_bytes,
        runtime=facts.runtime,
        gpu=facts.gpu or state.capabilities.gpu,
        torch_device=facts.torch_device,
        gpu_memory_bytes=facts.gpu_memory_bytes if facts.gpu else state.capabilities.gpu_memory_bytes,
        gpu_free_bytes=facts.gpu_free_bytes,
        gpu_idle_bytes=facts.gpu_idle_bytes,
    )
    hello = m.Hello(
        device=state.device,
        session=state.session,
        agent_version=state.agent_version,
        profile=state.profile,
        capabilities=capabilities,
        budget=state.budget,
        modalities=facts.modalities,
        samples=facts.samples,
        class_counts=facts.class_counts,
        working_on=state.working_on,
        prepared=facts.prepared,
        moments={} if state.no_moments else facts.moments,
        signature=b"" if state.no_moments else facts.signature,
    )
    return replace(state, greeting=True, greeted_at=now), [v.Send(hello)]


def _announce(state: State, out: list[Instruction], now: float) -> Step:
    if state.update is None:
        return state, out
    return replace(state, announced_at=now), [*out, v.Send(state.update)]


# --- messages of the coordinator


def _received(state: State, event: v.Received, now: float) -> Step:
    message = event.message
    if isinstance(message, m.Offer):
        return _offer(state, message, event.disk, now)
    return _MESSAGES[type(message)](state, message, now)


def _welcome(state: State, message: m.Welcome, now: float) -> Step:
    if is_older_run(state, Attempt(message.run, made_ms=message.made_ms)):
        return _drop(state, "old-run", message.run)
    # A welcome without a hello, or one from another coordinator than the hello went to, asks who this is.
    late = state.coordinator == "" and now - state.greeted_at > GREETING_S
    another = state.coordinator not in {"", message.coordinator}
    unknown = not state.greeting or late or another
    before = state.current
    state = replace(
        state,
        coordinator=message.coordinator,
        protocol=message.protocol,
        release=message.release,
        run=message.run,
        made_ms=message.made_ms,
        greeting=False,
        heartbeat_s=message.heartbeat_s if message.heartbeat_s > 0 else state.heartbeat_s,
        preparation=message.preparation,
    )
    # What is said of data that has not been read as this run asks does not count.
    state, out = _hello(state, now) if unknown and state.prepared else (state, [])
    current = state.current
    if not current.same_run(before):
        out.append(v.Log("welcomed", {"run": message.run, "coordinator": message.coordinator}))
    if message.run:
        state = replace(state, retained=taken_over(state.retained, current, message.earlier_ms))
        state, dropped = _forget(state, lambda attempt: not attempt.same_run(current))
        out += dropped
    return _repeat(state, out, now) if another else (state, out)


def _offer(state: State, offer: m.Offer, disk: v.Disk, now: float) -> Step:
    repeated = _repeated(state, offer, now)
    if repeated is not None:
        return repeated
    reason = stale(state, offer)
    if reason:
        return _drop(state, reason, offer.attempt)
    if old := replayed(state, offer.attempt):
        return _decline(state, offer, old)
    facts, busy = state.facts, state.task.attempt if state.task is not None else offer.attempt
    if facts is None:
        return replace(state, waiting=(offer, disk)), []
    if not busy.same_run(offer.attempt) and not state.current.same_run(offer.attempt):
        return _decline(state, offer, Refusal("busy", detail=f"working on {busy}"))
    before = state
    state, out = _drop_task(state, "superseded")
    if state.strict:
        state = replace(state, newest=offer.attempt)  # that was ever accepted or declined
    if refusal := check_offer(state, facts, offer, disk):
        state, declined = _decline(state, offer, refusal)
        return state, [*spent_before(before, state), *out, *declined]
    state = replace(state, task=v.Task(offer), declined=None, waiting=None)
    if offer.job.period is not None:  # whole models, of which it goes on from one
        state = replace(state, retained=tuple(retained_before(state, offer.attempt)[-1:]))
    keep = {ref.id for kept in state.retained for ref in kept.manifest.values()}
    keep |= {ref.id for ref in offer.manifest.values()}
    keep |= {name for packed in offer.packed.values() for name in (packed.ref.id, packed.base) if name}
    if state.update is not None:
        keep |= {ref.id for ref in state.update.manifest.values()}
    accept = m.Accept(state.device, offer.attempt)
    log = v.Log("accepted", {"attempt": str(offer.attempt), "parts": len(offer.manifest)})
    out = [*spent_before(before, state), *out, _save(state), log, v.Send(accept)]
    return state, [*out, v.CollectGarbage(frozenset(keep)), v.Fetch(offer)]


def _repeated(state: State, offer: m.Offer, now: float) -> Step | None:
    """Repeat the answer to a duplicate offer, whose first answer may be lost; None for a new offer."""
    task, update = state.task, state.update
    if task is not None and task.attempt == offer.attempt and task.offer.job == offer.job:
        out: list[Instruction] = [v.Send(m.Accept(state.device, offer.attempt))]
        if task.phase is TaskPhase.FETCHING:
            state = replace(state, task=replace(task, offer=offer))
            out += [_save(state), v.Fetch(offer)]
    elif update is not None and update.attempt == offer.attempt:
        state, out = _announce(state, [], now)
    elif state.declined is not None and is_repeated(offer, state.declined[0]):
        out = [v.Send(state.declined[1])]
    else:
        return None
    state, logs = _drop(state, "duplicate-offer", offer.attempt)
    return state, out + logs


def _grant(state: State, message: m.Grant, now: float) -> Step:
    if state.update is None:
        return _drop(state, "grant-without-update", message.transfer)
    # A coordinator that asks knows of the update: no need to announce it again soon.
    return replace(state, announced_at=now), [v.Serve(state.update, message)]


def _ack(state: State, message: m.Ack, now: float) -> Step:
    if state.update is None or state.update.attempt != message.attempt:
        return _drop(state, "stale-ack", message.attempt)
    if not message.accepted:
        state = restore_residuals(state, message.attempt)
    state = replace(state, update=None, closed=newest_closed(state.closed, message.attempt))
    event = "delivered" if message.accepted else "rejected"
    log = v.Log(event, {"attempt": str(message.attempt), "reason": message.refusal.reason})
    return state, [_save(state), v.StopServe(message.attempt), log]


def _abort(state: State, message: m.Abort, now: float) -> Step:
    before = state
    state = restore_residuals(state, message.attempt)  # also what was accepted: the attempt is tried again without it
    state, out = _forget(state, lambda attempt: attempt.same_run(message.attempt) and attempt <= message.attempt)
    state = replace(state, closed=newest_closed(state.closed, message.attempt))
    if before == state and not out:
        return _drop(state, "stale-abort", message.attempt)
    log = v.Log("aborted", {"attempt": str(message.attempt), "reason": message.reason})
    return state, [*spent_before(before, state), *out, _save(state), log]


def _drain(state: State, message: m.Drain, now: float) -> Step:
    over = Attempt(message.run, made_ms=message.made_ms)
    if message.final and state.newest is not None and state.newest.same_run(over):
        # The run never goes on: whatever was offered in it is over.
        state = replace(state, closed=newest_closed(state.closed, state.newest))
    state, out = _forget(replace(state, drained=message.reason), over.same_run)
    if message.final:
        state = replace(state, retained=tuple(one for one in state.retained if not one.attempt.same_run(over)))
    if state.current.same_run(over):
        ended = over if message.final else state.ended
        state = replace(state, run="", made_ms=0, ended=ended)
    if state.task is None and state.update is None:
        out.append(v.CollectGarbage(frozenset(ref.id for one in state.retained for ref in one.manifest.values())))
    return state, [*out, _save(state), v.Log("drained", {"run": message.run, "reason": message.reason})]


# --- the device's own work


def _expects(state: State, event: v.Fetched | v.Progressed | v.TrainingEnded) -> v.Task | None:
    """The current task, if the event belongs to its attempt and phase; else None."""
    task = state.task
    known = task is not None and task.attempt == event.attempt and (task.phase, type(event)) in TASK_PHASES
    return task if known else None


def _task_moved(state: State, event: Event | Instruction) -> State:
    """The state with the task's phase after this event or instruction."""
    if state.task is None:
        return state
    phase = TASK_PHASES[state.task.phase, type(event)]
    return replace(state, task=None if phase is None else replace(state.task, phase=phase))


def _trainer_moved(state: State, event: Event | Instruction) -> State:
    """The state with the trainer's phase after this event or instruction. Raises MachineError if impossible."""
    phase = TRAINER_PHASES.get((state.trainer, type(event)))
    if phase is None:
        raise _illegal(state, event)
    return replace(state, trainer=phase)


def _ready(state: State, event: v.TrainerReady, now: float) -> Step:
    facts, news, waiting = event.facts, event.facts != state.facts, state.waiting
    state = replace(_trainer_moved(state, event), facts=facts, waiting=None)
    state, out = _hello(state, now) if news else (state, [])
    if news:
        out += [v.SaveFacts(facts), *([v.Log("data-unusable", {"text": facts.problem})] if facts.problem else [])]
    state, more = _offer(state, *waiting, now) if waiting is not None else (state, [])
    return state, out + more


def _fetched(state: State, event: v.Fetched, now: float) -> Step:
    task = _expects(state, event)
    if task is None:
        return _drop(state, "stale-fetch", event.attempt)
    if event.refusal is not None:
        return _decline(replace(state, task=None), task.offer, event.refusal)
    return _task_moved(state, event), []


def _progressed(state: State, event: v.Progressed, now: float) -> Step:
    if _expects(state, event) is None:
        return state, []  # the trainer's last notes of an abandoned attempt
    due = now - state.progress_at >= PROGRESS_S or event.step == event.steps
    if not due or not state.connected:
        return state, []
    note = m.Progress(state.device, event.attempt, event.epoch, event.step, event.steps, event.loss)
    return replace(state, progress_at=now), [v.Send(note)]


def _training_ended(state: State, event: v.TrainingEnded, now: float) -> Step:
    state = _trainer_moved(state, event)
    if not event.alive:
        state = replace(state, trainer=TrainerPhase.DOWN)
    if state.abandoned == event.attempt:
        state, log = _drop(replace(state, abandoned=None), "abandoned-result", event.attempt)
        return state, [*spent(state, event.attempt, event.result.figures), *log]
    task, result = _expects(state, event), event.result
    if task is None:
        raise _illegal(state, event)
    state = _task_moved(state, event)
    if result.refusal is not None:
        return _decline(state, task.offer, result.refusal, result.figures)
    sent = {name: value for name, value in asdict(result).items() if name not in {"retained", "refusal", "observed"}}
    base = digest_of(result.retained) if task.offer.job.period is not None else ""
    update = m.Update(device=state.device, attempt=event.attempt, base=base, **sent, **result.observed._asdict())
    out: list[Instruction] = [v.StopServe(state.update.attempt)] if state.update is not None else []
    state = replace(state, update=update, retained=retained(state, event.attempt, result.retained))
    out += [_save(state), v.Log("trained", {"attempt": str(event.attempt), **result.metrics})]
    return _announce(state, out, now)


# --- shared moves


def _decline(state: State, offer: m.Offer, refusal: Refusal, figures: Figures | None = None) -> Step:
    decline = m.Decline(state.device, offer.attempt, refusal, figures or {})
    state = replace(state, declined=(offer, decline))
    fields = {"attempt": str(offer.attempt), "reason": refusal.reason, "needed": refusal.needed}
    log = v.Log("declined", {**fields, "allowed": refusal.allowed, "unit": refusal.unit, "detail": refusal.detail})
    return state, [_save(state), v.Send(decline), log]


def _forget(state: State, match: Callable[[Attempt], bool]) -> Step:
    """Drop waiting offers, refusals, tasks and updates of attempts that ``match``."""
    out: list[Instruction] = []
    if state.waiting is not None and match(state.waiting[0].attempt):
        state = replace(state, waiting=None)
    if state.declined is not None and match(state.declined[0].attempt):
        state = replace(state, declined=None)
    if state.task is not None and match(state.task.attempt):
        state, out = _drop_task(state, "not-wanted")
    if state.update is not None and match(state.update.attempt):
        out = [*out, v.StopServe(state.update.attempt)]
        state = replace(restore_residuals(state, state.update.attempt), update=None)
    return state, [*out, _save(state)] if out else out


def _drop_task(state: State, reason: str) -> Step:
    task = state.task
    if task is None:
        return state, []
    state, out = _drop(replace(state, task=None), reason, task.attempt)
    if task.phase is TaskPhase.TRAINING:
        return replace(state, abandoned=task.attempt), [*out, v.Interrupt(task.attempt)]
    return state, [*out, v.StopFetch(task.attempt)] if task.phase is TaskPhase.FETCHING else out


def _keep_trainer_busy(state: State) -> Step:
    """Start the trainer, train the ready task, or stop an unneeded trainer."""
    wanted = state.facts is None or state.task is not None or state.waiting is not None or state.run != ""
    due: v.StartTrainer | v.Train | v.StopTrainer | None = None
    unprepared = state.trainer is TrainerPhase.IDLE and state.run != "" and not state.prepared
    if unprepared or (state.trainer is TrainerPhase.DOWN and wanted):
        due = v.StartTrainer(state.preparation)
    elif state.trainer is TrainerPhase.IDLE and state.task is not None and state.task.phase is TaskPhase.READY:
        before = retained_before(state, state.task.attempt)
        due = v.Train(state.task.offer, before[-1].manifest if before else {})
        state = _task_moved(state, due)
    elif state.trainer is TrainerPhase.IDLE and not wanted and state.coordinator and state.connected:
        due = v.StopTrainer(state.drained)
    return (state, []) if due is None else (_trainer_moved(state, due), [due])


def _save(state: State) -> v.Save:
    offer = state.task.offer if state.task is not None else None
    return v.Save(v.Saved(offer, state.update, state.closed, state.retained, state.newest))


def _drop(state: State, reason: str, what: object) -> Step:
    dropped = {**state.dropped, reason: state.dropped.get(reason, 0) + 1}
    return replace(state, dropped=dropped), [v.Log("dropped", {"reason": reason, "what": str(what)})]


def _illegal(state: State, event: Event | Instruction) -> MachineError:
    story = "\n  ".join(state.story)
    return MachineError(f"{type(event).__name__} cannot happen now on {state.device}:\n  {story}")


_EVENTS: dict[type, Callable[[State, Any, float], Step]] = {
    v.Connected: _connected,
    v.Disconnected: lambda state, event, now: (replace(state, connected=False), []),
    v.Received: _received,
    v.TrainerReady: _ready,
    v.TrainerLost: lambda state, event, now: (_trainer_moved(state, event), []),
    v.Fetched: _fetched,
    v.Progressed: _progressed,
    v.TrainingEnded: _training_ended,
    v.Tick: _tick,
}
_MESSAGES: dict[type, Callable[[State, Any, float], Step]] = {
    m.Welcome: _welcome,
    m.Grant: _grant,
    m.Ack: _ack,
    m.Abort: _abort,
    m.Drain: _drain,
}

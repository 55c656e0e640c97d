"""Runs the machine: messages, transfers, timers and finished tasks become events; instructions are performed.

The machine steps event by event, the ledger commits what has come meanwhile in one transaction, and only then anything
is sent or started that a process may rely on (``record``: a request for chunks may precede). Long work (plans,
aggregation, evaluation) runs beside the loop and reports back as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from coordinator.core import moves as do
from coordinator.core.assignments import in_progress
from coordinator.core.machine import round_after, step
from coordinator.core.moves import Begin, Decided, Declined, DeviceOffline, Event, Joined, Position, Request, Tick
from coordinator.core.round_rules import still_needed
from coordinator.core.state import ENDED, WITHOUT_UPDATE, Phase, State, resumed
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.control import Control
from coordinator.runtime.control_socket import listening
from coordinator.runtime.device_logs import DeviceLogs
from coordinator.runtime.environment import Environment
from coordinator.runtime.inbound import Inbound, Sign
from coordinator.runtime.model_tasks import ModelTasks, payload_sizes
from coordinator.runtime.publisher import Publisher
from coordinator.runtime.record import Journal, Move, Record, dated, forward_warnings, warning
from coordinator.runtime.virtual_time import SIMULATED
from edgefl.aggregation.history import load as load_memory
from edgefl.errors import BudgetError, ControlError, DataError, EdgeFLError, ProtocolError, RunError
from edgefl.plan.compile import moving, warnings_of
from edgefl.plan.job import RunPlan
from edgefl.process.worker import WorkerProcess
from edgefl.protocol import topics
from edgefl.protocol.messages import LogLines, Need, Renew
from edgefl.records import Manifest
from edgefl.report.units import public_url
from edgefl.run_records import AssignmentRow, EventRow, RunReport
from edgefl.storage.disk import LEDGER, hold_directory
from edgefl.storage.objects import ObjectStore

#: Seconds by which a clock goes back that was set; one that is disciplined goes slower instead.
STEP_S = 1.0
#: Interval of records of when each device was heard of last: heartbeats come every 10 s from each, and a ledger is
#: synced at every commit.
SIGHTINGS_S = 60.0
#: Events taken in one transaction: many devices' messages that came while the last one was written.
MOST_AT_ONCE = 256
#: Seconds for which devices that join are gathered, while no round waits for them: a commit for each of a thousand took
#: a quarter of the time that they need to join. Far below the time in which a device expects its welcome.
JOINS_S = 0.05
#: The same for each device of the open round, up to the second figure: a commit costs some milliseconds of a processor
#: beside its rows, and 200 devices that are asked at once are done in 50 ms more, after seconds.
DEVICE_S, GATHERED_S = 0.00025, 0.2
#: Instructions that are done once they are committed.
_RECORDED = do.SAVES - {do.SavePlan} | {EventRow}
_ERRORS: dict[str, type[EdgeFLError]] = {kind.__name__: kind for kind in (RunError, BudgetError, DataError)}


async def run(plan: RunPlan, environment: Environment, *, resume: bool) -> RunReport:
    """Execute a run plan and return its report.

    Starts and ends the transport and the worker. ``resume``: continue a run that the ledger knows, in the same attempt
    of the same round. Raises an EdgeFLError that is also on record (status "failed"); cancelled, the run can be
    resumed.
    """
    topics.check_name("fleet", environment.fleet)
    directory = environment.directory
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_directory(directory))
        ledger = stack.enter_context(Ledger(environment.ledger_url or directory / LEDGER))
        journal = stack.enter_context(contextlib.closing(Journal(directory / "events.jsonl", environment.emit)))
        runner = Runner(plan, environment, ledger, journal)
        try:
            await runner.run(resume=resume)
        finally:
            await runner.close()
        return ledger.report(plan.run)


class Runner:
    """One run. All of it runs in the event loop's thread, except what ``ModelTasks`` hands to others."""

    def __init__(self, plan: RunPlan, environment: Environment, ledger: Ledger, journal: Journal) -> None:
        self.plan = plan
        self.timeouts = timeouts = environment.timeouts
        self.state = State(plan, timeouts, crowd=environment.crowd)
        self._environment = environment
        self._directory = environment.directory
        self._transport = environment.transport
        self._guard = environment.guard
        self._virtual = environment.virtual
        store = ObjectStore(self._directory / "objects", shared=environment.shared)
        settle = store.settle if environment.shared is not None else None
        self._record = Record(plan.run, ledger, journal, self.state, settle)
        self._events: asyncio.Queue[Event | EventRow | BaseException] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[State]] = {}  # by id of the event
        self._inbound = Inbound(timeouts.silence_s, timeouts.introduce_s, plan.names)
        self._connected = False
        self._listening = False
        self._garbage = False
        self._over = False
        self._ahead = time.time() - self.clock()
        self._noted_at = 0.0
        log = self._directory / "logs" / "evaluator.log"
        self._worker = environment.worker or WorkerProcess("coordinator.runtime.evaluator", [], log)
        report = self._events.put_nowait
        self._publisher = Publisher(plan, environment, store, report, self.clock)
        self._logs = DeviceLogs(self._publisher.post)
        signs: dict[str, Sign] = {}
        self._inbound.signs.append(signs)
        self.control = Control(self._ask, lambda: self.state, self.clock, self._logs, signs)
        if environment.watch is not None:
            self._inbound.signs.append(environment.watch.signs)
            environment.watch.control, environment.watch.phase = self.control, lambda: self.state.phase.value
        if self._guard is not None:
            put = self._events.put_nowait
            self._guard.start(
                self._publisher.post,
                enrolled=lambda name: put(EventRow(time.time(), "enrolled", device=plan.names.get(name, name))),
            )
        self._models = ModelTasks(plan, store, self._worker, report, self.clock)

    @staticmethod
    def clock() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def _now(self) -> float:
        """The machine's time."""
        return self._virtual.now if self._virtual is not None else self.clock()

    async def run(self, *, resume: bool) -> None:
        """Connect, then step until the run is finished. Raises what ended it otherwise."""
        with forward_warnings(self._events.put_nowait):
            try:
                await self._connect()
                begin = await self._begin(resume)
                self._take([begin, *(self._virtual.seen() if self._virtual is not None else [])])
                self._take(self._guard.decided(self.state.devices, self.plan.names) if self._guard is not None else ())
                async with listening(self.control, self._directory), self._serving_objects():
                    await self._loop()
            except asyncio.CancelledError:
                self._note(self.clock())
                self._record.commit([], [], self.state)
                raise
            except Exception as error:
                self._note(self.clock())
                self._record.write_failure(error, self.state)
                self._publisher.send(do.DrainAll("the run failed"), self._models.manifest, self.state)
                await self._publisher.flush(self.timeouts.drain_s)
                raise
            await self._publisher.flush(self.timeouts.drain_s)
            if self._garbage:  # a late update was being checked
                await self._publisher.uploads.checked()
                self._collect(still_needed(self.state))

    def _serving_objects(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Serve large objects past the broker, where the environment has an endpoint."""
        if self._environment.endpoint is None:
            return contextlib.nullcontext()
        from coordinator.runtime.object_endpoint import Served

        publisher, guard = self._publisher, self._guard
        return self._environment.endpoint.serving(
            Served(
                self._models.store,
                publisher.download,
                publisher.uploads,
                self.plan.names,
                guard.admits if guard is not None else lambda user, device: True,
                lambda device: self._inbound.heard(device, self.clock(), "upload"),
                self._events.put_nowait,
            )
        )

    async def _ask(self, request: Request) -> State:
        """Take a request of the operator to the machine; the state once it is committed. Raises ControlError."""
        if self._over:
            raise _has_ended()
        answer: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._asked[id(request)] = answer
        self._events.put_nowait(request)
        return await answer

    async def close(self) -> None:
        """End everything that still runs; the ledger stays open."""
        await self._models.close()
        if self._guard is not None:
            await self._guard.close()
        await self._publisher.close()
        await self._transport.close()
        await self._worker.stop()

    async def _connect(self) -> None:
        self._transport.on_message = self._on_message
        self._transport.on_connection = self._on_connection
        await self._transport.connect()
        await self._transport.subscribe(topics.coordinator_subscriptions(self._environment.fleet))
        if self._guard is not None:
            self._guard.listen(self._environment.broker)
        self._listening = True
        self._publisher.call()
        await self._publisher.chunking.begin()

    async def _begin(self, resume: bool) -> Begin:
        run, ledger, store = self.plan.run, self._record.ledger, self._models.store
        known = resume and any(report.run == run for report in ledger.runs())
        was = ledger.snapshot(self.state) if known else None
        if known and self._virtual is not None:
            self._virtual.go_on(ledger.report(run).events)
        state = resumed(was, self._now()) if was is not None else None
        for attempt in in_progress(state) if state is not None else ():
            self._publisher.traffic.go_on(attempt, ledger.measured(attempt))
        if known:
            self._watch_clock(time.time() - self.clock(), ledger.last_event_at(run) - self.clock())
            ledger.reopen(run, time.time(), state.open.attempt if state and state.open else None)
        else:
            manifest = await self._models.initial_parts()
            ledger.create(self.plan, manifest, payload_sizes(store, manifest), time.time())
        position = ledger.position(run)
        states, memory = ledger.states(run), load_memory(store, position.manifest)
        self.state = msgspec.structs.replace(self.state, memory=memory)
        self._models.begin(position.manifest, states)
        self._record.write(self._run_started(position, states, known=known))
        for text in () if known else warnings_of(self.plan):
            self._record.write(warning(text, lasting=True))
        if was is not None:
            self._record.saved = was
        age_s = self._now() if self._virtual is not None else time.time() - _made_at(position)
        return Begin(self._now(), position, memory, state, age_s)

    async def _loop(self) -> None:
        ticker = asyncio.create_task(self._tick())
        try:
            while self.state.phase not in ENDED:
                due = [await self._events.get()]
                await asyncio.sleep(self._gathering_s())  # what has come with it
                while len(due) < MOST_AT_ONCE and not self._events.empty():
                    due.append(self._events.get_nowait())
                self._take(due)
                self._move_on()
        finally:
            self._over = True
            for answer in self._asked.values():
                if not answer.done():  # who asked may have gone
                    answer.set_exception(_has_ended())
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    def _gathering_s(self) -> float:
        """For how long events are gathered before they are committed: longer, the more devices are at work."""
        if self.state.phase is Phase.JOINING:
            return JOINS_S
        return min(GATHERED_S, DEVICE_S * len(self.state.assignments))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.timeouts.tick_s)
            now = self.clock()
            try:
                if self._garbage and self.state.phase is not Phase.AGGREGATING:
                    self._collect(still_needed(self.state))
                if self._connected:
                    self._publisher.tick()
                    for late in self._inbound.silent(now, self._is_out, self.state.fleet_size):
                        self._events.put_nowait(late)
                    for stranger in self._inbound.strangers(now):
                        self._events.put_nowait(stranger)
                if now - self._noted_at >= SIGHTINGS_S:
                    self._note(now)
                if self._guard is not None and self._guard.look():
                    for decided in self._guard.decided(self.state.devices, self.plan.names):
                        self._events.put_nowait(decided)
                links = self._publisher.links(self.state) if self._virtual is None else {}
                self._events.put_nowait(Tick(now, links))
                self._watch_clock(time.time() - now, self._ahead)
            except Exception as error:  # a full disk, say: the loop must hear of it
                self._events.put_nowait(error)

    def _is_out(self, name: str) -> bool:
        device = self.state.devices.get(name)
        return device is not None and device.out

    def _note(self, now: float) -> None:
        """Queue signs of life and traffic counts for the next transaction."""
        self._record.keep([*self._inbound.sightings(self._ahead, self.state.devices), *self._publisher.traffic.take()])
        self._noted_at = now

    def _bill(self, out: Sequence[do.Instruction]) -> None:
        """Record the bytes of attempts that end without an update, in the same transaction."""
        parts, traffic = [one for one in out if isinstance(one, AssignmentRow)], self._publisher.traffic
        for one in parts:
            if one.status == "done":
                traffic.settle(one.device, one.stage, one.round, one.attempt)
        if any(one.status in WITHOUT_UPDATE for one in parts):
            self._record.keep(traffic.take())

    def _watch_clock(self, ahead: float, before: float) -> None:
        """Note the wall clock's lead over the monotonic clock in seconds; warn if it was set back."""
        if ahead < before - STEP_S:
            text = f"this machine's clock was set back by {before - ahead:.0f} s: times in the record go back here"
            self._events.put_nowait(warning(text))
        self._ahead = ahead

    def _take(self, due: Sequence[Event | EventRow | BaseException]) -> None:
        """Step the machine by each event, commit once, then perform the instructions in order."""
        moves: list[Move] = []
        try:
            for event in due:
                if isinstance(event, BaseException):
                    raise event
                moves.append(self._move(moves[-1].state if moves else self.state, event))
                if moves[-1].state.phase in ENDED:
                    break
        finally:
            self._carry_out(moves)

    def _move(self, state: State, event: Event | EventRow) -> Move:
        if isinstance(event, EventRow):
            return Move(state, rows=[event])
        if self._virtual is not None:
            event = msgspec.structs.replace(event, at=self._virtual.now)
        if state.phase is Phase.JOINING and state.until and self._environment.expects():
            state = msgspec.structs.replace(state, until=self._now() + state.policy.join_s)
        state, out = step(state, event)
        last: dict[str, object] = {"state": str(self._directory)}
        told, ends = [one for one in out if isinstance(one, EventRow)], {"run_finished", "run_stopped"}
        at = {} if self._virtual is None else {SIMULATED: self._virtual.now}
        timed = {"round_started", *ends}
        more = [(last if one.kind in ends else {}) | (at if one.kind in timed else {}) for one in told]
        return Move(state, event, out, list(map(dated, told, more)))

    def _move_on(self) -> None:
        """Let virtual time move on where nothing is at work."""
        if self._virtual is None or not self._events.empty() or self._environment.expects():
            return
        for event in self._virtual.next(self.state):
            self._events.put_nowait(event)

    def _carry_out(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        if moves[-1].state.phase in ENDED or any(isinstance(move.event, DeviceOffline | Decided) for move in moves):
            self._note(self.clock())
        self._bill([one for move in moves for one in move.out])
        self._record.commit_moves(moves)
        for move in moves:
            self.state = move.state
            if isinstance(move.event, DeviceOffline | Decided | Declined):
                self._publisher.away(move.event.device)
            for save in move.out:
                if isinstance(save, do.SavedRound) and save.manifest is not None:
                    self._models.advance(save.stage, save.round, save.manifest)
                elif isinstance(save, do.TakenBack):
                    self._models.go_back(save.attempt, again=save.again)
            for row in move.rows:
                self._record.journal.append(row)
            for one in move.out:
                self._perform(one)
            if (answer := self._asked.pop(id(move.event), None)) is not None and not answer.done():
                answer.set_result(move.state)

    def _perform(self, one: do.Instruction) -> None:
        if self._virtual is not None:
            passed = self._virtual.send(one, self.state)
            self._record.keep(self._virtual.take_spent())
            if passed is None:
                return
            one = passed
        if type(one) in do.SENDS:
            self._publisher.send(cast(do.Send, one), self._models.manifest, self.state)
        elif type(one) in _RECORDED:
            return
        elif isinstance(one, do.Fetch):
            self._publisher.fetch(one, self._models.base(one.update.attempt), self.state)
        elif isinstance(one, do.EndTransfers):
            self._publisher.end_transfers()
        elif isinstance(one, do.Plan | do.Aggregate | do.Evaluate):
            self._models.start(one)
        elif isinstance(one, do.SavePlan):
            self.plan = one.plan
            self._publisher.plan = self._models.plan = one.plan
        elif isinstance(one, do.CollectGarbage):
            if self._garbage or self.state.phase in ENDED:
                self._collect(one)
            else:
                self._garbage = True  # the next tick sees to it, or the next round: offers leave first
        elif isinstance(one, do.Fail):
            raise _ERRORS[one.kind](one.message, remedy=one.remedy or None)

    def _collect(self, one: do.CollectGarbage) -> None:
        arriving = self._publisher.uploads.arriving()
        self._garbage = arriving is None  # then as soon as nothing is being checked
        if arriving is not None:
            self._models.collect(one, arriving)

    def _on_connection(self, connected: bool) -> None:
        self._connected = connected
        if connected:
            self._inbound.reset(self.clock())
            if self._listening and not self._transport.session_kept:
                self._publisher.call()  # what devices have said meanwhile is lost

    def _on_message(self, name: str, payload: bytes) -> None:
        try:
            topic = topics.parse(name)
        except ProtocolError:
            self._inbound.dropped["unknown topic"] += 1
            return
        try:
            self._received(topic, payload)
        except Exception as error:  # the store may be full: the loop must hear of it, the network thread must not
            self._events.put_nowait(error)

    def _received(self, topic: topics.Topic, payload: bytes) -> None:
        if topic.channel != "probe" and self._guard is not None and self._guard.takes(topic):
            return
        name = self.plan.names.get(topic.device, topic.device)
        if topic.channel == "probe":
            self._publisher.chunking.heard(payload)
        elif topic.channel == "up-object":
            self._inbound.heard(name, self.clock(), "upload")
            self._publisher.uploads.on_chunk(name, topic.transfer, payload)
        elif isinstance(event := self._inbound.read(topic, payload, self.clock()), Need):
            self._publisher.on_need(name, event, self._models.base, self.state)
        elif isinstance(event, LogLines):
            self._logs.received(event)
        elif isinstance(event, Renew):
            if self._guard is not None:
                self._guard.renew(msgspec.structs.replace(event, device=topic.device))
        elif isinstance(event, Joined) and self._guard is not None:
            self._guard.heard(topic.device, event.hello)
            self._events.put_nowait(msgspec.structs.replace(event, generation=self._guard.generation(topic.device)))
        elif event is not None and self._virtual is not None:  # else a tick, after which it is looked for what is next
            self._events.put_nowait(self._virtual.received(event, self.state) or Tick(self.clock()))
        elif event is not None:
            self._events.put_nowait(event)

    def _run_started(self, position: Position, states: Mapping[tuple[int, int], Manifest], *, known: bool) -> EventRow:
        """``states``: (stage, round) -> the state it made; (0, 0): the first. ``known``: the run goes on."""
        plan, initial = self.plan, states[0, 0]
        rounds = [stage.rounds for stage in plan.stages]
        where = (known and round_after(self.state, position.stage, position.round)) or (0, 0)
        for index in range(1, (where[0] or position.stage + 1) if known else 0):  # stages may have ended early
            rounds[index - 1] = max((number for stage, number in states if stage == index), default=0)
        data = {
            "name": plan.name,
            "recipe": plan.recipe,
            "stages": len(rounds),
            "rounds_total": sum(rounds),
            "broker": public_url(self._environment.broker),
            **self._publisher.facts(),
            "parts": len(initial),
            "bytes": sum(ref.size for ref in initial.values()),
            "began_at": _made_at(position),
            **({"resumed": True} if known else {}),
            **({"statistics": moving(plan)} if plan.slots.statistics else {}),
        }
        return EventRow(time.time(), "run_started", *where, data=data)


def _made_at(position: Position) -> float:
    """When the run was made first, seconds since the epoch."""
    return min([position.made_ms, *position.earlier_ms]) / 1000


def _has_ended() -> ControlError:
    return ControlError("the run has ended", remedy="`edgefl runs` shows how.")

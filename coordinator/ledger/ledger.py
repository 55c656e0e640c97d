"""The ledger of runs: every transition of the coordinator's machine is committed before a process may rely on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, and_, case, delete, func, insert, select, update
from sqlalchemy.engine import make_url

from coordinator.core.moves import Position, Save, SavedRound, SaveEnd, SavePlan, Spending, TakenBack
from coordinator.core.state import NOTHING, SnapshotChanges, State, decode
from coordinator.ledger import tables
from coordinator.ledger.database import (
    named_errors,
    open_engine,
    sqlite_url,
    transact,
    writing,
)
from coordinator.ledger.tables import (
    MADE,
    RunRow,
    SavedFigure,
    SnapshotRow,
    put,
    put_figures,
    put_spent,
    remove,
    rows,
)
from edgefl.errors import StoreError
from edgefl.plan.job import RunPlan
from edgefl.records import Attempt, EvaluationRow, Figure, Figures, Manifest
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EventRow, RoundRow, RunReport, SightingRow

replace = msgspec.structs.replace
#: Rows of a run that is taken in, inserted together.
_BATCH = 1000


class Ledger:
    """One database with any number of runs. ``url``: sqlite:///PATH, postgresql://…, or a path of a SQLite file.

    Raises StoreError when opening, reading or writing fails; ``create=False``: also when it does not exist.
    """

    def __init__(self, url: str | Path, *, create: bool = True) -> None:
        text = str(url)
        self._url = text if "://" in text else sqlite_url(Path(text))
        self._engine = open_engine(self._url, create=create)
        self._name = make_url(self._url).render_as_string(hide_password=True)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create(self, plan: RunPlan, manifest: Manifest, part_bytes: Mapping[str, int], at: float) -> None:
        """Record a new run with its initial state. Raises StoreError when the run is there already."""
        with self._writing() as connection:
            if any(rows(connection, RunRow, plan.run)):
                raise StoreError(
                    f"run {plan.run!r} is in the ledger {self._name} already",
                    remedy=f"Continue it with --resume {plan.run}, or start one of another name.",
                )
            name, recipe, whole = plan.name[:64], plan.recipe[:64], msgspec.to_builtins(plan)
            row = RunRow(plan.run, name, recipe, "running", at, None, whole, manifest, dict(part_bytes))
            connection.execute(insert(tables.runs).values(msgspec.structs.asdict(row)))

    def plan(self, run: str) -> RunPlan:
        """The plan a run was started with, or goes on by."""
        with self._reading() as connection:
            return msgspec.convert(self._run(connection, run).plan, RunPlan)

    def position(self, run: str) -> Position:
        """Where the run stands."""
        with self._reading() as connection:
            made, attempts = self._run(connection, run), list(rows(connection, SavedRound, run))
            scored = {(row.stage, row.round) for row in rows(connection, EvaluationRow, run)}
            made_ms, earlier = made_of(made, rows(connection, SnapshotRow, run))
        finished = [row for row in attempts if row.status == "done"]
        last = finished[-1] if finished else SavedRound(manifest=made.manifest)
        key = (last.stage, last.round)
        attempt = max((row.attempt for row in attempts if (row.stage, row.round) > key), default=0)
        unevaluated = Attempt(run, *key, last.attempt, made_ms) if finished and key not in scored else None
        return Position(*key, attempt, last.manifest or {}, unevaluated, made_ms, earlier)

    def states(self, run: str) -> dict[tuple[int, int], Manifest]:
        """The model state each finished round made, by (stage, round); (0, 0) is the initial state."""
        with self._reading() as connection:
            initial = self._run(connection, run).manifest
            done = [row for row in rows(connection, SavedRound, run) if row.status == "done"]
        return {(0, 0): initial, **{(row.stage, row.round): row.manifest or {} for row in done}}

    def _before(self, connection: Connection, run: str, attempt: Attempt) -> Manifest:
        """The model state that a round began with."""
        done = [row for row in rows(connection, SavedRound, run) if row.status == "done"]
        earlier = [row for row in done if (row.stage, row.round) < (attempt.stage, attempt.round)]
        last = max(earlier, key=lambda row: (row.stage, row.round), default=None)
        return self._run(connection, run).manifest if last is None else last.manifest or {}

    def reopen(self, run: str, at: float, going_on: Attempt | None = None) -> None:
        """Mark a run as running again, and its open attempts as failed, except the attempt ``going_on``.

        One that was done keeps the time of its end: it has nothing left to do.
        """
        with self._writing() as connection:
            done = tables.runs.c.status == "done"
            _set_run(connection, run, status="running", finished_at=case((done, tables.runs.c.finished_at)))
            broken = (tables.rounds.c.run == run) & (tables.rounds.c.status == "running")
            if going_on is not None:
                broken &= ~_is(going_on)
            connection.execute(update(tables.rounds).where(broken).values(status="failed", ended_at=at))

    def undo_stop(self, run: str) -> None:
        """Mark a run that its operator has stopped as one that was interrupted: whatever starts it goes on with it."""
        with self._writing() as connection:
            if self._run(connection, run).status == "stopped":
                _set_run(connection, run, status="running", finished_at=None)

    def last_event_at(self, run: str) -> float:
        """When the run's newest event was, seconds since the epoch; 0: there is none."""
        with self._reading() as connection:
            query = select(func.max(tables.events.c.at)).where(tables.events.c.run == run)
            return connection.execute(query).scalar() or 0.0

    def snapshot(self, state: State) -> State | None:
        """``state``, which has not begun, as the last process that committed left it; None: nothing is on record."""
        with self._reading() as connection:
            return decode(state, ((r.kind, r.name, r.value) for r in rows(connection, SnapshotRow, state.plan.run)))

    def measured(self, attempt: Attempt) -> dict[str, dict[str, float]]:
        """Values of the measured figures of an attempt, by device and name."""
        of, found = tables.figures, defaultdict[str, dict[str, float]](dict)
        where = (of.c.run == attempt.run) & of.c.predicted.is_(False) & _is(attempt, of)
        with self._reading() as connection:
            for device, name, value in connection.execute(select(of.c.device, of.c.name, of.c.value).where(where)):
                found[device][name] = value or 0.0
        return found

    def commit(
        self,
        run: str,
        saves: Iterable[Save],
        events: Iterable[EventRow],
        at: float,
        changed: SnapshotChanges = NOTHING,
    ) -> None:
        """Write what changed, and the events to announce, in one transaction. ``at``: seconds since the epoch.

        A server that is being restarted is waited for (``coordinator.ledger.database.transact``).
        """
        announced = list(events)
        saved, ends, plans, back = list[msgspec.Struct](), list[SaveEnd](), list[RunPlan](), list[TakenBack]()
        spent = list[Spending]()
        for one in saves:
            if isinstance(one, SaveEnd):
                ends.append(one)
            elif isinstance(one, SavePlan):
                plans.append(one.plan)
            elif isinstance(one, TakenBack):
                back.append(one)
            elif isinstance(one, Spending):
                spent.append(one)
            elif isinstance(one, SavedRound):
                saved.append(replace(one, started_at=at, ended_at=None if one.status == "running" else at))
            else:
                saved.append(one)
        pieces = [SnapshotRow(kind, name, value) for (kind, name), value in changed.rows.items()]

        def work(connection: Connection) -> None:
            put(connection, run, saved)
            put_figures(connection, run, [row for row in saved if isinstance(row, AssignmentRow)])
            put_spent(connection, run, spent)
            for one in back:
                _take_back(
                    connection, run, one.attempt, None if one.again else self._before(connection, run, one.attempt)
                )
            for plan in plans:
                _set_run(connection, run, plan=msgspec.to_builtins(plan))
            for end in ends:
                _set_run(connection, run, status=end.status, finished_at=func.coalesce(tables.runs.c.finished_at, at))
            remove(connection, tables.snapshots, run, ("kind", "name"), changed.deleted)
            put(connection, run, [*pieces, *announced])

        with named_errors(self._name):
            transact(self._engine, self._name, work)

    def add_bundle(self, run: str, bundle: BundleRow) -> None:
        """Record an exported file; one of the same name is replaced."""
        with self._writing() as connection:
            put(connection, run, [bundle])

    def dump(self, run: str) -> list[tuple[str, msgspec.Struct]]:
        """All rows of a run as (table, row), as they were at one instant, also while a coordinator writes."""
        with named_errors(self._name), self._engine.connect() as connection:
            if self._engine.dialect.name == "postgresql":  # one view of all tables; a SQLite transaction has it anyway
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            self._run(connection, run)
            return [(name, row) for name, kind in tables.KEPT.items() for row in rows(connection, kind, run)]

    def take_in(self, run: str, kept: Iterable[msgspec.Struct]) -> None:
        """Record a run by the rows that ``dump`` gave. Raises StoreError when it is there already."""
        with self._writing() as connection:
            if any(rows(connection, RunRow, run)):
                remedy = "Give another --ledger, or take that run out of it."
                raise StoreError(f"run {run!r} is in the ledger {self._name} already", remedy=remedy)
            batch = list[msgspec.Struct]()
            for row in kept:
                batch.append(row)
                if len(batch) == _BATCH:
                    put(connection, run, batch)
                    batch.clear()
            put(connection, run, batch)

    def forget(self, run: str) -> None:
        """Delete all rows of a run, if there are any."""
        with self._writing() as connection:
            for table in reversed(tables.metadata.sorted_tables):
                connection.execute(delete(table).where(table.c.run == run))

    def report(self, run: str = "") -> RunReport:
        """Everything about a run; "": the newest. Raises StoreError naming the runs there are."""
        with self._reading() as connection:
            if not run and not (runs := _runs(connection)):
                remedy = "The run ended before it had begun: start it again with --resume, or delete its directory."
                raise StoreError(f"the ledger {self._name} holds no run", remedy=remedy)
            head = _head(self._run(connection, run)) if run else runs[0]
            last_attempts = {(row.stage, row.round): row for row in rows(connection, RoundRow, head.run)}
            return replace(
                head,
                devices=tuple(rows(connection, DeviceRow, head.run)),
                sightings=tuple(rows(connection, SightingRow, head.run)),
                rounds=tuple(last_attempts.values()),
                assignments=tuple(_assignments(connection, head.run)),
                evaluations=tuple(rows(connection, EvaluationRow, head.run)),
                events=tuple(rows(connection, EventRow, head.run)),
                bundles=tuple(rows(connection, BundleRow, head.run)),
            )

    def runs(self) -> list[RunReport]:
        """All runs without their rows, newest first."""
        with self._reading() as connection:
            return _runs(connection)

    def _run(self, connection: Connection, run: str) -> RunRow:
        """One run. Raises StoreError naming the runs there are."""
        if (row := next(rows(connection, RunRow, run), None)) is not None:
            return row
        known = ", ".join(report.run for report in _runs(connection)) or "none"
        raise StoreError(f"run {run!r} is not in the ledger {self._name}", remedy=f"Runs there are: {known}.")

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with named_errors(self._name), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            yield connection


def made_of(made: RunRow, pieces: Iterable[SnapshotRow]) -> tuple[int, tuple[int, ...]]:
    """When a run was made, in milliseconds since the epoch: restored last; and the times before that."""
    restored = next((msgspec.convert(one.value, list[int]) for one in pieces if one.kind == MADE), [])
    *earlier, last = [round(1000 * made.started_at), *restored]
    return last, tuple(earlier)


def _take_back(connection: Connection, run: str, attempt: Attempt, before: Manifest | None) -> None:
    """Withdraw a finished round: as failed, or as one that left the state ``before``."""
    query = update(tables.rounds).where((tables.rounds.c.run == run) & _is(attempt))
    failed = {"status": "failed", "manifest": None}
    connection.execute(query.values(failed if before is None else {"manifest": msgspec.to_builtins(before)}))
    of = tables.evaluations.c
    where = (of.run == run) & (of.stage == attempt.stage) & (of.round == attempt.round)
    connection.execute(delete(tables.evaluations).where(where))


def _is(attempt: Attempt, table: Table = tables.rounds) -> ColumnElement[bool]:
    """Rows of a table that are of this attempt of the run."""
    return and_(*(table.c[name] == getattr(attempt, name) for name in ("stage", "round", "attempt")))


def _set_run(connection: Connection, run: str, **values: object) -> None:
    connection.execute(update(tables.runs).where(tables.runs.c.run == run).values(**values))


def _runs(connection: Connection) -> list[RunReport]:
    """All runs without their rows, newest first."""
    return [_head(row) for row in sorted(rows(connection, RunRow), key=lambda row: (-row.started_at, row.run))]


def _head(row: RunRow) -> RunReport:
    values = msgspec.structs.asdict(row)
    values |= {name: row.plan[name] for name in ("config", "stages", "groups", "names") if name in row.plan}
    return msgspec.convert(values, RunReport)


def _assignments(connection: Connection, run: str) -> Iterator[AssignmentRow]:
    figures: dict[tuple[int, int, int, str, bool], Figures] = defaultdict(dict)
    for row in rows(connection, SavedFigure, run):
        figure = Figure(row.value, row.kind, row.source, row.reason)
        figures[row.stage, row.round, row.attempt, row.device, row.predicted][row.name] = figure
    for assignment in rows(connection, AssignmentRow, run):
        slot = (assignment.stage, assignment.round, assignment.attempt, assignment.device)
        predicted, measured = figures.get((*slot, True), {}), figures.get((*slot, False), {})
        yield replace(assignment, predicted=predicted, measured=measured)

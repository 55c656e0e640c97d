"""The run's memory: every transition of the machine is committed here before it is announced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, and_, func, insert, select, update
from sqlalchemy.engine import make_url

from coordinator.core.instructions import Save
from coordinator.core.snapshot import NOTHING, Changes, Snapshot, decode
from coordinator.ledger import schema as tables
from coordinator.ledger.database import LEDGER_COPY, copy_to_read, named_errors, open_engine, sqlite_url
from coordinator.ledger.read import read_report, read_runs
from coordinator.ledger.transactions import transact, writing
from coordinator.ledger.write import Saving
from edgefl.errors import StoreError
from edgefl.plan.job import RunPlan
from edgefl.records import Attempt, Manifest
from edgefl.run_records import BundleRow, EventRow, RunReport


class Position(NamedTuple):
    """Where a run stands: its last finished round (0, 0: none), and the attempts begun for the next.

    ``made_ms``: when the run was made, in milliseconds since the epoch.
    """

    stage: int
    round: int
    attempt: int
    manifest: Manifest
    unevaluated: Attempt | None
    made_ms: int


class Ledger:
    """One database with any number of runs. ``url``: sqlite:///PATH, postgresql://…, or a path of a SQLite file.

    Raises StoreError when it can not be opened, read or written; ``create=False``: also when it does not exist.
    ``reading``: for reports, which leave a ledger of an older revision as it is.
    """

    def __init__(self, url: str | Path, *, create: bool = True, reading: bool = False) -> None:
        text = str(url)
        self._url = text if "://" in text else sqlite_url(Path(text))
        self._copy = copy_to_read(self._url) if reading else None
        here = self._url if self._copy is None else sqlite_url(Path(self._copy.name) / LEDGER_COPY)
        self._engine = open_engine(here, create=create and not reading, migrate=not reading or self._copy is not None)
        self._name = make_url(self._url).render_as_string(hide_password=True)
        self._saving = Saving(self._engine.dialect.name)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()
        if self._copy is not None:
            self._copy.cleanup()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create(self, plan: RunPlan, manifest: Manifest, part_bytes: Mapping[str, int], at: float) -> None:
        """Note a new run with its initial state. Raises StoreError when the run is there already."""
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            if connection.execute(select(tables.runs.c.run).where(tables.runs.c.run == plan.run)).first():
                raise StoreError(
                    f"run {plan.run!r} is in the ledger {self._name} already",
                    remedy=f"Continue it with --resume {plan.run}, or start one of another name.",
                )
            values = {
                "run": plan.run,
                "name": plan.name[:64],
                "recipe": plan.recipe[:64],
                "status": "running",
                "started_at": at,
                "plan": msgspec.to_builtins(plan),
                "manifest": msgspec.to_builtins(manifest),
                "part_bytes": dict(part_bytes),
            }
            connection.execute(insert(tables.runs).values(values))

    def plan(self, run: str) -> RunPlan:
        """The plan a run was started with."""
        row = self._run(run)
        with named_errors(self._name):
            return msgspec.convert(row["plan"], RunPlan)

    def replan(self, plan: RunPlan) -> None:
        """The run goes on by another plan than it was started with."""
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            values = {"plan": msgspec.to_builtins(plan)}
            connection.execute(update(tables.runs).where(tables.runs.c.run == plan.run).values(values))

    def position(self, run: str) -> Position:
        """Where the run stands."""
        with named_errors(self._name), self._engine.connect() as connection:
            of_run = tables.rounds.c.run == run
            rounds = select(tables.rounds).where(of_run).order_by(tables.rounds.c.stage, tables.rounds.c.round)
            rows = [dict(row) for row in connection.execute(rounds).mappings()]
            done = [row for row in rows if row["status"] == "done"]
            made = self._run(run)
            made_ms = round(1000 * made["started_at"])
            if not done:
                attempt = max((row["attempt"] for row in rows), default=0)
                return Position(0, 0, attempt, self._manifest(made["manifest"]), None, made_ms)
            last = done[-1]
            key = (last["stage"], last["round"])
            attempt = max((row["attempt"] for row in rows if (row["stage"], row["round"]) > key), default=0)
            is_last = (tables.evaluations.c.stage == key[0]) & (tables.evaluations.c.round == key[1])
            evaluated = select(tables.evaluations.c.id).where((tables.evaluations.c.run == run) & is_last).limit(1)
            missing = connection.execute(evaluated).first() is None
        unevaluated = Attempt(run, *key, last["attempt"], made_ms) if missing else None
        return Position(*key, attempt, self._manifest(last["manifest"]), unevaluated, made_ms)

    def states(self, run: str) -> dict[tuple[int, int], Manifest]:
        """The model state each finished round made, by (stage, round); (0, 0) is the initial state."""
        states = {(0, 0): self._manifest(self._run(run)["manifest"])}
        with named_errors(self._name), self._engine.connect() as connection:
            query = select(tables.rounds).where((tables.rounds.c.run == run) & (tables.rounds.c.status == "done"))
            for row in connection.execute(query).mappings():
                states[row["stage"], row["round"]] = self._manifest(row["manifest"])
        return states

    def reopen(self, run: str, at: float, going_on: Attempt | None = None) -> None:
        """A run goes on: what was open when it stopped has failed, but for the attempt that is ``going_on``."""
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            values = {"status": "running", "finished_at": None}
            connection.execute(update(tables.runs).where(tables.runs.c.run == run).values(values))
            broken = (tables.rounds.c.run == run) & (tables.rounds.c.status == "running")
            if going_on is not None:
                names = ("stage", "round", "attempt")
                broken &= ~and_(*(tables.rounds.c[name] == getattr(going_on, name) for name in names))
            connection.execute(update(tables.rounds).where(broken).values(status="failed", ended_at=at))

    def take_back(self, run: str, attempt: Attempt) -> None:
        """Mark a completed round as failed: the run can not continue from the state it made."""
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            names = ("stage", "round", "attempt")
            key = and_(*(tables.rounds.c[name] == getattr(attempt, name) for name in names))
            query = update(tables.rounds).where((tables.rounds.c.run == run) & key)
            connection.execute(query.values(status="failed", manifest=None))

    def last_told(self, run: str) -> float:
        """When the run's newest event was, seconds since the epoch; 0: there is none."""
        with named_errors(self._name), self._engine.connect() as connection:
            query = select(func.max(tables.events.c.at)).where(tables.events.c.run == run)
            return connection.execute(query).scalar() or 0.0

    def snapshot(self, run: str) -> Snapshot | None:
        """The coordinator's state as the last process that committed left it; None: it kept none."""
        columns = (tables.snapshots.c.kind, tables.snapshots.c.name, tables.snapshots.c.value)
        with named_errors(self._name), self._engine.connect() as connection:
            rows = connection.execute(select(*columns).where(tables.snapshots.c.run == run)).all()
            return decode((kind, name, value) for kind, name, value in rows)

    def commit(
        self,
        run: str,
        saves: Iterable[Save],
        events: Iterable[EventRow],
        at: float,
        changed: Changes = NOTHING,
    ) -> None:
        """Write what changed and what will be told, in one transaction. ``at``: seconds since the epoch.

        A server that is being restarted is waited for (``coordinator.ledger.transactions``).
        """
        every, told = list(saves), list(events)

        def work(connection: Connection) -> None:
            self._saving.save(connection, run, every, at)
            self._saving.keep(connection, run, changed)
            self._saving.tell(connection, run, told)

        with named_errors(self._name):
            transact(self._engine, self._name, work)

    def add_bundle(self, run: str, bundle: BundleRow) -> None:
        """Note an exported file; one of the same name is replaced."""
        values = msgspec.to_builtins(bundle)
        with named_errors(self._name), writing(self._engine) as connection, connection.begin():
            self._saving.put(connection, tables.bundles, [{"run": run, **values}])

    def report(self, run: str = "") -> RunReport:
        """Everything about a run; "": the newest. Raises StoreError naming the runs there are."""
        with named_errors(self._name), self._engine.connect() as connection:
            return read_report(connection, run or self._newest(), self._name)

    def runs(self) -> list[RunReport]:
        """All runs without their rows, newest first."""
        with named_errors(self._name), self._engine.connect() as connection:
            return read_runs(connection)

    def _newest(self) -> str:
        runs = self.runs()
        if not runs:
            remedy = "The run ended before it had begun: start it again with --resume, or delete its directory."
            raise StoreError(f"the ledger {self._name} holds no run", remedy=remedy)
        return runs[0].run

    def _run(self, run: str) -> dict[str, Any]:
        with named_errors(self._name), self._engine.connect() as connection:
            row = connection.execute(select(tables.runs).where(tables.runs.c.run == run)).mappings().first()
        if row is None:
            known = ", ".join(sorted(report.run for report in self.runs())) or "none"
            raise StoreError(f"run {run!r} is not in the ledger {self._name}", remedy=f"Runs there are: {known}.")
        return dict(row)

    def _manifest(self, value: Any) -> Manifest:
        with named_errors(self._name):
            return msgspec.convert(value, Manifest)

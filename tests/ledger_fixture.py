"""Where a test's ledger is: a SQLite file, or a database of its own on the server EDGEFL_TEST_POSTGRESQL names.

`make test-postgresql` starts such a server and runs with it the very tests that otherwise run on SQLite.
"""

from __future__ import annotations

import atexit
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from coordinator.core.moves import SavedRound
from edgefl.records import Attempt
from edgefl.storage.disk import LEDGER, note_ledger

#: postgresql://USER@HOST/DATABASE of an account that may create databases.
POSTGRESQL = os.environ.get("EDGEFL_TEST_POSTGRESQL", "")
on_postgresql = pytest.mark.skipif(
    not POSTGRESQL, reason="needs a PostgreSQL server: `make test-postgresql` starts one, and runs this"
)
_MADE: dict[Path, str] = {}


def ledger_at(path: Path) -> str | Path:
    """The ledger that stands for this file: ``path`` itself, or the URL of a database made for it."""
    if not POSTGRESQL:
        return path
    if path not in _MADE:
        _MADE[path] = new_database()
    return _MADE[path]


def ledger_in(directory: Path) -> str | Path:
    """The same for the directory of a run, which is told where its ledger is."""
    directory.mkdir(parents=True, exist_ok=True)
    place = ledger_at(directory / LEDGER)
    if isinstance(place, str):
        note_ledger(directory, place)
    return place


def moved(directory: Path, to: Path) -> Path:
    """``to``, where the run's directory is from now on; its ledger comes along, or stays in its database."""
    directory.rename(to)
    if POSTGRESQL:
        _MADE[to / LEDGER] = _MADE.pop(directory / LEDGER)
    ledger_in(to)
    return to


def saved_round(attempt: Attempt, status: str = "running", **more: Any) -> SavedRound:
    """The row of a round in this attempt."""
    return SavedRound(attempt.stage, attempt.round, attempt.attempt, status, **more)


def engine_of(place: str | Path) -> Engine:
    """A connection of the test's own to a ledger."""
    if isinstance(place, Path):
        return create_engine(f"sqlite:///{place}")
    return create_engine(make_url(place).set(drivername="postgresql+psycopg"))


def new_database() -> str:
    """The URL of an empty database, dropped when the tests are over."""
    name = f"edgefl_{secrets.token_hex(8)}"
    _on_server(f"CREATE DATABASE {name} TEMPLATE template0")
    return make_url(POSTGRESQL).set(database=name).render_as_string(hide_password=False)


def _on_server(*statements: str) -> None:
    engine = create_engine(make_url(POSTGRESQL).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
    finally:
        engine.dispose()


@atexit.register
def _drop() -> None:
    if _MADE:
        names = [make_url(url).database for url in _MADE.values()]
        _on_server(*(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)" for name in names))

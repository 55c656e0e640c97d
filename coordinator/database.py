"""Opens the ledger's database: SQLite in WAL mode by default, PostgreSQL by URL; migrates it; names its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.sql import column, table

from coordinator.tables import HEAD
from coordinator.timeouts import LEDGER_BUSY_S
from edgefl.errors import StoreError

_DAMAGED = "The file is damaged: put back a copy of it, or move this run's directory away."


def sqlite_url(path: Path) -> str:
    """URL of a SQLite file."""
    return f"sqlite:///{path}"


def open_engine(url: str, *, create: bool) -> Engine:
    """An engine on a database of the current revision. Raises StoreError with the reason and the way out."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"{url!r} is not a database URL", remedy="Use sqlite:///PATH or postgresql://…") from error
    name = parsed.render_as_string(hide_password=True)
    if parsed.get_backend_name() == "sqlite":
        file = Path(parsed.database or "")
        if not create and not file.is_file():
            raise StoreError(
                f"there is no ledger {file}", remedy="Give the directory of a run; `edgefl runs` lists them."
            )
    try:
        engine = create_engine(parsed, json_serializer=_to_json, json_deserializer=msgspec.json.decode)
    except ImportError as error:
        raise StoreError(
            f"the ledger {name} needs the package '{error.name}'", remedy=f"Install it with: pip install {error.name}"
        ) from error
    if parsed.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    with named_errors(name):
        try:
            _migrate(engine, name)
        except BaseException:
            engine.dispose()
            raise
    return engine


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Database errors as StoreError that names the ledger."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        damaged = any(word in str(cause) for word in ("not a database", "malformed"))
        remedy = _DAMAGED if damaged else None
        raise StoreError(f"the ledger {name} can not be used: {cause}", remedy=remedy) from error
    except OSError as error:
        raise StoreError(f"the ledger {name} can not be used: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"the ledger {name} holds what makes no sense: {error}", remedy=_DAMAGED) from error


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take the write lock at once, so that two writers wait instead of failing."""
    return engine.connect().execution_options(immediate=True)


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # NaN and infinity become null: JSON has neither


def _prepare(connection: Any, _record: Any) -> None:
    """WAL: readers never wait for the writer. FULL: a commit that returned survives a loss of power."""
    connection.isolation_level = None  # begin is ours, below: then changes of tables are part of a transaction too
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={round(LEDGER_BUSY_S * 1000)}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(select(column("version_num")).select_from(table("alembic_version"))).scalar()


def _migrate(engine: Engine, name: str) -> None:
    with engine.connect() as connection:
        if _revision(connection) == HEAD:
            return
    # Alembic is loaded only for a ledger that is not current: it costs memory the coordinator needs not hold.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", "coordinator:migrations")
    with writing(engine) as connection, connection.begin():
        if _revision(connection) == HEAD:
            return
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, HEAD)
        except CommandError as error:
            raise StoreError(
                f"the ledger {name} has a revision this version does not know: {error}",
                remedy="Bring EdgeFL to the version that wrote it, or choose another directory.",
            ) from error

"""The ledger's database: SQLite in WAL mode by default, PostgreSQL by URL. Opened, made, written in transactions.

A transaction survives a restart of the database's server and is committed exactly once. Errors name the way out.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from coordinator.core.timeouts import LEDGER_AWAY_S, LEDGER_BUSY_S, LEDGER_CONNECT_S, LEDGER_RETRY_S
from coordinator.ledger.tables import REVISION, metadata, version
from edgefl.errors import MissingDependencyError, StoreError

_LOG = logging.getLogger(__name__)
_DAMAGED = "The file is damaged: put back a copy of it, or move this run's directory away."
_KINDS = "Use sqlite:///PATH or postgresql://USER@HOST/DATABASE"
#: A server that vanished is noticed within half a minute, not after the kernel's two hours.
#: Texts are UTF-8 also in a database of no encoding (SQL_ASCII), of which the driver would give bytes.
_CONNECTION = {
    "client_encoding": "utf8",
    "connect_timeout": LEDGER_CONNECT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
#: SQLSTATE of a server that stops, crashed or starts; class 08 is a connection that broke. None: none was opened.
_AWAY = (None, "57P01", "57P02", "57P03")
#: Advisory lock: of two coordinators at one empty database, one makes the tables and the other waits.
_MAKING = 0x45444745464C
#: Words of the database's error -> remedy.
_REMEDIES = (
    (("not a database", "malformed"), _DAMAGED),
    (("readonly", "read-only"), "It can only be read: let this account write it, or work on a copy of it."),
    (("locked", "lock timeout"), "Another process holds it: let that end, then go on with --resume."),
    (("does not exist",), "Create the database first (createdb), or correct its name in the URL."),
    (("authentication", "permission denied", "role"), "Check the user, the password and its rights in the database."),
)
_GONE = "Start the database's server, or mend the way to it, then go on with --resume: what was committed is kept."


def sqlite_url(path: Path) -> str:
    """URL of a SQLite file."""
    return f"sqlite:///{path}"


class NoLedgerError(StoreError):
    """No ledger has been made there, or not yet."""


def open_engine(url: str, *, create: bool) -> Engine:
    """An engine on a database of this revision. Raises StoreError with the reason and the way out."""
    parsed = _parsed(url)
    name = parsed.render_as_string(hide_password=True)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite:
        file = Path(parsed.database or "")
        if not create and not file.is_file():
            remedy = "Give the directory of a run; `edgefl runs` lists them."
            raise NoLedgerError(f"there is no ledger {file}", remedy=remedy)
    engine = _engine(parsed, name)
    event.listen(engine, "connect", _prepare if sqlite else _prepare_postgresql)
    if sqlite:
        event.listen(engine, "begin", _begin)
    with named_errors(name):
        try:
            _make(engine, name, create=create)
        except BaseException:
            engine.dispose()
            raise
    return engine


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"{url!r} is not a database URL", remedy=_KINDS + ".") from error
    kind = parsed.get_backend_name()
    if kind not in {"sqlite", "postgresql"}:
        raise StoreError(f"a ledger cannot be kept in {kind}", remedy=_KINDS + ".")
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


def _engine(parsed: URL, name: str) -> Engine:
    options: dict[str, object] = {"json_serializer": _to_json, "json_deserializer": msgspec.json.decode}
    if parsed.get_backend_name() == "postgresql":
        options["connect_args"] = {key: value for key, value in _CONNECTION.items() if key not in parsed.query}
        options["pool_pre_ping"] = True  # a connection that the server has ended meanwhile is not used
    try:
        return create_engine(parsed, **options)
    except ModuleNotFoundError as error:
        package = error.name or "psycopg"
        if package == "psycopg":
            raise MissingDependencyError("psycopg", "postgresql") from error
        remedy = f"Install it with: pip install {package}"
        raise StoreError(f"the ledger {name} needs the package {package!r}", remedy=remedy) from error
    except NoSuchModuleError as error:
        raise StoreError(f"there is no driver {parsed.drivername!r} for a ledger", remedy=_KINDS + ".") from error


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Database errors as StoreError that names the ledger."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = _reason(error)
        known = (remedy for words, remedy in _REMEDIES if any(word in cause for word in words))
        elsewhere = _GONE if _is_gone(error) and not name.startswith("sqlite") else None
        raise StoreError(f"the ledger {name} cannot be used: {cause}", remedy=next(known, elsewhere)) from error
    except OSError as error:
        raise StoreError(f"the ledger {name} cannot be used: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"the ledger {name} holds what makes no sense: {error}", remedy=_DAMAGED) from error


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take SQLite's write lock at once, so that two writers wait instead of failing."""
    return engine.connect().execution_options(immediate=True)


def transact(engine: Engine, name: str, work: Callable[[Connection], None]) -> None:
    """Do ``work`` in a transaction. A server that is away is waited for up to LEDGER_AWAY_S; then its error is raised.

    After a commit whose answer was lost, the server is asked by transaction number whether it happened: ``work`` may be
    called several times and counts once. ``name``: of the ledger, for the log.
    """
    number, gone_at = "", 0.0
    while True:
        try:
            with writing(engine) as connection, connection.begin():
                if number and _committed(connection, number):
                    return
                if engine.dialect.name == "postgresql":
                    number = str(connection.execute(text("SELECT pg_current_xact_id()::text")).scalar())
                work(connection)
            break
        except DBAPIError as error:
            if engine.dialect.name != "postgresql" or not _is_gone(error):
                raise
            if not gone_at:
                gone_at = time.monotonic()
                _LOG.warning("the ledger %s is away (%s); waiting for it", name, _reason(error))
            elif time.monotonic() - gone_at > LEDGER_AWAY_S:
                raise
            time.sleep(LEDGER_RETRY_S)
    if gone_at:
        _LOG.warning("the ledger %s answers again after %.1f s", name, time.monotonic() - gone_at)


def _reason(error: Exception) -> str:
    """The database's error message, in one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _is_gone(error: Exception) -> bool:
    """Whether the database's server could not be reached, or was lost."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or (isinstance(error, OperationalError) and (state in _AWAY or str(state).startswith("08")))


def _committed(connection: Connection, number: str) -> bool:
    """Whether that transaction was committed. One that is still open has lost its client and ends: it is waited for."""
    asked = text("SELECT pg_xact_status((:number)::xid8)")
    for _ in range(round(LEDGER_AWAY_S / LEDGER_RETRY_S)):
        status = connection.execute(asked, {"number": number}).scalar()
        if status != "in progress":
            return bool(status == "committed")
        time.sleep(LEDGER_RETRY_S)
    raise OperationalError("pg_xact_status", {}, Exception(f"transaction {number} does not end"))


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()  # NaN and infinity become null: JSON has neither


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    """WAL: readers never wait for the writer. FULL: a commit that returned survives a loss of power."""
    connection.isolation_level = None  # begin is ours, below: then changes of tables are part of a transaction too
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(f"PRAGMA busy_timeout={round(LEDGER_BUSY_S * 1000)}")
        _to_wal(cursor)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")


def _to_wal(cursor: sqlite3.Cursor) -> None:
    """Set journal mode WAL; retried, since SQLite does not wait for another connection that sets it."""
    until = time.monotonic() + LEDGER_BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(LEDGER_RETRY_S)


def _prepare_postgresql(connection: DBAPIConnection, _record: object) -> None:
    """Lock time-out as SQLite's; a commit that returned survives a loss of power, as there."""
    lasting = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(f"SET lock_timeout = {round(LEDGER_BUSY_S * 1000)}")
        cursor.execute(lasting)
    connection.commit()


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(version.name):
        return None
    return connection.execute(select(version.c.version_num)).scalar()


def _make(engine: Engine, name: str, *, create: bool) -> None:
    """Make the tables of an empty database. Raises NoLedgerError, or StoreError for those of another revision."""
    with engine.connect() as connection:
        revision = _revision(connection)
    if revision is None and not create:
        remedy = "Give the directory of a run, or its URL. Did it end before it had begun, use --resume."
        raise NoLedgerError(f"there is no ledger in {name}", remedy=remedy)
    if revision is None:
        with writing(engine) as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_MAKING)))
            if _revision(connection) is None:
                metadata.create_all(connection)
                version.create(connection)
                connection.execute(insert(version).values(version_num=REVISION))
    elif revision != REVISION:
        raise StoreError(
            f"the ledger {name} has the revision {revision}, this version of EdgeFL {REVISION}",
            remedy="Bring EdgeFL to the version that wrote it, or choose another directory.",
        )

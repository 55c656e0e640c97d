"""A transaction that survives a restart of the database's server and is committed exactly once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from coordinator.core.timeouts import LEDGER_AWAY_S, LEDGER_RETRY_S

_LOG = logging.getLogger(__name__)

#: SQLSTATE of a server that stops, crashed or starts; class 08 is a connection that broke. None: none was opened.
_AWAY = (None, "57P01", "57P02", "57P03")


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take SQLite's write lock at once, so that two writers wait instead of failing."""
    return engine.connect().execution_options(immediate=True)


def transact(engine: Engine, name: str, work: Callable[[Connection], None]) -> None:
    """Do ``work`` in a transaction. A server that is away is waited for up to LEDGER_AWAY_S; then its error is raised.

    After a commit whose answer was lost, the server is asked by transaction number whether it happened: ``work`` may be
    called several times and counts once. ``name``: of the ledger, for the log.
    """
    number = ""
    gone_at = 0.0
    while True:
        try:
            with writing(engine) as connection, connection.begin():
                if number and _committed(connection, number):
                    return
                number = _number(connection)
                work(connection)
            break
        except DBAPIError as error:
            if not _away(engine, error):
                raise
            if not gone_at:
                gone_at = time.monotonic()
                _LOG.warning("the ledger %s is away (%s); waiting for it", name, reason(error))
            elif time.monotonic() - gone_at > LEDGER_AWAY_S:
                raise
            time.sleep(LEDGER_RETRY_S)
    if gone_at:
        _LOG.warning("the ledger %s answers again after %.1f s", name, time.monotonic() - gone_at)


def reason(error: Exception) -> str:
    """The database's error message, in one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def gone(error: Exception) -> bool:
    """Whether the database's server could not be reached, or was lost."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or (isinstance(error, OperationalError) and (state in _AWAY or str(state).startswith("08")))


def _away(engine: Engine, error: Exception) -> bool:
    return engine.dialect.name == "postgresql" and gone(error)


def _number(connection: Connection) -> str:
    """The transaction's number, by which ``_committed`` finds it again; "" where no server can be lost."""
    if connection.dialect.name != "postgresql":
        return ""
    return str(connection.execute(text("SELECT pg_current_xact_id()::text")).scalar())


def _committed(connection: Connection, number: str) -> bool:
    """Whether that transaction was committed. One that is still open has lost its client and ends: it is waited for."""
    asked = text("SELECT pg_xact_status((:number)::xid8)")
    for _ in range(round(LEDGER_AWAY_S / LEDGER_RETRY_S)):
        status = connection.execute(asked, {"number": number}).scalar()
        if status != "in progress":
            return bool(status == "committed")
        time.sleep(LEDGER_RETRY_S)
    raise OperationalError("pg_xact_status", {}, Exception(f"transaction {number} does not end"))

"""Retention: old runs are deleted, ledger and objects and directory together, also when that was broken off before."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import typer

from edgefl.api.runs import BUNDLES
from edgefl.cli.options import show
from edgefl.errors import EdgeFLError, StoreError
from edgefl.report import units
from edgefl.report.grid import Column, table
from edgefl.storage.disk import (
    EVENTS,
    LEDGER,
    LEDGER_URL,
    hold_directory,
    is_held,
    ledger_file,
    ledger_of,
    read_at_most,
    store_errors,
)

#: There from the first thing that is deleted to the last, with the names of what goes. A crash is gone on from.
MARK = ".pruning"
#: Bytes of it: a run's directory holds some twenty names.
_MARK_BYTES = 2**20
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
#: A run that can be gone on with is not old, but unfinished.
_ENDED = ("done", "failed")
#: What a start leaves in a run's directory before the run begins. A directory that holds anything else is no start's.
_OF_A_START = {"run.yaml", "shares", "broker", "logs", "objects", "devices", "agents.json", "web-link", EVENTS, "lock"}
_OF_A_START |= {f"{LEDGER}{end}" for end in ("", "-wal", "-shm", "-journal")}
_OF_A_START |= {LEDGER_URL, "control.sock", "tensorboard", "mlflow"}
#: A start holds no lock while it reads its data; after so long without a change in its directory there is none.
_STARTING_S = 3600.0
#: Bytes of an event log in which the run's begin, before which there are few events, is looked for.
_FIRST_BYTES = 2**20


class Pruned(NamedTuple):
    """A run, and why it stays ("": it goes) or what deleting it frees."""

    run: str
    kept: str
    freed_bytes: int = 0


class Policy(NamedTuple):
    """Runs to delete: beyond the newest ``keep``, and ended longer than ``older_s`` ago. ``bundles``: these stay."""

    keep: int | None
    older_s: float | None
    bundles: bool = False
    unfinished: bool = False


def seconds(text: str) -> float:
    """ "30d" as seconds. Raises typer's usage error."""
    if not (found := re.fullmatch(r"(\d{1,6})([hdw])", text)):
        raise typer.BadParameter(f"{text!r} is no duration; write 12h, 30d or 8w", param_hint="--older-than")
    return int(found[1]) * _SECONDS[found[2]]


def prune(runs: Path, policy: Policy, form: str, *, dry_run: bool) -> None:
    """Delete what the policy gives up, and say what that freed, run by run."""
    if policy.keep is None and policy.older_s is None:
        raise typer.BadParameter("say which runs go: --keep N, --older-than 30d, or both", param_hint="prune")
    found = [_pruned(directory, why, policy, dry_run=dry_run) for directory, why in _chosen(runs, policy)]
    freed = sum(one.freed_bytes for one in found)
    columns: list[Column[Pruned]] = [
        Column("run", lambda one: one.run, key=True, text=True, whole=True),
        Column("freed", lambda one: "" if one.kept else units.mib(one.freed_bytes)),
        Column("stays, because", lambda one: one.kept, text=True),
    ]
    verb = "would be freed" if dry_run else "freed"
    body = {"dry_run": dry_run, "freed_bytes": freed, "runs": [one._asdict() for one in found]}
    show(form, body, table("Runs", columns, found, [f"{units.mib(freed)} {verb} in {runs}."]))


def _chosen(runs: Path, policy: Policy) -> list[tuple[Path, str]]:
    """Every directory of a run, or of what is left of one, newest first, and why it stays."""
    from coordinator.runtime.queue_file import read

    queued = {entry.run for entry in read(runs).of("running", "waiting")}
    there = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()] if runs.is_dir() else []
    begun = {path for path in there if _begun(path)}
    chosen = [(path, "") for path in sorted(begun)]
    known = [(*_ended(path), path) for path in there if path not in begun and _is_ours(path)]
    place = 0
    for at, why, path in sorted(known, key=lambda one: (-one[0], one[2].name)):
        if at:
            why = _kept(place, at, why, policy)
            place += 1
        chosen.append((path, "it is running" if is_held(path) else "the queue has it" if path.name in queued else why))
    return chosen


def _kept(place: int, at: float, why: str, policy: Policy) -> str:
    """Why a run stays that ended ``at``, with ``place`` newer ones; "": it goes."""
    if policy.keep is not None and place < policy.keep:
        return f"among the newest {policy.keep}"
    if policy.older_s is not None and time.time() - at < policy.older_s:
        return "not old enough"
    return "" if why in ("interrupted", "stopped", "running") and policy.unfinished else why


def _begun(directory: Path) -> set[str]:
    """Paths named by the mark of an unfinished deletion; none for an empty or foreign mark."""
    if not (directory / MARK).is_file():
        return set()
    try:
        named = msgspec.json.decode(read_at_most(directory / MARK, _MARK_BYTES), type=set[str])
    except (OSError, ValueError):
        return set()
    return named & {path.name for path in directory.iterdir()}


def _is_ours(directory: Path) -> bool:
    """Whether it is a run's, or what a start that failed has left."""
    names = {path.name for path in directory.iterdir()}
    return ledger_file(directory) is not None or (bool(names & {"run.yaml", "shares"}) and names <= _OF_A_START)


def _ended(directory: Path) -> tuple[float, str]:
    """When a run ended, or began, 0 where there is none; and "", or why it cannot be said to be over."""
    from coordinator.ledger.database import NoLedgerError
    from coordinator.ledger.ledger import Ledger

    if ledger_file(directory) is None:
        return 0.0, _begins(directory)
    try:
        place = ledger_of(directory)
        with Ledger(place, create=False) as ledger:
            found = [one for one in ledger.runs() if isinstance(place, Path) or one.run == directory.name]
    except NoLedgerError:
        return 0.0, _begins(directory)
    except EdgeFLError as error:
        return 0.0, f"its ledger cannot be read: {error.message}"
    if not found:
        return 0.0, _begins(directory)
    status = "interrupted" if found[0].status == "running" else found[0].status
    return found[0].finished_at or found[0].started_at, "" if status in _ENDED else status


def _begins(directory: Path) -> str:
    """Why the directory of a run that no ledger has stays; "": a start that failed has left it."""
    log, inside = directory / EVENTS, list(directory.iterdir())
    if log.is_file():
        with log.open("rb") as file:
            if b'"kind":"run_started"' in file.read(_FIRST_BYTES):
                return "its events are of a run that its ledger does not have"
    changed = [path.lstat().st_mtime for path in inside if not path.name.startswith(LEDGER)]  # reading changes it
    if time.time() - max(changed, default=0.0) < _STARTING_S:
        return "it may be starting"
    return "" if {path.name for path in inside} <= _OF_A_START else "its ledger holds no run, and there are other files"


def _pruned(directory: Path, why: str, policy: Policy, *, dry_run: bool) -> Pruned:
    if why:
        return Pruned(directory.name, why)
    mark = directory / MARK
    named = _begun(directory)
    there = [path for path in directory.iterdir() if path != mark]
    going = [path for path in there if path.name in named or not (named or _stays(path, policy))]
    freed = sum(_size(path) for path in going)
    if dry_run:
        return Pruned(directory.name, "", freed)
    try:
        with hold_directory(directory), store_errors("delete", directory):
            mark.write_bytes(msgspec.json.encode(sorted({path.name for path in going} | {MARK})))
            _forget(directory)
            for path in going:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink(missing_ok=True)
            (directory / "lock").unlink(missing_ok=True)
            mark.unlink()
            if not any(directory.iterdir()):
                directory.rmdir()
    except StoreError as error:
        return Pruned(directory.name, error.message)
    return Pruned(directory.name, "", freed)


def _stays(path: Path, policy: Policy) -> bool:
    return policy.bundles and path.name.startswith(BUNDLES)


def _forget(directory: Path) -> None:
    """The run's rows first: what is not in a ledger is no run, whatever else is still there of it."""
    if (directory / LEDGER_URL).is_file():
        from coordinator.ledger.ledger import Ledger

        with Ledger(ledger_of(directory), create=False) as ledger:
            ledger.forget(directory.name)
    while (file := ledger_file(directory)) is not None:
        file.unlink()


def _size(path: Path) -> int:
    """Bytes on the disk that deleting it gives back."""
    every = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    status = [one.lstat() for one in every]
    return sum(512 * one.st_blocks for one in status if one.st_nlink == 1)

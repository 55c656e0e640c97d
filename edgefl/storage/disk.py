"""Writing to disk so that a crash loses nothing half, and the directory of a run, held by one coordinator at a time.

A disk that refuses is a StoreError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import pwd
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from edgefl.errors import StoreError

_LOG = logging.getLogger(__name__)
_TEMPORARY = ".new-"
#: SYNC_FILE_RANGE_WRITE of Linux' sync_file_range: start writing and do not wait.
_WRITE = 2
#: Files that are synced together: as many are open at a time.
_OPEN = 64
#: The ledger's name in a run's directory.
LEDGER = "ledger.sqlite"
#: There in its place when the ledger is a database elsewhere: its URL, which may hold a password.
LEDGER_URL = "ledger.url"
#: Environment variable with the URL of a ledger that may be read though another machine noted it.
LEDGER_TRUSTED = "EDGEFL_LEDGER_URL"
#: Tries to take a run's lock, and the pause between: a reader that asks whether it is held needs microseconds.
LOCK_TRIES = 5
LOCK_PAUSE_S = 0.02
#: The run's events, as JSON lines.
EVENTS = "events.jsonl"
#: Folder of the shares of a run's data, in its directory, and the name of its test set among them.
SHARES, TEST = "shares", "test"
#: Answers of trials of joint steps, in the directory of a run that has them.
JOINT_STEPS = "joint-steps.json"
#: Scores of simple models on a run's samples, made once, in its directory.
REFERENCE = "reference.json"
_GO_ON = ", then start again: what was finished is kept."
#: What the system refuses for -> the way out. A permission is another's to give: ``_of_permission``.
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), f"Free space, or choose another directory{_GO_ON}"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), f"Raise the limit of open files (ulimit -n){_GO_ON}"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        "A file is where a directory has to be, or the other way round: choose another path.",
    ),
    errno.ENOENT: "Check the path: nothing is there.",
    errno.EROFS: "Mount its file system for writing, or choose another directory.",
}


class store_errors:  # noqa: N801 - used like a function; a class costs a third of a generator, on every small object
    """Turn whatever the disk refuses into a StoreError that names the file, the bytes and the reason."""

    __slots__ = ("_path", "_size", "_verb")

    def __init__(self, verb: str, path: str | Path, size: int | None = None) -> None:
        self._verb, self._path, self._size = verb, path, size

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            amount = "" if self._size is None else f" ({self._size} bytes)"
            text = f"cannot {self._verb} {self._path}{amount}: {error.strerror or error}"
            raise StoreError(text, remedy=way_out(self._path, error)) from error


def way_out(path: str | Path, error: OSError) -> str:
    """Remedy for what the system refused to do with ``path``, by its reason."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        return _of_permission(Path(path).absolute())
    return _WAYS_OUT.get(error.errno or 0, f"Check the disk (dmesg, fsck), or choose another directory{_GO_ON}")


def _of_permission(path: Path) -> str:
    """Remedy for a refused permission: the account that may, and how to become it."""
    if os.geteuid() == 0:
        return "Root is refused, so a sandbox or the file system refuses it: choose another directory."
    seen, owner = path, os.geteuid()
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):  # another account's directory hides what is in it
            seen, owner = place, place.stat().st_uid
            if owner != os.geteuid() or not os.access(place, os.R_OK | os.W_OK, effective_ids=True):
                break
    if owner == os.geteuid():
        return f"Give yourself the permission (chmod -R u+rwX {seen}), or choose another directory."
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    whose = "as root (sudo …)" if owner == 0 else f"as {name} (sudo -u {name} …) or as root (sudo …)"
    return f"{seen} belongs to {name}: run the same command {whose}, or choose a directory of your own."


def make_private(directory: Path) -> None:
    """Make a directory whose files are its owner's alone, whatever the umask; one of ours that is open is closed.

    Its parents are made as the umask says. Where the file system has no permissions (FAT, exFAT), it warns and goes on.
    Raises StoreError.
    """
    with store_errors("create", directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
            try:
                directory.chmod(0o700)
            except PermissionError:  # of an owner: the file system's answer
                _LOG.warning("%s can be read by others: its file system keeps no permissions", directory)


def write_new(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a whole file: temporary name, sync, rename, so that it is there fully or not at all. Raises OSError.

    Not ``durable``: without the syncs, so that a loss of power may leave anything under its name.
    """
    new = NewFile(path.parent, data, mode)
    try:
        if durable:
            os.fsync(new.descriptor)
        new.path.rename(path)
    finally:
        new.close()
    if durable:
        sync_directory(path.parent)


class NewFile:
    """A whole file under a temporary name, which goes with the process or with ``close`` unless it was renamed.

    Its lock, gone with its process, keeps a sweep from taking it for an orphan. Raises OSError.
    """

    def __init__(self, directory: Path, data: bytes | bytearray | memoryview, mode: int = 0o644) -> None:
        while True:
            self.path = directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
            self.descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            os.close(self.descriptor)  # a sweep took it between open and flock
        try:
            write_all(self.descriptor, data, 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


@cache
def boot_id() -> str:
    """Changes when the machine is started; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def begin_sync(descriptor: int, offset: int, length: int) -> None:
    """Have the disk begin with these bytes of a file that is synced later; ``length`` 0: all from ``offset`` on.

    Does nothing where the system has no such call.
    """
    if (begin := _sync_file_range()) is not None:
        begin(descriptor, offset, length, _WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    import ctypes  # 1 MB that a device's supervisor needs not hold

    function: Callable[[int, int, int, int], int] | None = None
    with contextlib.suppress(AttributeError):
        function = ctypes.CDLL(None).sync_file_range
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def read_at_most(path: Path, limit: int) -> bytes:
    """All bytes of a file (or pipe) that has at most ``limit``. Raises OSError, ValueError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # Reading takes memory for as much as it is asked for.
        data = file.read(min(limit, status.st_size) + 1 if stat.S_ISREG(status.st_mode) else limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data


def sweep_temporaries(directory: Path) -> None:
    """Delete what crashed writers left in ``directory``; what a living process is writing stays. Raises OSError."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; raises OSError."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def nameless_file(folder: Path, size: int) -> int:
    """Descriptor of a file of zeros in ``folder``, which goes with the process. Raises StoreError.

    Its room is taken at once: a full disk is an error here, not a signal (SIGBUS) later.
    """
    with store_errors("make a file in", folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _nameless(folder)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _nameless(folder: Path) -> int:
    with contextlib.suppress(AttributeError, OSError):  # not every file system can
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def sync_files(paths: Sequence[str | Path]) -> None:
    """Make what files hold last through a power cut, together: the disk begins with all of them. Raises StoreError."""
    for first in range(0, len(paths), _OPEN):
        with contextlib.ExitStack() as stack:
            opened: list[tuple[str | Path, int]] = []
            for path in paths[first : first + _OPEN]:
                with store_errors("sync", path):
                    opened.append((path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
                stack.callback(os.close, opened[-1][1])
            for _, descriptor in opened if len(opened) > 1 else ():
                begin_sync(descriptor, 0, 0)
            for path, descriptor in opened:
                with store_errors("sync", path):
                    os.fsync(descriptor)


def sync_directory(path: str | Path) -> None:
    """Make renames and removals inside a directory last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ledger_file(directory: Path) -> Path | None:
    """The file that is a run's ledger, or says where it is; None: the directory is no run's."""
    return next((path for name in (LEDGER_URL, LEDGER) if (path := directory / name).is_file()), None)


def ledger_of(directory: Path) -> str | Path:
    """Where the ledger of the run in ``directory`` is, or would be: a URL or a path.

    Raises StoreError, also for a URL that was noted on another machine: whoever made the directory chose it, and to
    read from it is to connect there. LEDGER_TRUSTED names it then.
    """
    file = directory / LEDGER_URL
    if not file.is_file():
        return directory / LEDGER
    with store_errors("read", file):
        url, _, made_here = file.read_text(encoding="utf-8").strip().partition("\n")
    if made_here != _this_machine() and os.environ.get(LEDGER_TRUSTED) != url:
        shown = re.sub(r"//.*@", "//…@", url)
        raise StoreError(
            f"{file} was not written on this machine, and reading the run would connect to {shown!r:.200}",
            remedy=f"If that is your database, set {LEDGER_TRUSTED} to the URL in that file.",
        )
    return url


def _this_machine() -> str:
    """A sign of this machine and account, which a directory from elsewhere cannot carry."""
    here = [socket.gethostname(), str(os.geteuid())]
    with contextlib.suppress(OSError):
        here.append(Path("/etc/machine-id").read_text(encoding="utf-8", errors="replace"))
    return hashlib.sha256("\n".join(here).encode()).hexdigest()


def note_ledger(directory: Path, url: str) -> None:
    """Keep where the ledger is, for its owner alone: reading and resuming the run need it. Raises StoreError."""
    file = directory / LEDGER_URL
    with store_errors("write", file):
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(f"{url}\n{_this_machine()}\n", encoding="utf-8")


def make_directories(directory: Path) -> list[Path]:
    """Make a directory and its parents; return those made, innermost first.

    Raises OSError.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return made


def begin_run(runs: Path, name: str) -> tuple[str, list[Path]]:
    """Make the directory of a new run.

    Its name: ``name``, the date and time; a number behind it when that is taken. It is made, not looked for: of several
    runs that begin in one second each has its own. Returns the run and the directories made for it, innermost first.
    Raises StoreError.
    """
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"[-64:].lstrip("-._")
    with store_errors("create", runs / stamp):
        made = make_directories(runs)
        for run in (stamp, *(f"{stamp[:60]}-{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                (runs / run).mkdir()
                return run, [runs / run, *made]
    raise StoreError(f"{runs / stamp} is taken, and so is every name up to {run}", remedy="Try again in a second.")


@contextlib.contextmanager
def gone_if_empty(made: Iterable[Path]) -> Iterator[None]:
    """Remove directories just made, as far as empty, when the block fails.

    ``made``: innermost first.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in made:
                directory.rmdir()
        raise


def is_held(directory: Path) -> bool:
    """Whether a process holds the directory: True also where that is unknown, such as another user's."""
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def hold_directory(
    directory: Path,
    *,
    by: str = "",
    what: str = "another coordinator runs",
    remedy: str = "End it first, or choose another directory or run name.",
) -> Iterator[None]:
    """Create a directory private to its owner, and lock it.

    Raises StoreError when that fails or another process has the lock. The error's text: ``what`` the holder does, and
    ``by``, the name it gave when it took the lock; ``remedy``: its advice. The lock ends with the block or the process,
    so ``kill -9`` leaves none behind.
    """
    make_private(directory)
    with store_errors("lock", directory / "lock"):
        lock = (directory / "lock").open("ab")
    with lock:
        for attempt in range(LOCK_TRIES):  # ``is_held`` of a report that is being made holds it for an instant
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 == LOCK_TRIES:
                    holder = (directory / "lock").read_text(encoding="utf-8", errors="replace")
                    text = f"{what} in {directory}" + (f": {holder}" if holder else "")
                    raise StoreError(text, remedy=remedy) from None
                time.sleep(LOCK_PAUSE_S)
        with store_errors("write", directory / "lock"):
            lock.truncate(0)
            lock.write(by.encode())
            lock.flush()
        yield

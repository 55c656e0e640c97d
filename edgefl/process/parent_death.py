"""Start a program that must not outlive its parent: ``python -I -S parent_death.py PARENT_PID PROGRAM ARGUMENT…``.

After ``--descriptors`` it may open as many files and sockets as the system allows (the hard limit), not only as many
as a shell's programs by default.

Sets the Linux parent-death signal, which the exec keeps, and becomes the program: its process id is the program's own
and nothing stays in between. ``preexec_fn`` would do the same inside the fork of a threaded interpreter, which can
deadlock; a supervising process would cost memory and be one more thing to kill. The signal is SIGTERM, so that the
program still ends in an orderly way: a broker saves its sessions, an agent ends its trainer. It comes when the *thread*
that started the program ends: start programs from a thread that lasts. On other systems than Linux the program starts
without the leash. Standard library only, since it runs before anything is imported.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

#: prctl's number for "send me this signal when my parent ends" (linux/prctl.h).
_PR_SET_PDEATHSIG = 1
_DESCRIPTORS = "--descriptors"


def leashed(command: Sequence[str], *, descriptors: bool = False) -> list[str]:
    """``command`` as it is to be started by this process in order to end with it.

    ``descriptors``: raise its limit of open files, for a server: each connection takes one.
    """
    more = [_DESCRIPTORS] if descriptors else []
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *more, str(os.getpid()), *command]  # noqa: PTH100 - pathlib alone would double what this start-up imports


def die_with_parent(parent: int, number: signal.Signals, name: str) -> None:
    """Let the kernel send this process signal ``number`` when its parent ends; exit if it has ended. Linux only.

    ``parent``: its process id, 0 where the caller does not know it; ``name``: of this program, for the message.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:  # it ended before the signal was set
            sys.exit(f"the parent process ended before {name} started")


def main() -> None:
    """Leash this process to its parent, then become the program."""
    arguments = sys.argv[1:]
    if arguments[0] == _DESCRIPTORS:
        arguments = arguments[1:]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parent, program = int(arguments[0]), arguments[1:]
    die_with_parent(parent, signal.SIGTERM, program[0])
    try:
        os.execvp(program[0], program)  # noqa: S606 - becoming the program is the whole purpose; there is no shell
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()

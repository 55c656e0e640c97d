"""Notes which files of a tree have a function that runs in this process, and in the processes it starts.

Python imports this module at its start, where it is on the path. ``EDGEFL_WALK_TREE``: the tree; ``EDGEFL_WALK_NOTES``:
the folder for the notes, a file a process with a line a source file. What runs only while a module is imported does not
count: importing a module is no visit.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

TREE = os.environ["EDGEFL_WALK_TREE"] + os.sep
NOTES = Path(os.environ["EDGEFL_WALK_NOTES"])
_IMPORTING = importlib._bootstrap.__name__  # noqa: SLF001 - the frames of every import
_done: set[CodeType] = set()
_files: set[str] = set()


def _note(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if code in _done:
        return
    file = code.co_filename
    if not file.startswith(TREE) or not code.co_flags & inspect.CO_OPTIMIZED or file in _files:
        _done.add(code)  # of elsewhere, the body of a module or class, or of a file that is noted
    elif not _imports(frame):
        _done.add(code)
        _files.add(file)
        with (NOTES / str(os.getpid())).open("a", encoding="utf-8") as notes:
            notes.write(file[len(TREE) :] + "\n")


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == _IMPORTING:
            return True
        frame = frame.f_back
    return False


threading.settrace(_note)
sys.settrace(_note)

"""Work trees of other commits, to measure them beside this one."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """A work tree of its own for a commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], cwd=ROOT, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)

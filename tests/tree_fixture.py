"""Small trees of files in place of /sys, /proc and /etc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def tree(root: Path, files: Mapping[str, object]) -> Path:
    """``root`` with these files in it: path -> text, whose line end is added; bytes stay as they are."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return root

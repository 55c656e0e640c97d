"""Encodings of text files: UTF-8, UTF-16, else Windows-1252, as Western European spreadsheets and editors write.

Bytes that stand in no text are an error: a spreadsheet's own file that is called .csv is none.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from edgefl.errors import DataError

UTF_8, WINDOWS = "utf-8-sig", "cp1252"
_BLOCK = 2**20
#: Control characters, and bytes that Windows-1252 leaves open.
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f\x81\x8d\x8f\x90\x9d]")
_FAULT, _REMEDY = "is no text in UTF-8, UTF-16 or Windows-1252", "Save it as text, of a table as CSV, in UTF-8."


def encoding_of(path: Path) -> str:
    """The encoding of a text file, by all of its bytes. Raises DataError, also where it cannot be opened."""
    try:
        return _encoding_of(path)
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror}", remedy="Check its permissions.") from None


def _encoding_of(path: Path) -> str:
    with path.open("rb") as file:
        blocks = partial(iter, partial(file.read, _BLOCK), b"")
        if wide := _wide(file.read(1024)):
            return wide
        file.seek(0)
        if _is_utf_8(blocks()):
            return UTF_8
        file.seek(0)
        if any(map(_NO_TEXT.search, blocks())):
            raise DataError(_FAULT, remedy=_REMEDY)
    return WINDOWS


def is_windows(path: Path) -> bool:
    """True for a text file in Windows-1252."""
    try:
        return encoding_of(path) == WINDOWS
    except DataError:  # no text: its reader says so
        return False


def decoded(data: bytes) -> str:
    """A text without its byte order mark. Raises DataError."""
    encoding = _wide(data[:1024]) or (UTF_8 if _is_utf_8([data]) else WINDOWS)
    if encoding == WINDOWS and _NO_TEXT.search(data):
        raise DataError(_FAULT, remedy=_REMEDY)
    return data.decode(encoding, "replace").removeprefix("\ufeff")


def _is_utf_8(blocks: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in blocks:
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _wide(start: bytes) -> str:
    """UTF-16 by its mark, or by the zeros beside plain letters; "": another encoding."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    pairs, even, odd = len(start) // 2, start[::2].count(0), start[1::2].count(0)
    if 2 * odd > pairs and not even:
        return "utf-16-le"
    return "utf-16-be" if 2 * even > pairs and not odd else ""

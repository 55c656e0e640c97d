"""Members of a zip archive, read one at a time and never unpacked to a path that the archive names."""

from __future__ import annotations

import io
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from edgefl.console import safe_text
from edgefl.errors import DataError

#: The directory of an archive: HAPT's has some hundred entries of 100 bytes. An entry has 46 bytes at least, and takes
#: ten times that in memory before the first can be looked at.
MAX_DIRECTORY_BYTES = 2 * 2**20
#: One member in memory: HAPT's largest raw file has 2 MB.
MAX_MEMBER_BYTES = 32 * 2**20
#: All members that are read: HAPT's raw files have 133 MB.
MAX_TOTAL_BYTES = 2**30
_REMEDY = "Fetch it again, or give another copy by --from FILE."


class _Bounded(io.FileIO):
    """A file of which little is read at a time: zipfile reads a directory at once, as large as the archive says."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes; -1, the rest, is asked for the last 64 KiB alone. Raises BadZipFile."""
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, more than the limit of {MAX_DIRECTORY_BYTES}")
        return super().read(size) or b""


class Archive:
    """A zip file's members by their last name, of those whose last name fits ``pattern``. Raises DataError.

    A name that would leave its folder, an encrypted member, a link, or a size beyond the limits refuse the archive.
    """

    def __init__(self, path: Path, pattern: str) -> None:
        self.path = path
        try:
            with _Bounded(path) as file, zipfile.ZipFile(file):
                self._zip = zipfile.ZipFile(path)
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: is no readable zip archive: {error}", remedy=_REMEDY) from None
        self._members: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            self._check(info)
            name = PurePosixPath(info.filename).name
            if not info.is_dir() and re.fullmatch(pattern, name):
                if name in self._members:
                    raise self._bad(f"{name} is in it twice")
                if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                    raise self._bad(f"{name} is packed in another way than deflate")
                if info.file_size > MAX_MEMBER_BYTES:
                    raise self._bad(f"{name} has {info.file_size} bytes, more than the limit of {MAX_MEMBER_BYTES}")
                self._members[name] = info
        if (total := sum(info.file_size for info in self._members.values())) > MAX_TOTAL_BYTES:
            raise self._bad(f"{total} bytes unpacked, more than the limit of {MAX_TOTAL_BYTES}")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> bytes:
        """A member's bytes, exactly as many as the archive's directory says. Raises DataError."""
        if name not in self._members:
            raise self._bad(f"it has no {name}")
        info = self._members[name]
        try:
            with self._zip.open(info) as file:
                data = file.read(info.file_size + 1)
        except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise self._bad(f"{name} cannot be read: {error}") from None
        if len(data) != info.file_size:
            raise self._bad(f"{name} has another size than its directory says")
        return data

    def _check(self, info: zipfile.ZipInfo) -> None:
        path = PurePosixPath(info.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in info.filename:
            raise self._bad(f"the name {info.filename!r} leaves its folder")
        if info.flag_bits & 1:
            raise self._bad(f"{info.filename!r} is encrypted")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise self._bad(f"{info.filename!r} is a link")

    def _bad(self, text: str) -> DataError:
        return DataError(f"{self.path}: {safe_text(text)}", remedy=_REMEDY)

"""The named data sets that are no part of the repository: their folders, or a test that is skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgefl.data.named import data_folder
from edgefl.errors import DataError


def needed(name: str) -> Path:
    """The data set's folder. Where it is not here the test is skipped, or fails if EDGEFL_REQUIRE_DATA is 1."""
    try:
        return data_folder(name)
    except DataError as error:
        if os.environ.get("EDGEFL_REQUIRE_DATA") == "1":
            raise
        pytest.skip(f"{error.message}. {error.remedy}")

"""The example package's methods as modules, for tests of their functions alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from edgefl import registry

FOLDER = Path(__file__).parents[1] / "examples" / "edgefl_extra"


def extra(name: str) -> ModuleType:
    """A module of the package, not registered: other tests go through the methods that EdgeFL itself has."""
    with patch.object(registry, "register"), patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return importlib.import_module(f"edgefl_extra.{name}")

"""The public names with their types, for type checkers: ``__init__.py`` imports each when it is first used."""

from edgefl.api.planning import plan_run
from edgefl.api.results import Plan, Report, Run, load_report
from edgefl.api.running import run
from edgefl.api.study import Cell, Study, study
from edgefl.errors import EdgeFLError
from edgefl.export.runtime import Bundle, Prediction, load_bundle
from edgefl.models.own_module import encoder
from edgefl.run_records import EventRow

__version__: str
PROTOCOL_VERSION: int

__all__ = [
    "PROTOCOL_VERSION",
    "Bundle",
    "Cell",
    "EdgeFLError",
    "EventRow",
    "Plan",
    "Prediction",
    "Report",
    "Run",
    "Study",
    "__version__",
    "encoder",
    "load_bundle",
    "load_report",
    "plan_run",
    "run",
    "study",
]

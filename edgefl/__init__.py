"""EdgeFL: train multimodal models across small devices inside each device's real budget, and see what it cost.

The names below are the Python interface (docs/python.md). Each is imported when it is first used, so that an agent's
supervisor, which imports this package too, loads none of them. Type checkers read ``__init__.pyi``.
"""

from importlib import import_module

__version__ = "0.1.0"
#: Version of the messages between agents and coordinator. Goes up by one with every minor release, whether or not a
#: message changed, so that it counts them over a major release too (docs/protocol.md).
PROTOCOL_VERSION = 1

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
#: Name -> the module that has it.
_PLACES = {
    "plan_run": "edgefl.api.planning",
    **dict.fromkeys(("Plan", "Report", "Run", "load_report"), "edgefl.api.results"),
    "run": "edgefl.api.running",
    **dict.fromkeys(("Cell", "Study", "study"), "edgefl.api.study"),
    "EdgeFLError": "edgefl.errors",
    **dict.fromkeys(("Bundle", "Prediction", "load_bundle"), "edgefl.export.runtime"),
    "encoder": "edgefl.models.own_module",
    "EventRow": "edgefl.run_records",
}


def __getattr__(name: str) -> object:
    """A public name, imported now."""
    if name not in _PLACES:
        raise AttributeError(f"module 'edgefl' has no attribute {name!r}")
    value: object = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

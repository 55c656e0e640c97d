"""Optional packages: which commands and calls need them, and an error that names the extra when one is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from edgefl.errors import missing_dependency

P = ParamSpec("P")
T = TypeVar("T")
_LEDGER = ("sqlalchemy",)
_BUNDLES = ("onnx", "onnxscript", "onnxruntime")
#: Verb of the command line, or method of a result -> packages of extras that it needs, as imported.
NEEDS: dict[str, tuple[str, ...]] = {
    "init": ("torch", "PIL"),
    "run": ("torch", *_LEDGER, "jinja2", "vl_convert", *_BUNDLES),
    "study": ("torch", *_LEDGER),
    "plan": ("torch",),
    "runs": _LEDGER,
    "report": _LEDGER,
    "compare": _LEDGER,
    "devices": _LEDGER,
    "export": ("torch", *_LEDGER, *_BUNDLES),
    "predict": ("onnxruntime",),
    "benchmark": ("onnxruntime",),
    "serve": ("onnxruntime", "PIL", "python_multipart"),
    "data fetch": ("pooch", "scipy"),
    "to_pandas": ("pandas",),
    "data_page": ("jinja2", "vl_convert", "PIL"),
}


def explained(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: a missing optional package becomes MissingDependencyError, which names all that ``what`` needs."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ModuleNotFoundError as error:
                missing = missing_dependency(error)
                if missing is None:
                    raise
                raise missing.with_others(NEEDS.get(what, ())) from error

        return call

    return decorate

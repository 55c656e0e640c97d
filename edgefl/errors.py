"""Every error EdgeFL raises on purpose: what went wrong, who caused it, and the way out.

One base class; each child has an exit code that never changes, so scripts can rely on it.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Optional package (as imported) -> (name on the package index, extra that brings it).
EXTRAS: dict[str, tuple[str, str]] = {
    "torch": ("torch", "train"),
    "transformers": ("transformers", "train"),
    "PIL": ("pillow", "serve"),
    "soundfile": ("soundfile", "sound"),
    "diffusers": ("diffusers", "completion"),
    "sqlalchemy": ("SQLAlchemy", "coordinator"),
    "psycopg": ("psycopg", "postgresql"),
    "amqtt": ("amqtt", "coordinator"),
    "vl_convert": ("vl-convert-python", "coordinator"),
    "jinja2": ("jinja2", "coordinator"),
    "markupsafe": ("jinja2", "coordinator"),
    "starlette": ("starlette", "web"),
    "uvicorn": ("uvicorn", "web"),
    "sse_starlette": ("sse-starlette", "web"),
    "prometheus_client": ("prometheus-client", "web"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
    "onnxruntime": ("onnxruntime", "serve"),
    "python_multipart": ("python-multipart", "serve"),
    "fvcore": ("fvcore", "profile"),
    "sktime": ("sktime", "demo"),
    "pyarrow": ("pyarrow", "parquet"),
    "pandas": ("pandas", "pandas"),
    "pooch": ("pooch", "fetch"),
    "scipy": ("scipy", "fetch"),
    "ray": ("ray", "ray"),
}


#: Name of this project's distribution for pip. On the package index "edgefl" is another project's.
DISTRIBUTION = "edgefl-toolkit"


def install_command(extra: str) -> str:
    """The command that adds an extra to the environment this runs in.

    The distribution itself is installed there already, from a wheel or a checkout, so that pip fetches only what the
    extra adds.
    """
    return shlex.join([sys.executable or "python", "-m", "pip", "install", f"{DISTRIBUTION}[{extra}]"])


#: Before pip brings torch, where its default build is not the right one.
TORCH_FIRST = (
    "without an NVIDIA card set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before, or gigabytes of CUDA "
    "packages come along; on a Jetson install NVIDIA's own wheel of torch first"
)


def some_of(names: Sequence[str], most: int = 20) -> str:
    """ "a, b and 30 more": the first ``most`` of the names; "none" without any."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}" or "none"


class EdgeFLError(Exception):
    """Base class. ``remedy`` is one sentence that tells the user what to do.

    ``finding``: a key of ``edgefl.findings.FINDINGS`` for a fault of a device's set-up, else "".
    """

    exit_code = 1
    remedy = "Run the command again with --debug to see where it happened."

    def __init__(self, message: str, *, remedy: str | None = None, finding: str = "") -> None:
        super().__init__(message)
        self.message, self.finding = message, finding
        if remedy is not None:
            self.remedy = remedy


@dataclass(frozen=True)
class Problem:
    """One fault in a file: where (``path`` such as ``data.partition``), on which line (0: unknown), and what."""

    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}, {self.path}" if self.line else self.path
        return f"{where}: {self.message}"


class ConfigError(EdgeFLError):
    """A YAML file or an override is wrong; carries every problem found, and shows the first ``most``."""

    exit_code = 10
    remedy = (
        "Mend the fields named above; `edgefl recipes` lists the methods, `edgefl recipes show NAME` the slots of one, "
        "`edgefl plan --sizes` the encoder sizes."
    )

    def __init__(self, file: str, problems: list[Problem], *, remedy: str | None = None, most: int = 1000) -> None:
        self.file = file
        self.problems = problems
        lines = "\n".join(f"  {problem}" for problem in problems[:most])
        lines += f"\n  and {len(problems) - most} more" * (len(problems) > most)
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{file}: {len(problems)} {noun}\n{lines}", remedy=remedy)


class DataError(EdgeFLError):
    """A data set is missing, malformed or does not fit the model."""

    exit_code = 11
    remedy = "Mend the sample named above, or set data.bad_samples: skip to leave it out and have it counted."


class ModelError(EdgeFLError):
    """A model specification or a checkpoint does not fit."""

    exit_code = 12
    remedy = "Check the model section of the run file against the checkpoint's own configuration."


class PrecisionError(ModelError):
    """Values that a narrower type cannot hold."""


class BudgetError(EdgeFLError):
    """No device, or not enough devices, can train inside their budget."""

    exit_code = 13
    remedy = "`edgefl plan RUN.yaml` shows each device's need beside its budget; lower the batch size or the model."


class BrokerError(EdgeFLError):
    """The MQTT broker cannot be started or reached, or refuses the connection."""

    exit_code = 14
    remedy = (
        "Check the broker's address, its log and the credentials; `edgefl doctor --broker URL` tests the connection."
    )


class BrokerUnreachableError(BrokerError):
    """No answer from the broker's address: waiting may help, unlike with a broker that answers and refuses."""


class MessageSizeError(BrokerError):
    """The broker does not take a message of this size. ``reason``: what it did."""

    size = 0
    reason = ""


class StoreError(EdgeFLError):
    """The object store or the ledger cannot be read or written (disk full, read-only, damaged)."""

    exit_code = 15
    remedy = "Mend what is named above, or choose another directory, then start again: what was finished is kept."


class DamagedObjectError(StoreError):
    """A stored object is not what its name says: its file has changed."""


class ProtocolError(EdgeFLError):
    """A peer sent something malformed, oversized or of an unknown version."""

    exit_code = 16
    remedy = "Bring agent and coordinator to versions at most one minor release apart."


class RunError(EdgeFLError):
    """A run cannot go on (quorum never reached, every attempt failed)."""

    exit_code = 17
    remedy = "`edgefl report RUN` shows the rounds so far and each device's reason; start it again with --resume RUN."


class DivergedError(RunError):
    """A device's training has diverged: loss or weights are not finite."""


class TrainingCodeError(EdgeFLError):
    """A device owner's own training code raised, or cannot be imported; names its file and line."""

    exit_code = 24
    remedy = "Mend it on the device: trainer.log in its state directory has the whole traceback."


class ExportError(EdgeFLError):
    """An ONNX bundle cannot be written, or differs from the model it came from."""

    exit_code = 18
    remedy = "The bundle was not published; the differences above name the output that is off."


class MissingDependencyError(EdgeFLError):
    """An optional package is needed for this command.

    ``others``: further ones that it needs and that are not installed, as (package, extra).
    """

    exit_code = 19

    def __init__(self, package: str, extra: str, others: Sequence[tuple[str, str]] = ()) -> None:
        every = dict([(package, extra), *others])
        *most, last = (f"'{name}'" for name in every)
        needs = f"the packages {', '.join(most)} and {last}, which are" if most else f"the package {last}, which is"
        torch = f" ({TORCH_FIRST})" if "torch" in every else ""
        super().__init__(
            f"this command needs {needs} not installed",
            remedy=f"Install {'them' if most else 'it'} with: "
            f"{install_command(','.join(dict.fromkeys(every.values())))}{torch}",
        )
        self.package, self.extra = package, extra
        self.finding = "torch-missing" if package == "torch" else ""

    def with_others(self, imports: Iterable[str]) -> MissingDependencyError:
        """The same naming all of these packages (as imported) that are missing, so that one install is enough."""
        absent = [EXTRAS[name] for name in imports if importlib.util.find_spec(name) is None]
        return MissingDependencyError(self.package, self.extra, absent)


def missing_dependency(error: BaseException) -> MissingDependencyError | None:
    """The import error of an optional package as an error that names the extra; None for anything else."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    known = EXTRAS.get(error.name.partition(".")[0])
    return MissingDependencyError(*known) if known else None


class WorkerError(EdgeFLError):
    """A worker process failed, or ended while it was working; carries how it ended."""

    exit_code = 20
    remedy = "The worker's own log, named above, tells more."


class IdentityError(EdgeFLError):
    """A certificate, key or enrolment token is missing, unsafe or refused."""

    exit_code = 21
    remedy = (
        "`edgefl-coordinator init` makes a fleet's identity, `edgefl-coordinator enroll` a token, `edgefl-agent enroll "
        "TOKEN` a device's identity."
    )


class ControlError(EdgeFLError):
    """A run does not do what its operator asks: it is not running, is so already, or knows no such device."""

    exit_code = 22
    remedy = "`edgefl runs` shows which runs are running; install the same release for both."


class ServiceError(EdgeFLError):
    """The service manager, or another tool of the system, refuses."""

    exit_code = 23
    remedy = "`journalctl -u edgefl-agent` has the service's own log, `edgefl-agent status` how it stands."

"""The device owner's own training code: imported by name, called once a round, its faults as text for people.

The name is the device's configuration; nothing of it comes from a coordinator.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import traceback
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from edgefl.client.round import Round, TrainedParts, numbers, sendable
from edgefl.errors import ConfigError, EdgeFLError, ModelError, Problem, TrainingCodeError
from edgefl.plan.job import Job
from edgefl.records import Attempt
from edgefl.resources.gpu_memory import out_of_memory
from edgefl.training.local_round import AbandonedError, RoundResult, Tensors
from edgefl.training.sending import Seen, uploaded

T = TypeVar("T")
#: Characters of an exception's text in a refusal: its first lines say what is wrong, and a message holds 500.
MOST_TEXT = 300
#: Not plain "evaluate", which many scripts have with other arguments.
EVALUATE = "evaluate_round"
_SHAPE = "Name it as FILE.py:FUNCTION or MODULE:FUNCTION, such as my_training.py:train."


class OwnCode(NamedTuple):
    """A training function, the file it is in, and ``evaluate_round`` where that has one."""

    name: str
    file: str
    train: Callable[[Round], object]
    evaluate: Callable[[Round], object] | None

    def round(self, job: Job, this: Round, kept: Mapping[str, Tensors]) -> RoundResult:
        """One round by the owner's function. Raises TrainingCodeError, and what ends EdgeFL's own rounds."""
        rng = np.random.default_rng(this.seed)
        torch.manual_seed(this.seed)
        received = self._judged(this, "received")
        started = time.perf_counter()
        try:
            result = self._called(self.train, this)
        except AbandonedError as error:
            error.steps, error.compute_s = len(this.losses), time.perf_counter() - started
            raise
        spent_s = time.perf_counter() - started
        trained, made = self._called(lambda this: sendable(this, result), this)
        both = ChainMap(made, this.parts)  # type: ignore[arg-type]  # read only, one part at a time
        after = self._judged(replace(this, parts=both), "trained")
        sending, noted = uploaded(job, made, Seen(this.parts, kept), rng)
        return RoundResult(
            parts=sending,
            kept=noted,
            samples=dict.fromkeys(sending, trained.samples),
            metrics=_own_metrics(this, trained) | received | after,
            compute_s=spent_s,
        )

    def _judged(self, this: Round, prefix: str) -> dict[str, float]:
        """Metrics "<prefix>_<name>" of ``evaluate_round`` on the parts of ``this``; {} without one."""
        evaluate = self.evaluate
        if evaluate is None:
            return {}
        found = self._called(lambda this: numbers(evaluate(this)), this)
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def _called(self, function: Callable[[Round], T], this: Round) -> T:
        try:
            return function(this)
        except ModelError as error:
            raise TrainingCodeError(f"{self.name}: {error.message}", remedy=error.remedy) from error
        except (EdgeFLError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            if out_of_memory(error):
                raise
            traceback.print_exception(error)  # whole, into the trainer's log
            raise TrainingCodeError(_said(self.file, error)) from error


def _own_metrics(this: Round, result: TrainedParts) -> dict[str, float]:
    """The function's metrics, with mean loss and number of its reported steps where it gives none."""
    told = {"loss": float(np.mean(this.losses)), "steps": float(len(this.losses))} if this.losses else {}
    return told | dict(result.metrics)


def round_of(job: Job, attempt: Attempt, parts: Mapping[str, Tensors], salt: str) -> Round:
    """The round of an offer's attempt, on the CPU. ``salt``: of its seed."""
    return Round(
        parts=parts,
        trains=job.stage.trained,
        stage=attempt.stage,
        number=attempt.round,
        epochs=job.hyper.epochs,
        batch_size=job.hyper.batch_size,
        lr=job.hyper.lr["head"],
        seed=zlib.crc32(f"{job.hyper.seed}/{salt}".encode()),
    )


def load_code(name: str) -> OwnCode:
    """The function that ``name`` names. Raises ConfigError, TrainingCodeError for a module that raises."""
    where, _, function = name.rpartition(":")
    if not where or not function.isidentifier():
        raise _wrong(name, f"{name[:80]!r} names no function", _SHAPE)
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        traceback.print_exception(error)
        raise TrainingCodeError(_said(where, error)) from error
    train, evaluate = getattr(module, function, None), getattr(module, EVALUATE, None)
    if not callable(train):
        own = (key for key, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__)
        there = ", ".join(own)
        raise _wrong(name, f"{where} has no function {function!r}", f"It has: {there[:300] or 'none'}.")
    return OwnCode(name, module.__file__ or where, train, evaluate if callable(evaluate) else None)


def _wrong(name: str, text: str, remedy: str) -> ConfigError:
    return ConfigError("the device's configuration", [Problem("trainer", text)], remedy=remedy)


def _from_file(path: Path) -> ModuleType:
    """The module in a file, whose folder is on the path as if it were run as a script."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle finds the module by it in data-loading processes
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _said(file: str, error: BaseException) -> str:
    """ "train.py:23 in train: ValueError: text", of the innermost line in the owner's own file; escaped and bounded."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if one.filename == file), frames[-1] if frames else None)
    where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" if frame else file
    text = str(error)[:MOST_TEXT].encode("unicode_escape").decode()[:MOST_TEXT]
    return f"{where}: {type(error).__name__}: {text}"

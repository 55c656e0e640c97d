"""An onnxruntime session on a bundle's bytes: quiet, on the processor that was asked for or not at all."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from edgefl.errors import ExportError, MissingDependencyError

Device = Literal["cpu", "cuda"]
_PROVIDERS: dict[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: onnxruntime's own scale: 3 shows errors and hides warnings, such as those on machines without a GPU.
_ERRORS_ONLY = 3


class _Named(Protocol):
    name: str


class Session(Protocol):
    """The part of an onnxruntime session that is used."""

    def get_outputs(self) -> Sequence[_Named]: ...
    def get_providers(self) -> Sequence[str]: ...
    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]: ...


def open_session(data: bytes, device: Device = "cpu", threads: int = 0) -> Session:
    """A session on an ONNX file's bytes; ``threads`` 0: onnxruntime's choice. Works without torch.

    Raises ExportError when the file is no model this onnxruntime runs, or the device cannot be used;
    MissingDependencyError without onnxruntime.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingDependencyError("onnxruntime", "export") from error
    if device not in _PROVIDERS:
        raise ExportError(f"unknown device {device!r}", remedy=f"Choose {' or '.join(_PROVIDERS)}.")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = threads
    wanted = _PROVIDERS[device]
    # onnxruntime only warns about a provider that its build lacks.
    able = {*onnxruntime.get_available_providers(), _PROVIDERS["cpu"]}
    providers = [one for one in dict.fromkeys((wanted, _PROVIDERS["cpu"])) if one in able]
    try:
        session: Session = onnxruntime.InferenceSession(data, options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no public base
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} can not load the model: {str(error).splitlines()[0]}",
            remedy="Install the onnxruntime version the manifest names, or a newer one.",
        ) from error
    # Only the session knows: get_available_providers() lists CUDA on machines without a GPU as well.
    if wanted not in session.get_providers():
        raise ExportError(
            f"onnxruntime can not use {device} here: the session runs on {', '.join(session.get_providers())}",
            remedy=_remedy(device),
        )
    return session


def installed() -> dict[str, str]:
    """The installed distributions that bring the package ``onnxruntime``, with their versions; one too many is a fault.

    They overwrite each other's files: whichever was installed last is imported.
    """
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run(session: Session, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _remedy(device: str) -> str:
    there = installed()
    if len(there) > 1:
        told = " and ".join(f"{name} {version}" for name, version in there.items())
        return (
            f"{told} are both installed and overwrite each other's files: pip uninstall {' '.join(there)}, then "
            f"install onnxruntime-gpu alone for {device}; or use --device cpu."
        )
    if "onnxruntime-gpu" in there:
        return f"Use --device cpu, or install CUDA and cuDNN as onnxruntime-gpu {there['onnxruntime-gpu']} needs them."
    return "Use --device cpu, or put onnxruntime-gpu for this machine's CUDA version in onnxruntime's place."

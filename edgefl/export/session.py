"""An onnxruntime session on a bundle's bytes: quiet, on the requested processor or not at all.

Which processor that was, only the session knows (``get_providers``): messages name what it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from edgefl.errors import ExportError, MissingDependencyError, install_command
from edgefl.export.model_file import check_model
from edgefl.resources.hardware import capabilities

Device = Literal["auto", "cpu", "cuda", "tensorrt"]
#: Device -> its provider, and the library without which that only complains; the fastest first, as "auto" tries them.
_PROVIDERS: dict[str, tuple[str, str]] = {
    "tensorrt": ("TensorrtExecutionProvider", "libnvinfer.so.10"),
    "cuda": ("CUDAExecutionProvider", "libcuda.so.1"),
    "cpu": ("CPUExecutionProvider", ""),
}
#: onnxruntime's own scale: 3 shows errors, such as why a GPU is not used, and hides warnings, such as those on machines
#: without one. On a processor its errors are raised as well, and shown once.
_ERRORS_ONLY, _FATAL_ONLY = 3, 4


class _Named(Protocol):
    name: str


class Session(Protocol):
    """The part of an onnxruntime session in use here."""

    def get_outputs(self) -> Sequence[_Named]: ...
    def get_providers(self) -> Sequence[str]: ...
    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]: ...


def open_session(data: bytes, device: Device = "cpu", threads: int = 0) -> Session:
    """A session on an ONNX file's bytes; ``threads`` 0: onnxruntime's choice. Works without torch.

    Raises ExportError when the file holds what no export writes, is no model this onnxruntime runs, or the device
    cannot be used; MissingDependencyError without onnxruntime.
    """
    check_model(data)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingDependencyError("onnxruntime", "serve") from error
    wanted = _wanted(device, onnxruntime.get_available_providers())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY if wanted == [_PROVIDERS["cpu"][0]] else _ERRORS_ONLY
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.load_model_format", "ONNX")  # what was checked, not onnxruntime's own
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        _bound_memory(onnxruntime)
        if _PROVIDERS["cuda"][0] in wanted:
            _load_cuda(onnxruntime)
        session: Session = onnxruntime.InferenceSession(data, options, providers=wanted)
    except Exception as error:  # onnxruntime's exceptions share no public base
        if (asked := _memory_asked(error)) is not None:
            raise asked from error
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} cannot load the model: {str(error).splitlines()[0]}",
            remedy="Install the onnxruntime version the manifest names, or a newer one.",
        ) from error
    # Only the session knows: get_available_providers() lists CUDA on machines without a GPU as well.
    if device != "auto" and _PROVIDERS[device][0] not in session.get_providers():
        raise ExportError(
            f"onnxruntime cannot use {device} here: the session runs on {', '.join(session.get_providers())}",
            remedy=_remedy(device),
        )
    return session


def _wanted(device: str, listed: Sequence[str]) -> list[str]:
    """Execution providers for a device, among those ``listed`` by this build of onnxruntime.

    "auto" leaves out providers without their library, which would complain on every machine without a GPU.
    """
    if device != "auto" and device not in _PROVIDERS:
        raise ExportError(f"unknown device {device!r}", remedy=f"Choose auto or {' or '.join(_PROVIDERS)}.")
    names = list(_PROVIDERS)
    able = names[names.index(device) :] if device != "auto" else [name for name in names if _is_here(name)]
    return [_PROVIDERS[name][0] for name in able if _PROVIDERS[name][0] in {*listed, _PROVIDERS["cpu"][0]}]


@functools.cache
def _most_memory() -> int:
    """Memory limit in bytes of all sessions together: free memory, at least half of the total."""
    here = capabilities()
    return max(here.memory_free_bytes, here.memory_total_bytes // 2)


@functools.cache
def _bound_memory(onnxruntime: Any) -> None:
    """Give this process's sessions one bounded allocator; else a node may request any amount."""
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    place = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg({"max_mem": _most_memory()}))


def _memory_asked(error: Exception) -> ExportError | None:
    """Error for an onnxruntime message about refused memory; None for any other."""
    text = str(error)
    if "bad_alloc" not in text and "smaller than requested bytes" not in text and "llocate memory" not in text:
        return None
    return ExportError(
        f"the model asks for more memory than there is: onnxruntime may take {_most_memory() // 2**20} MiB here",
        remedy="Use it on a machine with more memory, or give fewer samples at a time.",
    )


@functools.cache
def _load_cuda(onnxruntime: Any) -> None:
    """Load CUDA and cuDNN from pip's packages, which onnxruntime does not search by itself."""
    if hasattr(onnxruntime, "preload_dlls"):  # from 1.21 on
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            onnxruntime.preload_dlls()


@functools.cache
def _is_here(device: str) -> bool:
    library = _PROVIDERS[device][1]
    try:
        return not library or bool(ctypes.CDLL(library))
    except OSError:
        return False


def runs_on(session: Session) -> str:
    """Text with a session's execution provider and onnxruntime's version."""
    there = " and ".join(f"{name} {version}" for name, version in installed().items())
    return f"{session.get_providers()[0]} of {there or 'onnxruntime'}"


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
    """Run the model: output name -> array. Raises ExportError if it fails."""
    names = [output.name for output in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no public base
        if (asked := _memory_asked(error)) is not None:
            raise asked from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExportError(
            f"onnxruntime cannot compute the model: {reason:.300}",
            remedy="Give samples that fit the model, or export it again.",
        ) from error


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
    return (
        "Use --device cpu, or put onnxruntime-gpu in onnxruntime's place: pip uninstall onnxruntime, then "
        f"{install_command('gpu')}; on a Jetson NVIDIA's own build."
    )

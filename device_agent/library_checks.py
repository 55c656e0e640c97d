"""Checks of Python, torch and onnxruntime, the last two in processes of their own: an import alone proves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import NamedTuple

import msgspec

from device_agent.board import Board, board
from edgefl.errors import MissingDependencyError
from edgefl.findings import Check, Status, found, of_error, well

#: Importing torch from a cold SD card takes most of a minute; a broken driver hangs for ever.
_TIMEOUT_S = 180.0
_OLDEST_PYTHON = (3, 10)
_FOREIGN_LIBRARY = re.compile(r"cannot open shared object|undefined symbol|version `|invalid ELF|wrong ELF")
_OTHER_GPUS = re.compile(r"no kernel image|not compatible with the current PyTorch|cudaErrorNoKernelImage")
#: Prints what this build is and whether a training step runs. Where torch crashes, this process goes with it.
_TORCH = """
import json, sys, time, warnings
wanted = sys.argv[1]
told = {"fault": ""}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    import torch
    told["version"], told["cuda"] = torch.__version__, torch.version.cuda or ""
    told["available"] = bool(torch.cuda.is_available())
    device = ("cuda" if told["available"] else "cpu") if wanted == "auto" else wanted
    try:
        started = time.perf_counter()
        w = torch.randn(256, 256, device=device, requires_grad=True)
        loss = (torch.randn(64, 256, device=device) @ w).pow(2).mean()
        loss.backward()
        if not torch.isfinite(w.grad).all().item():
            raise ArithmeticError("gradients are not finite")
        told["seconds"] = time.perf_counter() - started
        told["on"] = torch.cuda.get_device_name() if device == "cuda" else device
    except Exception as error:
        told["fault"] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
told["warnings"] = [str(one.message).splitlines()[0] for one in heard if str(one.message)]
print(json.dumps(told))
"""
#: y = x + x, as ONNX: enough for a provider to say whether it runs.
_MODEL = (
    "08071200 3a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a"
    "020801 42040a00100d"
)
_ONNX = """
import json, sys
import numpy, onnxruntime
listed, runs = onnxruntime.get_available_providers(), []
model = bytes.fromhex(sys.argv[1])
for name in listed:
    if name in ("CUDAExecutionProvider", "CPUExecutionProvider"):
        try:
            if name.startswith("CUDA") and hasattr(onnxruntime, "preload_dlls"):  # from 1.21 on: pip's CUDA
                onnxruntime.preload_dlls()
            session = onnxruntime.InferenceSession(model, providers=[name])
            if session.get_providers()[0] == name and session.run(None, {"x": numpy.ones(1, "f4")})[0][0] == 2:
                runs.append(name)
        except Exception as error:
            print(error, file=sys.stderr)
print(json.dumps({"listed": listed, "runs": runs}))
"""


class TorchFacts(msgspec.Struct, frozen=True):
    """Facts on torch from a child process. ``cuda``: version of the build, "" for a CPU build."""

    version: str = ""
    cuda: str = ""
    available: bool = False
    fault: str = ""
    seconds: float = 0.0
    on: str = ""
    warnings: list[str] = []


class _Providers(msgspec.Struct, frozen=True):
    listed: list[str] = []
    runs: list[str] = []


class _Said(NamedTuple):
    """Output of a child process. ``status``: exit code, below 0: signal, None: timed out."""

    out: str
    errors: str
    status: int | None

    @property
    def last(self) -> str:
        """Last error line of a failed child."""
        return (self.errors.strip().splitlines() or [f"ended with status {self.status}"])[-1][:300]


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check of the Python version."""
    text = ".".join(str(number) for number in version)
    return found("python-old", text) if version < _OLDEST_PYTHON else well("python", text)


def torch(wanted: str = "auto", machine: Board | None = None, *, unified: bool = False) -> Check:
    """Check of a training step with torch, on the profile's device.

    ``unified``: the profile is of a Jetson, whose GPU has to train whatever this machine looks like.
    """
    machine, said = machine or board(), _run(_TORCH, wanted)
    if unified and not machine.cards and not machine.is_jetson:
        machine = machine._replace(jetson=True)
    if said.status == 0:
        return judge_torch(msgspec.json.decode(said.out, type=TorchFacts), wanted, machine)
    if said.status is None:
        return found("torch-hangs", f"no answer within {_TIMEOUT_S:.0f} s")
    source = machine.source("torch")
    if "No module named 'torch'" in said.last:
        missing = of_error(MissingDependencyError("torch", "train"), "torch-missing")
        return (
            msgspec.structs.replace(missing, remedy=f"{missing.remedy[:-1]}; here: {source})")
            if machine.is_jetson
            else missing
        )
    if said.status == -signal.SIGKILL:
        return found("torch-killed", "the process that imported torch was killed: the memory ran out, as it seems")
    if said.status < 0:
        name = signal.Signals(-said.status).name
        return found("torch-processor", f"importing torch ends the process by {name}", source=source)
    finding = "torch-library" if _FOREIGN_LIBRARY.search(said.last) else "torch-broken"
    return found(finding, said.last, source=source)


def judge_torch(facts: TorchFacts, wanted: str, machine: Board) -> Check:
    """Check result for an importable torch build on this machine.

    With ``wanted`` cuda a build without the GPU fails, as does a CPU build on a Jetson.
    """
    told = f"torch {facts.version}"
    source = machine.source("torch")
    status: Status | None = "fail" if wanted == "cuda" else None
    gpu = machine.gpu or ("a Jetson's GPU, by its profile or its kernel" if machine.is_jetson else "an NVIDIA card")
    if _OTHER_GPUS.search(" ".join([facts.fault, *facts.warnings])):
        return found("torch-architecture", f"{told} is built for other GPUs than {facts.on or gpu}", source=source)
    if not facts.available and wanted != "cpu":
        if machine.any_gpu and not facts.cuda:
            status = "fail" if machine.is_jetson else status
            return found("torch-cpu-build", f"{told} is a CPU build, and there is {gpu}", status, source=source)
        if machine.any_gpu:
            why = f": {facts.warnings[0]}" if facts.warnings else ""
            return found(
                "torch-no-driver", f"{told} for CUDA {facts.cuda} does not reach {gpu}{why}", status, source=source
            )
        if wanted == "cuda":
            return found("torch-no-gpu", f"the profile asks for cuda; no GPU is here ({told})")
    if facts.fault:
        return found("torch-broken", f"{told}: {facts.fault[:300]}", source=source)
    where = f"{facts.on}, {facts.seconds:.2f} s"
    where += "; no GPU here: it trains on the processor" if wanted == "auto" and not facts.available else ""
    return well("torch", f"{told} on {where}")


def runtimes(machine: Board | None = None) -> list[Check]:
    """Checks of onnxruntime, if installed: a single build, and its execution providers work."""
    from edgefl.export import session

    there, machine = session.installed(), machine or board()
    if not there:
        return []
    told = " and ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        detail = f"{told} are both installed and overwrite each other's files"
        return [found("onnxruntime-two", detail, names=" ".join(there))]
    said = _run(_ONNX, _MODEL)
    if said.status != 0:
        return [found("onnxruntime-broken", f"{told}: {said.last}")]
    has = msgspec.json.decode(said.out, type=_Providers)
    listed = ", ".join(has.listed)
    if machine.is_jetson and "CUDAExecutionProvider" not in has.runs:
        return [found("onnxruntime-jetson", f"{told} offers {listed}", source=machine.source("onnxruntime-gpu"))]
    if "onnxruntime-gpu" in there and "CUDAExecutionProvider" not in has.listed:
        return [found("onnxruntime-overwritten", f"{told} offers {listed}, and no CUDA")]
    missed = [name for name in has.listed if name == "CUDAExecutionProvider" and name not in has.runs]
    if missed and machine.any_gpu:
        library = re.search(r"lib[\w+-]+\.so[.\d]*: [^\n]*", said.errors)
        why = f": {library[0]}" if library else ""
        return [found("onnxruntime-cuda", f"{told} lists CUDA, and no model runs on it{why}")]
    return [well("onnxruntime", f"{told}: {listed}" + ("; no GPU here, so on the processor" if missed else ""))]


def _run(*script: str) -> _Said:
    """Run a Python script in a child process."""
    try:
        command = [sys.executable, "-c", *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _Said("", "", None)
    return _Said(done.stdout.strip().rpartition("\n")[2], done.stderr, done.returncode)

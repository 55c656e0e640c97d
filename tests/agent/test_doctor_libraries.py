"""Doctor on torch and onnxruntime: each broken build made on purpose, imported by a real process."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from device_agent import library_checks as doctor
from device_agent.board import Board, board
from edgefl.export import session
from edgefl.resources.hardware import NvmlError, graphics

NONE = Board()
CARD = Board("NVIDIA RTX A2000", cards=True)
JETSON = Board("NVIDIA Jetson Orin Nano", l4t=36)

#: A torch that can do what the check asks for, as it says: of a build for ``CUDA``, with or without a GPU in reach.
TORCH = """
import warnings
__version__ = "2.9.9"
class version:
    cuda = {cuda!r}
class _Gradient:
    grad = None
    def __matmul__(self, other): return self
    def __rmatmul__(self, other): return self
    def pow(self, _): return self
    def mean(self): return self
    def all(self): return self
    def item(self): return {finite!r}
    def backward(self): {backward}
class cuda:
    @staticmethod
    def is_available():
        {warning}
        return {available!r}
    @staticmethod
    def get_device_name(): return "NVIDIA RTX A2000"
def randn(*sizes, device="cpu", requires_grad=False):
    if device == "cuda" and not {available!r}:
        raise AssertionError("Torch not compiled with CUDA enabled")
    return _Gradient()
def isfinite(_): return _Gradient()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package in front of the installed ones, for the processes that doctor starts."""

    def put(name: str, text: str) -> None:
        (tmp_path / "front" / name).mkdir(parents=True)
        (tmp_path / "front" / name / "__init__.py").write_text(text)
        behind = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "front"), behind])))

    return put


def a_torch(cuda=None, available=False, warning="pass", backward="pass", finite=True) -> str:
    return TORCH.format(cuda=cuda, available=available, warning=warning, backward=backward, finite=finite)


def test_the_installed_torch_trains_a_step() -> None:
    check = doctor.torch("cpu", NONE)
    assert (check.id, check.status) == ("torch-ok", "ok"), check
    assert re.search(r"torch \d.* on cpu, \d+\.\d\d s", check.detail)


MISSING = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")'
LIBRARY = 'raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")'
OLD_GLIBC = 'raise ImportError("/lib/libc.so.6: version `GLIBC_2.38\' not found")'
OLD_DRIVER = 'warnings.warn("The NVIDIA driver on your system is too old (found version 11040)")'
OTHER_ARCH = 'raise RuntimeError("CUDA error: no kernel image is available for execution on the device")'
UNSUPPORTED = 'warnings.warn("with CUDA capability sm_87 is not compatible with the current PyTorch installation.")'


@pytest.mark.parametrize(
    ("text", "wanted", "machine", "expected", "words"),
    [
        (MISSING, "auto", NONE, ("torch-missing", "fail"), "edgefl-toolkit[train]"),
        (MISSING, "auto", JETSON, ("torch-missing", "fail"), "https://pypi.jetson-ai-lab.io/jp6/cu126"),
        (LIBRARY, "auto", NONE, ("torch-library", "fail"), "libcudnn.so.9"),
        (OLD_GLIBC, "auto", NONE, ("torch-library", "fail"), "GLIBC_2.38"),
        ("import os; os.kill(os.getpid(), 4)", "auto", NONE, ("torch-processor", "fail"), "SIGILL"),
        ("import os; os.kill(os.getpid(), 9)", "auto", NONE, ("torch-killed", "fail"), "memory ran out"),
        ("raise ImportError('half installed')", "auto", NONE, ("torch-broken", "fail"), "half installed"),
        (a_torch(), "auto", CARD, ("torch-cpu-build", "warn"), "a CPU build, and there is NVIDIA RTX A2000"),
        (a_torch(), "cuda", CARD, ("torch-cpu-build", "fail"), "torch_device: cpu"),
        (a_torch(), "auto", JETSON, ("torch-cpu-build", "fail"), "--index-url https://pypi.jetson-ai-lab.io/jp6/cu126"),
        (a_torch("12.8", warning=OLD_DRIVER), "auto", Board(cards=True), ("torch-no-driver", "warn"), "is too old"),
        (a_torch("12.8"), "cuda", Board(cards=True), ("torch-no-driver", "fail"), "does not reach an NVIDIA card"),
        (a_torch("12.8"), "cuda", NONE, ("torch-no-gpu", "fail"), "no GPU is here"),
        (a_torch("12.8", True, backward=OTHER_ARCH), "auto", CARD, ("torch-architecture", "fail"), "other GPUs"),
        (a_torch("12.8", True, warning=UNSUPPORTED), "auto", CARD, ("torch-architecture", "fail"), "other GPUs"),
        (a_torch(finite=False), "auto", NONE, ("torch-broken", "fail"), "gradients are not finite"),
        (a_torch("12.8"), "auto", NONE, ("torch-ok", "ok"), "on cpu"),
        (a_torch("12.8", True), "auto", CARD, ("torch-ok", "ok"), "on NVIDIA RTX A2000"),
        (a_torch(), "cpu", CARD, ("torch-ok", "ok"), "on cpu"),
    ],
)
def test_each_torch_has_its_own_words(library, text, wanted, machine, expected, words) -> None:
    library("torch", text)
    check = doctor.torch(wanted, machine)
    assert (check.id, check.status) == expected, check
    assert words in f"{check.detail} {check.remedy}"
    assert bool(check.remedy) == (check.status != "ok")


def test_a_torch_that_hangs_is_not_waited_for(library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    library("torch", "import time; time.sleep(30)")
    assert doctor.torch("auto", NONE).id == "torch-hangs"


def test_an_old_python_is_told() -> None:
    assert doctor.python().id == "python-ok"
    assert (doctor.python((3, 9, 18)).id, doctor.python((3, 10, 0)).id) == ("python-old", "python-ok")


# onnxruntime


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These distributions alone are installed, as far as their metadata say."""
    for name, version in versions.items():
        folder = tmp_path / "metadata" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    rest = [place for place in sys.path if "site-packages" not in place]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "metadata"), *rest])


RUNTIME = """
class InferenceSession:
    def __init__(self, model, providers): self.providers = providers
    def get_providers(self): return ["CPUExecutionProvider"]
    def run(self, names, feeds): return [[2.0]]
def get_available_providers(): return {providers!r}
"""


def test_two_onnxruntimes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    (check,) = doctor.runtimes(NONE)
    assert (check.id, check.status) == ("onnxruntime-two", "warn")
    assert check.detail.startswith("onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 are both installed")
    assert "pip uninstall onnxruntime onnxruntime-gpu" in check.remedy
    assert "are both installed" in session._remedy("cuda")


def test_without_onnxruntime_there_is_no_such_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    assert doctor.runtimes(NONE) == []


@pytest.mark.parametrize(
    ("name", "providers", "machine", "finding"),
    [
        ("onnxruntime", ["CPUExecutionProvider"], CARD, "onnxruntime-ok"),
        ("onnxruntime-gpu", ["CUDAExecutionProvider", "CPUExecutionProvider"], NONE, "onnxruntime-ok"),
        ("onnxruntime-gpu", ["CUDAExecutionProvider", "CPUExecutionProvider"], CARD, "onnxruntime-cuda"),
        ("onnxruntime-gpu", ["AzureExecutionProvider", "CPUExecutionProvider"], NONE, "onnxruntime-overwritten"),
        ("onnxruntime", ["CPUExecutionProvider"], JETSON, "onnxruntime-jetson"),
    ],
)
def test_each_runtime_has_its_own_words(library, name, providers, machine, finding, monkeypatch) -> None:
    monkeypatch.setattr(session, "installed", lambda: {name: "1.31.1"})
    library("onnxruntime", RUNTIME.format(providers=providers))
    (check,) = doctor.runtimes(machine)
    assert check.id == finding
    assert ", ".join(providers) in check.detail or finding == "onnxruntime-cuda"


def test_a_runtime_that_can_not_be_imported_is_told(library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed", lambda: {"onnxruntime": "1.31.1"})
    library("onnxruntime", "raise ImportError('no capi')")
    (check,) = doctor.runtimes(NONE)
    assert (check.id, "no capi" in check.detail) == ("onnxruntime-broken", True)


@pytest.mark.skipif("onnxruntime-gpu" not in session.installed(), reason="onnxruntime-gpu is not installed")
def test_the_installed_runtime_lists_cuda_and_is_tried_not_believed() -> None:
    (check,) = doctor.runtimes(CARD if board() == NONE else NONE)
    if board() == NONE:  # here no CUDA library is, so the real provider says which it misses
        assert check.id == "onnxruntime-cuda"
        assert re.search(r"no model runs on it: lib\w+\.so\.\d+: cannot open", check.detail)


def test_on_a_jetson_the_wheels_source_is_named_and_why_pips_does_not_fit() -> None:
    remedies = {}
    for l4t in (35, 36, 38):
        finding = doctor.found(
            "onnxruntime-jetson", "", source=Board("NVIDIA Jetson", l4t=l4t).source("onnxruntime-gpu")
        )
        remedies[l4t] = finding.remedy
    assert "--no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 onnxruntime-gpu" in remedies[36]
    assert "https://pypi.jetson-ai-lab.io/sbsa/cu130" in remedies[38]
    assert "JetPack 6 or newer first" in remedies[35]
    assert all("pip's own onnxruntime-gpu does not fit" in remedy for remedy in remedies.values())


# The machine


def no_driver() -> None:
    raise NvmlError("libnvidia-ml.so.1 is not installed")


def test_the_board_is_read_from_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_agent.board.graphics", partial(graphics, nvml=no_driver))
    assert board(tmp_path) == NONE
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert board(tmp_path) == Board(cards=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 1\n")
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(b"NVIDIA Jetson Orin Nano\0")
    assert board(tmp_path) == Board("NVIDIA Jetson Orin Nano", cards=True, l4t=36)

"""Where a session computes: what is asked for, what this machine can, and what is said about it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from edgefl.errors import ExportError
from edgefl.export import session

GPU = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
CPU = ["AzureExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("device", "listed", "here", "wanted"),
    [
        ("auto", GPU, {"tensorrt", "cuda", "cpu"}, GPU),
        ("auto", GPU, {"cuda", "cpu"}, GPU[1:]),  # no TensorRT on this machine
        ("auto", GPU, {"cpu"}, GPU[2:]),  # onnxruntime-gpu without a card: nothing complains
        ("auto", CPU, {"cuda", "cpu"}, GPU[2:]),  # a card, and onnxruntime without CUDA
        ("tensorrt", GPU, {"cpu"}, GPU),  # asked for by name: onnxruntime says why not
        ("cuda", GPU, {"tensorrt", "cuda", "cpu"}, GPU[1:]),
        ("cuda", CPU, {"cpu"}, GPU[2:]),
        ("cpu", GPU, {"tensorrt", "cuda", "cpu"}, GPU[2:]),
    ],
)
def test_the_fastest_that_this_machine_has_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, device: str, listed: list[str], here: set[str], wanted: list[str]
):
    monkeypatch.setattr(session, "_is_here", lambda name: name in here)
    assert session._wanted(device, listed) == wanted


def test_an_unknown_device_is_named():
    with pytest.raises(ExportError, match="unknown device 'npu'") as raised:
        session._wanted("npu", GPU)
    assert "tensorrt" in raised.value.remedy


class Ran:
    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_what_ran_is_what_the_session_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "installed", lambda: {"onnxruntime-gpu": "1.31.1"})
    assert session.runs_on(Ran()) == "CUDAExecutionProvider of onnxruntime-gpu 1.31.1"  # type: ignore[arg-type]


def test_the_processor_is_always_here():
    assert session._is_here("cpu")


class Runtime:
    """A stand-in for onnxruntime, with a loader of CUDA's libraries that prints what it does not find."""

    __version__ = "1.31.1"
    OrtMemoryInfo = OrtArenaCfg = create_and_register_allocator = staticmethod(lambda *_: None)
    OrtAllocatorType = OrtMemType = SimpleNamespace(ORT_ARENA_ALLOCATOR=1, DEFAULT=0)

    @staticmethod
    def SessionOptions() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(add_session_config_entry=lambda *_: None)

    def __init__(self) -> None:
        self.loaded = 0

    def get_available_providers(self) -> list[str]:
        return GPU

    def preload_dlls(self) -> None:
        self.loaded += 1
        sys.stdout.write("Failed to load libcudnn.so.9\n")

    def InferenceSession(self, data: bytes, options: object, providers: list[str]) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(get_providers=lambda: providers)


@pytest.mark.parametrize(("device", "loaded"), [("cuda", 1), ("tensorrt", 1), ("cpu", 0)])
def test_a_session_on_a_gpu_finds_cuda_in_pip_s_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: session.Device, loaded: int
):
    runtime = Runtime()
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    for _ in range(2):  # once is enough for a process
        session.open_session(b"", device)
    assert runtime.loaded == loaded
    assert capsys.readouterr() == ("", "")


def test_an_onnxruntime_without_such_a_loader_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(Runtime, "preload_dlls")  # as before 1.21
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime())
    assert session.open_session(b"", "cuda").get_providers() == GPU[1:]

"""Where a session computes: what is asked for, what this machine can, and what is said about it."""

from __future__ import annotations

import sys

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
    """An onnxruntime whose loader of CUDA's libraries prints what it does not find."""

    def __init__(self) -> None:
        self.loaded = 0

    def preload_dlls(self) -> None:
        self.loaded += 1
        sys.stdout.write("Failed to load libcudnn.so.9\n")


def test_cuda_s_libraries_are_looked_for_in_pip_s_packages_without_a_word(capsys: pytest.CaptureFixture[str]):
    runtime = Runtime()
    session._load_cuda(runtime)
    session._load_cuda(object())  # an onnxruntime before 1.21 has no such loader
    assert runtime.loaded == 1
    assert capsys.readouterr() == ("", "")

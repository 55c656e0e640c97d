"""Micro-batches: the size with the least time a sample, kept by the bundle and used in each call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from serve_fixture import bundles

from edgefl.errors import ExportError
from edgefl.export import micro_batch
from edgefl.export.bundle_format import MANIFEST_FILE
from edgefl.export.micro_batch import SIZES, fastest, tuned
from edgefl.export.runtime import Bundle, load_bundle


class Clock:
    """Time that passes only in calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: Callable[[int], float]) -> None:
        self.now, self.takes, self.called = 0.0, takes, list[int]()
        monkeypatch.setattr(micro_batch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(micro_batch.time, "perf_counter", lambda: self.now)

    def __call__(self, rows: int) -> None:
        self.called.append(rows)
        self.now += self.takes(rows)


class Counted:
    """A bundle's session that notes the samples of each call."""

    def __init__(self, bundle: Bundle, provider: str = "CPUExecutionProvider") -> None:
        self.session, self.provider, self.rows = bundle.session, provider, list[int]()

    def get_outputs(self):
        return self.session.get_outputs()

    def get_providers(self):
        return [self.provider]

    def run(self, names, feeds):
        self.rows.append(len(feeds["acc"]))
        return self.session.run(names, feeds)


def test_the_fastest_size_a_sample_is_chosen(monkeypatch: pytest.MonkeyPatch):
    # 1 ms a call and 1 ms a sample, beyond 8 two: 1 -> 2 ms a sample, 8 -> 1.125, 16 -> (1 + 8 + 16) / 16 = 1.56
    clock = Clock(monkeypatch, lambda rows: (1 + rows + max(0, rows - 8)) / 1000)
    assert fastest(clock, 10.0) == 8
    assert set(clock.called) == set(SIZES)


def test_of_sizes_as_fast_the_largest_is_chosen(monkeypatch: pytest.MonkeyPatch):
    assert fastest(Clock(monkeypatch, lambda rows: rows / 1000), 10.0) == SIZES[-1] == 64


def test_a_call_that_was_disturbed_once_does_not_decide(monkeypatch: pytest.MonkeyPatch):
    def takes(rows: int) -> float:
        disturbed = rows == 4 and clock.called.count(4) <= 2
        return 1.0 if disturbed else (0.004 if rows == 4 else 0.002 * rows)

    clock = Clock(monkeypatch, takes)
    assert fastest(clock, 100.0) == 4


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
def test_a_slow_model_is_measured_in_the_time_there_is(monkeypatch: pytest.MonkeyPatch, seconds: float):
    clock = Clock(monkeypatch, lambda rows: 1.4 * rows)
    assert fastest(clock, seconds) == 1
    assert clock.now <= max(seconds, 1.4)


def test_a_bundle_computes_in_its_micro_batches_and_answers_the_same():
    bundle = load_bundle(bundles() / "acc", threads=1)
    counted = Counted(bundle)
    x = np.random.default_rng(0).random((10, 4, 3), np.float32)
    found = replace(bundle, session=counted, rows=4).predict({"acc": x})
    assert counted.rows == [4, 4, 2]
    np.testing.assert_allclose(found.logits, bundle.predict({"acc": x}).logits, atol=1e-6)


def test_a_measured_size_is_kept_by_the_bundle(monkeypatch: pytest.MonkeyPatch):
    bundle = load_bundle(bundles() / "acc", threads=1)
    counted = Counted(bundle)
    asked = []
    monkeypatch.setattr(micro_batch, "fastest", lambda compute, seconds: asked.append(compute(8)) or 2)
    assert tuned(replace(bundle, session=counted), 1.0).rows == 2
    assert counted.rows == [8], "what is measured is one call"


def test_on_a_gpu_nothing_is_measured():
    bundle = load_bundle(bundles() / "acc", threads=1)
    counted = Counted(bundle, "CUDAExecutionProvider")
    shown = replace(bundle, session=counted)
    assert tuned(shown, 1.0) is shown
    assert counted.rows == []


@pytest.mark.parametrize("given", ["acc", "text", "acc+image+text"])
def test_bundles_of_every_input_can_be_measured(given: str):
    assert tuned(load_bundle(bundles() / given, threads=1), 0.05).rows in SIZES


def test_texts_are_measured_at_their_full_length(monkeypatch: pytest.MonkeyPatch):
    bundle = load_bundle(bundles() / "text", threads=1)
    shapes = []

    class Seen(Counted):
        def run(self, names, feeds):
            shapes.append(feeds["text"].shape)
            return self.session.run(names, feeds)

    tuned(replace(bundle, session=Seen(bundle)), 0.0)
    assert set(shapes) == {(1, 6)}


@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        ({"minimum": 3, "maximum": 10**15}, None),
        ({"minimum": 0, "maximum": 6}, None),
        ({"minimum": 7, "maximum": 6}, None),
        ({"minimum": 3, "maximum": -6}, None),
        ({"minimum": 3}, None),
        (None, ["batch", -6]),
        (None, ["batch", 10**6, 10**6]),
        (None, ["batch", "elsewhere"]),
        (None, []),
    ],
)
def test_a_manifest_with_sizes_of_no_sample_is_damaged(tmp_path: Path, axis: object, shape: object):
    folder = tmp_path / "text"
    shutil.copytree(bundles() / "text", folder)
    manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
    manifest["axes"]["text.length"] = axis or manifest["axes"]["text.length"]
    manifest["inputs"][0]["shape"] = manifest["inputs"][0]["shape"] if shape is None else shape
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ExportError, match="has sizes that no sample has"):
        tuned(load_bundle(folder, threads=1), 0.0)


def test_a_measurement_ends():
    began = time.monotonic()
    tuned(load_bundle(bundles() / "acc", threads=1), 0.2)
    assert time.monotonic() - began < 5

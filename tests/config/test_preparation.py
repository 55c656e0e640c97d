"""Fields of an encoder that say how raw files become samples: what they make of the specification, and where not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_compile import compiled, run_config

from edgefl.data.log_mel import frames_of
from edgefl.encoder_kinds import preparation_faults
from edgefl.errors import ConfigError
from edgefl.models.spec import EncoderSpec
from edgefl.plan.preparation import read_as


def encoders(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"stages": 3, "encoders": fields}}


def read(folder: bool = True, **fields: dict[str, Any]) -> dict[str, EncoderSpec]:
    return read_as(run_config(**encoders(**fields)), folder=folder)


def test_a_window_is_the_first_axis_and_its_step():
    asked = {"kind": "sensor", "window": 128, "step": 64, "rate": 50, "source_rate": 100}
    found = read(acc=asked, gyro={"kind": "sensor", "window": 8}, plain={"kind": "sensor"})
    assert (found["acc"].input_shape, found["acc"].step) == ((128, 0), 64)
    assert (found["acc"].rate, found["acc"].source_rate) == (50, 100)
    assert (found["gyro"].input_shape, found["gyro"].step) == ((8, 0), 8)
    assert (found["plain"].input_shape, found["plain"].step) == ((), 0)
    spec = compiled(shapes={"acc": (128, 3)}, **encoders(acc=asked)).model.encoders["acc"]
    assert (spec.input_shape, spec.step, spec.rate) == ((128, 3), 64, 50)


def test_sounds_and_texts_have_the_length_that_is_asked_for():
    """Windows of 32 ms every 16 ms: one second holds 1 + (1000 - 32) / 16 = 61 of them."""
    assert [frames_of(seconds) for seconds in (0.01, 0.032, 0.048, 1.0)] == [1, 1, 2, 61]
    asked = {
        "s": {"kind": "audio", "seconds": 1},
        "b": {"kind": "audio", "bands": 16},
        "w": {"kind": "text", "length": 9},
    }
    for folder in (True, False):
        found = read(folder, **asked)
        assert (found["s"].input_shape, found["b"].input_shape, found["w"].input_shape) == ((61, 0), (0, 16), (9,))
    named = read(a={"kind": "audio", "size": "base", "seconds": 1})
    assert named["a"].input_shape == (61, 128)


def test_pictures_are_stretched_unless_the_middle_is_asked_for():
    assert read(p={"kind": "vision", "image_size": 32})["p"].crop == "stretch"
    assert read(p={"kind": "vision", "image_size": 32, "crop": "center"})["p"].crop == "center"


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        ({"kind": "sensor", "step": 4}, "acc.step: is from one window to the next; set window too"),
        ({"kind": "sensor", "window": 4, "source_rate": 9}, "acc.source_rate: is for recordings that are resampled"),
        ({"kind": "sensor", "image_size": 4}, "acc.image_size: is for pictures, and the kind is sensor"),
        ({"kind": "sensor", "seconds": 4}, "acc.seconds: is for sounds, and the kind is sensor"),
        ({"kind": "sensor", "length": 4}, "acc.length: is for texts, and the kind is sensor"),
        ({"kind": "vision", "window": 4}, "acc.window: is for recordings of a sensor, and the kind is vision"),
        ({"kind": "vision", "crop": "center"}, "acc.crop: is for pictures that are brought to a size"),
    ],
)
def test_a_field_of_another_kind_or_without_effect_is_refused(encoder: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as refused:
        compiled(shapes={"acc": (16, 16, 3) if encoder["kind"] == "vision" else (16, 3)}, **encoders(acc=encoder))
    assert said in str(refused.value)


def test_windows_of_two_sensors_cover_the_same_seconds():
    acc = {"kind": "sensor", "window": 100, "rate": 50}
    shapes = {"acc": (100, 3), "gyro": (200, 3)}
    gyro = {"kind": "sensor", "window": 200, "rate": 100}
    assert compiled(shapes=shapes, **encoders(acc=acc, gyro=gyro)).model.encoders["gyro"].step == 200
    with pytest.raises(ConfigError, match=r"gyro.step: is 1 s, that of acc 2 s: their windows would drift apart"):
        compiled(shapes=shapes, **encoders(acc=acc, gyro={**gyro, "step": 100}))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": -1}, "step"),
        ({"rate": float("nan")}, "rate"),
        ({"source_rate": float("inf")}, "source_rate"),
        ({"kind": "vision", "input_shape": (8, 8, 3), "step": 4}, "step"),
        ({"crop": "left"}, "crop"),
        ({"standardize": "always"}, "standardize"),
        ({"kind": "text", "input_shape": (8,), "standardize": "fleet"}, "standardize"),
        ({"standardize": "fleet", "mean": (0.0,), "std": (1.0,)}, "mean"),
        ({"standardize": "fleet", "mean": (0.0, 0.0), "std": (1.0,)}, "mean"),
        ({"mean": (0.0, 0.0), "std": (1.0, 1.0)}, "mean"),
        ({"standardize": "fleet", "mean": (0.0, 0.0), "std": (1.0, 0.0)}, "std"),
        ({"standardize": "fleet", "mean": (0.0, float("nan")), "std": (1.0, 1.0)}, "std"),
    ],
)
def test_specifications_of_others_are_checked(changes: dict[str, Any], field: str):
    sound = EncoderSpec(input_shape=(16, 2))
    assert not list(preparation_faults(sound))
    assert [path for path, _ in preparation_faults(msgspec.structs.replace(sound, **changes))] == [field]

"""Pictures as bytes or as numbers in 0..1, the same to training, to predictions and over HTTP; no other range."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from serve_fixture import bundles

from edgefl.data.sources import load
from edgefl.errors import DataError
from edgefl.export.runtime import load_bundle
from edgefl.models.spec import EncoderSpec
from edgefl.serve.catalogue import load_catalogue
from edgefl.serve.engine import Asked, Engine
from edgefl.serve.limits import Limits, Refused
from edgefl.serve.metrics import Metrics

BYTES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)


def probabilities(pixels: np.ndarray, datatype: str, *, binary: bool = False) -> list[float]:
    """What a server answers to pictures over the protocol."""
    head = {"name": "image", "shape": list(pixels.shape), "datatype": datatype}
    blob = pixels.tobytes() if binary else b""
    head |= {"parameters": {"binary_data_size": len(blob)}} if binary else {"data": pixels.ravel().tolist()}
    text = json.dumps({"inputs": [head], "outputs": [{"name": "probabilities"}]}).encode()

    async def body() -> bytes:
        engine = Engine(load_catalogue(bundles(), device="cpu", threads=1), Limits(), Metrics())
        try:
            return (await engine.infer(Asked("demo", text + blob, len(text) if binary else None)))[0]
        finally:
            await engine.close()

    return list(json.loads(asyncio.run(body()))["outputs"][0]["data"])


@pytest.mark.parametrize("binary", [False, True])
def test_bytes_are_the_pixels_that_numbers_in_0_to_1_are(binary: bool) -> None:
    expected = probabilities((BYTES / 255).astype(np.float32), "FP32")
    assert probabilities(BYTES, "UINT8", binary=binary) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("pixels", "datatype", "low", "high"),
    [
        (BYTES.astype(np.float32), "FP32", "0", "255"),
        (BYTES / 127.5 - 1, "FP64", "-1", "1"),
        (BYTES.astype(np.int64), "INT64", "0", "255"),
    ],
)
def test_other_ranges_are_refused_with_the_way_out(pixels: np.ndarray, datatype: str, low: str, high: str) -> None:
    with pytest.raises(Refused, match=f"'image' holds pixels from {low} to {high}, the bundle takes 0 to 1") as caught:
        probabilities(pixels, datatype)
    assert caught.value.status == 400
    assert "bytes (UINT8)" in (caught.value.remedy or "")


def test_a_bundle_and_a_file_of_arrays_take_the_same_ranges(tmp_path: Path) -> None:
    bundle = load_bundle(bundles() / "image")
    wanted = bundle.predict({"image": (BYTES / 255).astype(np.float32)}).probabilities
    np.testing.assert_allclose(bundle.predict({"image": BYTES}).probabilities, wanted, atol=1e-6)
    with pytest.raises(DataError, match="pixels from 0 to 255"):
        bundle.predict({"image": BYTES.astype(np.float32)})
    encoders = {"image": EncoderSpec(kind="vision", input_shape=(8, 8, 3))}
    np.savez(tmp_path / "a.npz", image=np.concatenate([BYTES / 255, BYTES[:1].astype(float)]))
    with pytest.raises(DataError, match=r"sample 4: image: pixels from 0 to 249; store bytes, or numbers in 0\.\.1"):
        load(tmp_path / "a.npz", modalities=encoders)
    assert len(load(tmp_path / "a.npz", modalities=encoders, bad_samples="skip")) == 4
    np.savez(tmp_path / "b.npz", image=np.clip(BYTES / 255 + 4e-4, 0, 1.0004))  # rounding of half precision
    assert len(load(tmp_path / "b.npz", modalities=encoders)) == 4

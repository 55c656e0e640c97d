"""What people write: run files, recipes, device profiles, overrides; manifests and the files of samples."""

from __future__ import annotations

import struct
import warnings
import zlib

import numpy as np

from edgefl.config.profiles import load_device, load_recipe, load_run
from edgefl.config.yaml_files import override
from edgefl.data import folder as samples_folder
from edgefl.data.dataset import Dataset
from edgefl.data.readers import SampleError, read, read_samples, target
from edgefl.data.sources import load
from edgefl.data.ts_files import read_ts
from edgefl.errors import ConfigError, DataError, ModelError
from edgefl.models.spec import EncoderSpec
from edgefl.plan.compile import compile_run
from edgefl.trace_files import read_links, read_states
from edgefl.traces import NEEDS, Traces
from fuzz.target import MIB, Target, scratch

SHAPES = {"acc": (8, 2), "gyro": (8, 2), "text": (4,), "image": (8, 8, 3), "sound": (6, 5)}
ENCODERS = {
    "acc": EncoderSpec(kind="sensor", input_shape=(2, 2)),
    "long": EncoderSpec(kind="sensor", input_shape=(2, 0), step=1, rate=50.0, source_rate=25.0),
    "image": EncoderSpec(kind="vision", input_shape=(4, 4, 3)),
    "sound": EncoderSpec(kind="audio", input_shape=(6, 5)),
    "words": EncoderSpec(kind="text", input_shape=(5,), vocabulary=50),
}


def run_file(data: bytes) -> None:
    """A run file, to the plan of the run."""
    file = scratch("config") / "run.yaml"
    file.write_bytes(data)
    config, recipe = load_run(str(file))
    compile_run(
        config,
        recipe,
        run="r",
        shapes={m: SHAPES.get(m, (8, 2)) for m in config.model.encoders},
        label_names=("a", "b"),
    )


def recipe_file(data: bytes) -> None:
    file = scratch("config") / "recipe.yaml"
    file.write_bytes(data)
    load_recipe(str(file))


def device_file(data: bytes) -> None:
    file = scratch("config") / "device.yaml"
    file.write_bytes(data)
    load_device(str(file))


def overrides(data: bytes) -> None:
    """Lines of ``--set``."""
    lines = data.decode("utf-8", "replace").split("\n")[:20]
    values = {"name": "x", "fleet": [{"name": "a"}], "training": {"rounds": [1]}}
    assert isinstance(override(values, lines), dict)


def samples(data: bytes) -> None:
    """manifest.jsonl of a folder, with and without encoders; bad samples are listed or left out."""
    folder = scratch("samples")
    if not (folder / "a.npy").exists():
        np.save(folder / "a.npy", np.ones((2, 2), np.float32))
        (folder / "b.csv").write_text("x,y\n1,2\n3,4\n")
        (folder / "c.txt").write_text("some words")
    (folder / "manifest.jsonl").write_bytes(data)
    for encoders in (None, ENCODERS):
        try:
            _checked(load(folder, bad_samples="skip", modalities=encoders))
        except DataError:
            load(folder, bad_samples="skip", modalities=encoders and {"acc": ENCODERS["acc"]})
    _checked(samples_folder.read_manifest(folder))


def _checked(found: Dataset) -> None:
    assert len(found) > 0
    for name, values in found.modalities.items():
        assert len(values) == len(found)
        assert np.isfinite(np.asarray(values)).all(), name
    if found.labels is not None:
        assert found.labels.max(initial=-1) < len(found.label_names)


def labels(data: bytes) -> None:
    folder = scratch("labels")
    (folder / "manifest.jsonl").write_text('{"label": 0, "acc": [[1]]}\n')
    (folder / "labels.json").write_bytes(data)
    samples_folder.read_manifest(folder)


def traces(data: bytes) -> None:
    """States of phones, and link speeds; one of both has to be refused."""
    file = scratch("traces") / "x.json"
    file.write_bytes(data)
    try:
        patterns, _ = read_states(file, NEEDS)
    except ConfigError:
        assert all(one.down > 0 for one in read_links(file))
        return
    found = Traces(["a", "b"], patterns, 1)
    assert (found.next_edges(0) > 0).all()


def npz(data: bytes) -> None:
    file = scratch("npz") / "x.npz"
    file.write_bytes(data)
    for encoders in (None, ENCODERS):
        try:
            _checked(load(file, bad_samples="skip", modalities=encoders))
        except DataError:
            if encoders is None:
                raise


def _file(data: bytes, name: str, modality: str) -> None:
    """One sample's file, as found and as an encoder takes it."""
    folder = scratch("one")
    (folder / name).write_bytes(data)
    kind = ENCODERS[modality].kind
    for encoder in (EncoderSpec(kind=kind), ENCODERS[modality]):
        try:
            value = read(folder, name, target(encoder))
        except SampleError:
            if encoder is ENCODERS[modality]:
                raise
            continue
        assert value.dtype in (np.float32, np.int64)
        assert np.isfinite(value).all()


def npy(data: bytes) -> None:
    for modality in ENCODERS:
        try:
            _file(data, "x.npy", modality)
        except SampleError:
            if modality == "words":
                raise


def csv(data: bytes) -> None:
    try:
        _file(data, "x.csv", "acc")
    finally:
        windows = read_samples(scratch("one"), "x.csv", target(ENCODERS["long"]))
        assert np.isfinite(windows.values[windows.whole]).all()


def text(data: bytes) -> None:
    _file(data, "x.txt", "words")


def sound(data: bytes) -> None:
    _file(data, "x.wav", "sound")


def png(data: bytes) -> None:
    _picture(_with_checksums(data), "x.png")


def jpeg(data: bytes) -> None:
    _picture(data, "x.jpg")


def _picture(data: bytes, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of much that it then reads
        _file(data, name, "image")


def _with_checksums(data: bytes) -> bytes:
    """A .png whose blocks have right checksums, so that what is wrong inside them is seen."""
    out, at = [data[:8]], 8
    while at + 12 <= len(data) and len(out) < 100:
        (length,) = struct.unpack_from(">I", data, at)
        block = data[at + 4 : at + 8 + length]
        out.append(struct.pack(">I", length) + block + struct.pack(">I", zlib.crc32(block)))
        at += 12 + length
    return b"".join(out) + data[at:]


def series(data: bytes) -> None:
    file = scratch("series") / "x.ts"
    file.write_bytes(data)
    values, found, names = read_ts(file)
    assert len(values) == len(found)
    assert not len(found) or found.max() < len(names)


TARGETS = (
    Target(
        "run_file",
        "config (YAML), plan.compile",
        run_file,
        (ConfigError, ModelError),
        "text",
        (8 * MIB, 2000),
        slow=True,
    ),
    Target("recipe_file", "config (YAML)", recipe_file, (ConfigError,), "text", (8 * MIB, 2000), slow=True),
    Target("device_file", "config (YAML)", device_file, (ConfigError,), "text", (8 * MIB, 2000)),
    Target("override", "config.files.override", overrides, (ConfigError,), "text", (8 * MIB, 2000)),
    Target(
        "manifest_jsonl", "data.folder, data.readers", samples, (DataError,), "json lines", (4 * MIB, 400), slow=True
    ),
    Target("labels_json", "data.folder (labels.json)", labels, (DataError,), "json", (MIB, 100)),
    Target("traces_json", "trace_files (FLASH's JSON)", traces, (ConfigError,), "json", (MIB, 1000)),
    Target("npz", "data.arrays.read_npz, data.dataset", npz, (DataError,), "zip", (2 * MIB, 100), slow=True),
    Target("npy", "data.arrays.read_npy", npy, (DataError,), "npy", (2 * MIB, 100)),
    Target("csv", "data.readers (.csv)", csv, (DataError,), "text", (2 * MIB, 100)),
    Target("txt", "data.readers (.txt)", text, (DataError,), "text", (2 * MIB, 100)),
    Target("wav", "data.log_mel", sound, (DataError,), "bytes", (32 * MIB, 4000)),
    Target("png", "data.readers (.png)", png, (DataError,), "bytes", (8 * MIB, 8000), slow=True),
    Target("jpeg", "data.readers (.jpg)", jpeg, (DataError,), "bytes", (8 * MIB, 8000), slow=True),
    Target("ts", "data.named", series, (DataError,), "text", (MIB, 200)),
)

"""The inputs that fuzzing begins with, of what people write; see ``seeds``."""

from __future__ import annotations

import io
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from edgefl.config.profiles import find, shipped

Seeds = Iterator[tuple[str, bytes]]


def yaml_files(kind: str) -> Callable[[], Seeds]:
    def some() -> Seeds:
        for name in [one for one in shipped(kind) if one != "demo"][:6]:
            yield name, find(kind, name).read_bytes()
        if kind == "runs":
            yield "small", (Path(__file__).parent / "small.yaml").read_bytes()

    return some


def override() -> Seeds:
    yield "some", b"training.rounds=[1, 2]\nfleet.0.name=x\nseed=7\nmodel.encoders.acc={kind: sensor, width: 8}\nname="


def manifest_jsonl() -> Seeds:
    yield (
        "mixed",
        (
            b'{"id": "w1", "label": "walk", "group": "anna", "acc": "a.npy", "gyro": [[0.1], [2]], "words": "hi"}\n'
            b'{"id": "w2", "label": "rest", "acc": "b.csv", "words": "c.txt", "meta": {"any": [1, null]}}\n'
            b'{"label": "walk", "gyro": null, "acc": [[1, 2], [3, 4]], "long": [[1], [2], [3]]}\n'
        ),
    )
    yield "numbers", b'{"label": 0, "acc": [1, 2, 3]}\n{"label": 1, "acc": [4, 5, 6]}\n\n{"acc": [7, 8, 9]}\n'


def labels_json() -> Seeds:
    yield "two", b'["rest", "walk"]'


def traces_json() -> Seeds:
    lines = b"2020-01-02 23:00:00\\twifi\\n2020-01-02 23:00:05\\t85%\\n2020-01-03 01:00:10\\tbattery_charged_on\\n"
    yield "states", b'{"a": {"guid": "a", "messages": "' + lines + b'2020-01-03 02:00:00\\tscreen_lock"}}'
    yield "links", b'{"a": {"down_u": 7491.4, "down_sigma": 3369.2, "up_u": 4935.2, "up_sigma": 2767.3}}'


def _npz(deflated: bool) -> bytes:
    out = io.BytesIO()
    arrays = {
        "acc": np.arange(12, dtype=np.float32).reshape(3, 2, 2), "acc.present": np.array([True, True, False]),
        "words": np.array([[1, 2, 0, 0, 0]] * 3), "image": np.zeros((3, 4, 4, 3), np.uint8),
        "label": np.array([0, 1, -1]),
        "label_names": np.array(["a", "b"]), "ids": np.array(["x", "y", "z"]), "group": np.array(["p", "p", "q"]),
    }  # fmt: skip
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())
    return out.getvalue()


def npz() -> Seeds:
    yield "stored", _npz(deflated=False)
    yield "deflated", _npz(deflated=True)


def npy() -> Seeds:
    for name, array in (
        ("floats", np.ones((2, 2), np.float32)),
        ("ids", np.array([3, 4])),
        ("fortran", np.zeros((4, 4, 3), order="F")),
        ("texts", np.array(["a", "é"])),
    ):
        out = io.BytesIO()
        np.save(out, array)
        yield name, out.getvalue()


def csv() -> Seeds:
    yield "head", b"x,y\n1,2\n3.5,-4e3\n"
    yield "time", b"time_ms,x,y\n0,1,2\n40,1,\n80,1,2\n120,3,4\n400,1,2\n440,1,2\n"


def txt() -> Seeds:
    yield "words", "Some words, é\n".encode()


def wav() -> Seeds:
    for width, rate in ((2, 8000), (1, 16000), (4, 44100)):
        out = io.BytesIO()
        with wave.open(out, "wb") as sound:
            sound.setnchannels(1 if width != 1 else 2)
            sound.setsampwidth(width)
            sound.setframerate(rate)
            sound.writeframes(bytes(range(240)) * 4)
        yield f"{8 * width}-bit-{rate}", out.getvalue()


def _image(form: str, mode: str) -> bytes:
    out = io.BytesIO()
    image = Image.new(mode, (6, 5))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(out, form, exif=exif)
    return out.getvalue()


def png() -> Seeds:
    for mode in ("RGB", "L", "P", "RGBA", "1"):
        yield mode.lower(), _image("PNG", mode)


def jpeg() -> Seeds:
    for mode in ("RGB", "L", "CMYK"):
        yield mode.lower(), _image("JPEG", mode)


def ts() -> Seeds:
    yield "two", b"@problemName x\n@classLabel true a b\n@data\n1,2,3:4,5,6:a\n7,8,9:1,2,3:b\n"


SEEDS: dict[str, Callable[[], Seeds]] = {
    "run_file": yaml_files("runs"),
    "recipe_file": yaml_files("recipes"),
    "device_file": yaml_files("devices"),
    "override": override,
    "manifest_jsonl": manifest_jsonl,
    "labels_json": labels_json,
    "traces_json": traces_json,
    "npz": npz,
    "npy": npy,
    "csv": csv,
    "txt": txt,
    "wav": wav,
    "png": png,
    "jpeg": jpeg,
    "ts": ts,
}

"""Files that cannot be read: all named in one error, left out on request, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from PIL import Image

from edgefl.cli.main import main
from edgefl.data.log_mel import read_wav
from edgefl.data.pictures import read_picture
from edgefl.data.sounds import read_sound
from edgefl.errors import MissingDependencyError


def pictures(root: Path, count: int = 16) -> Path:
    for label, shade in (("dark", 40), ("light", 200)):
        (root / label).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (32, 32), (shade, shade, i)).save(root / label / f"{i}.png")
    return root


def init(*words: str) -> int:
    """The exit code of ``edgefl init`` in the working directory."""
    with pytest.raises(SystemExit) as ended:
        main(["init", *words, "--yes"])
    return int(ended.value.code or 0)


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics")
    (root / "dark" / "empty.png").write_bytes(b"")
    whole = (root / "light" / "3.png").read_bytes()
    (root / "light" / "3.png").write_bytes(whole[: len(whole) // 2])
    return root


def test_bad_pictures_are_named_together_and_nothing_stays(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("pics")
    said = " ".join(capsys.readouterr().err.split())
    assert "2 of 33 files of image cannot be read" in said
    assert "dark/empty.png: no picture of a format that is read" in said
    assert not list(damaged.rglob("manifest.jsonl"))
    assert not Path("pics.yaml").exists()


def test_bad_pictures_are_left_out_on_request(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("pics", "--skip-bad") == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (damaged / "manifest.jsonl").read_text().splitlines()]
    assert len(lines) == 31
    assert "31 samples" in said
    assert yaml.safe_load(Path("pics.yaml").read_text())["data"]["bad_samples"] == "skip"


def test_what_was_there_stays_where_init_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics")
    Path("pics.yaml").write_text("mine")
    assert init("pics")
    assert Path("pics.yaml").read_text() == "mine"
    assert not (root / "manifest.jsonl").exists()


@pytest.mark.parametrize("suffix", ["webp", "bmp", "gif", "tiff"])
def test_pictures_of_other_formats_hold_the_same_pixels(tmp_path: Path, suffix: str) -> None:
    pixels = np.kron(np.arange(4, dtype=np.uint8).reshape(2, 2) * 80, np.ones((4, 4), np.uint8))
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(pixels).convert("RGB").save(tmp_path / f"a.{suffix}", **options)
    found = read_picture(tmp_path / f"a.{suffix}", (8, 8, 3), "stretch")
    np.testing.assert_allclose(found[:, :, 0], pixels / 255, atol=1e-6)


def test_sixteen_bits_are_scaled_by_their_range(tmp_path: Path) -> None:
    deep = np.array([[0, 65535], [32768, 13107]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    grey = read_picture(tmp_path / "deep.png", (), "stretch")
    np.testing.assert_allclose(grey[:, :, 0], deep / 65535, atol=1e-6)
    assert read_picture(tmp_path / "deep.png", (2, 2, 3), "stretch").shape == (2, 2, 3)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_32"])
def test_sounds_are_read_alike_with_and_without_soundfile(tmp_path: Path, subtype: str) -> None:
    wave = np.sin(np.arange(4000) / 5).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", np.stack([wave, 0.5 * wave], axis=1), 16_000, subtype)
    (ours, rate), (kept, kept_rate) = read_wav(tmp_path / "a.wav"), read_sound(tmp_path / "a.wav")
    assert rate == kept_rate == 16_000
    np.testing.assert_allclose(ours, kept, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), [
    ("a.flac", {}), ("a.ogg", {}), ("a.mp3", {}),
    ("a.wav", {"subtype": "FLOAT"}), ("a.wav", {"subtype": "PCM_24"}), ("a.wav", {"format": "WAVEX"}),
])  # fmt: skip
def test_sounds_of_other_formats_are_read(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    wave = 0.5 * np.sin(np.arange(16_000) / 10)
    soundfile.write(tmp_path / name, wave, 16_000, **options)
    samples, rate = read_sound(tmp_path / name)
    assert rate == 16_000
    assert abs(np.sqrt((samples**2).mean()) - 0.5 / 2**0.5) < 0.02


def test_without_soundfile_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "a.flac", np.zeros(16_000), 16_000)
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MissingDependencyError, match="soundfile"):
        read_sound(tmp_path / "a.flac")

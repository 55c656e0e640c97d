"""Sounds of every usual format are read alike, and plain PCM .wav without a library as with it."""

from __future__ import annotations

import struct
import sys
import wave

import numpy as np
import pytest
import soundfile

from edgefl.data.log_mel import log_mel
from edgefl.data.raw_sample import raw_samples
from edgefl.data.readers import SampleError, Target, read, target
from edgefl.data.sounds import read_sound, read_wav
from edgefl.errors import DataError, MissingDependencyError
from edgefl.models.spec import EncoderSpec

TONE = (0.4 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)).astype(np.float32)  # one second at 16 kHz


@pytest.fixture
def bare(monkeypatch):
    """A device without soundfile."""
    monkeypatch.setitem(sys.modules, "soundfile", None)


def write_wav(path, samples, rate=8000, width=2, channels=1):
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(samples.tobytes())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.wav", {"subtype": "FLOAT"}),
        ("a.wav", {"subtype": "PCM_24"}),
        ("a.wav", {"format": "WAVEX", "subtype": "PCM_16"}),
        ("a.flac", {}),
        ("a.aiff", {}),
        ("a.ogg", {}),
        ("a.opus", {"format": "OGG", "subtype": "OPUS"}),
        ("a.mp3", {}),
        ("wrong.wav", {"format": "MP3"}),
    ],
)
def test_a_tone_sounds_the_same_in_every_format(tmp_path, name, options):
    soundfile.write(tmp_path / name, np.stack([TONE, TONE], axis=1), 16000, **options)
    samples, rate = read_sound(tmp_path / name)
    assert (rate, samples.dtype) == (16000 if "opus" not in name else rate, np.float32)
    assert len(samples) / rate == pytest.approx(1, abs=0.1)
    assert np.abs(read(tmp_path, name, Target("audio", (61, 40))) - log_mel(TONE, 16000, 40, 61)).mean() < 0.06
    assert raw_samples({"voice": tmp_path / name}, {"voice": EncoderSpec(kind="audio", input_shape=(61, 40))})


def test_a_length_that_a_pipe_could_not_know_is_that_of_the_file(tmp_path):
    write_wav(tmp_path / "a.wav", (TONE * 32767).astype("<i2"), rate=16000)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[40:44] = struct.pack("<I", 2**32 - 1)
    (tmp_path / "a.wav").write_bytes(data)
    assert len(read_sound(tmp_path / "a.wav")[0]) == len(read_wav(tmp_path / "a.wav")[0]) == 16000


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
def test_a_tone_above_the_bands_does_not_fold_into_them(rate):
    """Bands end at 4 kHz; of two tones only the lower one may be heard, at whatever rate it is sampled."""
    time = np.arange(rate) / rate
    low = np.sin(2 * np.pi * 1000 * time)
    both = low + (0 if rate == 8000 else 1) * np.sin(2 * np.pi * 7000 * time)
    plain = log_mel(np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000).astype(np.float32), 16000, 40, 61)
    assert np.abs(log_mel(both.astype(np.float32), rate, 40, 61) - plain).mean() < 0.05


@pytest.mark.usefixtures("bare")
def test_without_soundfile_other_sounds_name_the_extra(tmp_path):
    (tmp_path / "a.mp3").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match="soundfile") as raised:
        read_sound(tmp_path / "a.mp3")
    assert "edgefl-toolkit[sound]" in raised.value.remedy
    write_wav(tmp_path / "w24.wav", np.zeros(30, np.uint8), width=3)
    with pytest.raises(DataError, match=r"24 bit; other kinds need the package 'soundfile'.*\[sound\]"):
        read_sound(tmp_path / "w24.wav")


def test_a_plain_wav_gives_the_same_samples_without_soundfile(tmp_path, monkeypatch):
    noise = np.random.default_rng(0)
    for width, kind in ((1, np.uint8), (2, "<i2"), (4, "<i4")):
        limits = np.iinfo(kind)
        values = noise.integers(limits.min, limits.max, 4000, np.dtype(kind), endpoint=True)
        write_wav(tmp_path / f"{width}.wav", values, width=width, channels=2)
    found = {width: read_sound(tmp_path / f"{width}.wav") for width in (1, 2, 4)}
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for width, (samples, rate) in found.items():
        again, same = read_sound(tmp_path / f"{width}.wav")
        assert rate == same == 8000
        np.testing.assert_array_equal(again, samples)


def test_infinite_samples_are_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.array([0, np.inf, np.nan] * 999, np.float32), 8000, subtype="FLOAT")
    with pytest.raises(SampleError, match="not finite"):
        read(tmp_path, "a.wav", Target("audio"))


def test_floats_of_16_bit_are_refused_by_name(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(999, np.float32), 8000, subtype="FLOAT")
    data = bytearray((tmp_path / "a.wav").read_bytes())
    at = data.find(b"fmt ") + 8
    data[at + 14 : at + 16] = (16).to_bytes(2, "little")
    data[at + 12 : at + 14] = (2).to_bytes(2, "little")
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(SampleError, match="floating-point numbers of 16 bit, which are not read; save it in 32 bit"):
        read(tmp_path, "a.wav", Target("audio"))


def test_wav_widths_and_channels_agree(tmp_path):
    wave16 = (np.sin(np.arange(4000) / 5) * 32000).astype("<i2")
    write_wav(tmp_path / "a.wav", wave16)
    write_wav(tmp_path / "b.wav", wave16.astype("<i4") * 65536, width=4)
    write_wav(tmp_path / "c.wav", np.repeat(wave16, 2), channels=2)
    write_wav(tmp_path / "d.wav", (wave16 // 256 + 128).astype(np.uint8), width=1)
    samples, rate = read_sound(tmp_path / "a.wav")
    assert rate == 8000
    assert np.allclose(read_sound(tmp_path / "b.wav")[0], samples, atol=1e-4)
    assert np.allclose(read_sound(tmp_path / "c.wav")[0], samples)
    assert np.allclose(read_sound(tmp_path / "d.wav")[0], samples, atol=1 / 128)
    assert read(tmp_path, "a.wav", Target("audio", (61, 40))).shape == (61, 40)


def test_bad_sounds(tmp_path, monkeypatch):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    write_wav(tmp_path / "slow.wav", np.zeros(10, "<i2"), rate=4000)
    write_wav(tmp_path / "none.wav", np.zeros(0, "<i2"))
    write_wav(tmp_path / "long.wav", np.zeros(10001, "<i2"))
    (tmp_path / "text.wav").write_bytes(b"no sound at all" * 9)
    monkeypatch.setattr("edgefl.data.sounds.MAX_CLIP_S", 1.0)
    for name, message in [
        ("a", "not a readable"),
        ("slow", "at least 8000 Hz"),
        ("none", "empty"),
        ("long", r"long.wav: lasts 1.3 s, and at most 1 s are taken; cut it into shorter files"),
        ("text", "not a readable sound: Format not recognised"),
    ]:
        with pytest.raises(SampleError, match=message):
            read(tmp_path, f"{name}.wav", Target("audio"))
    with pytest.raises(DataError, match=r"lasts 1.3 s"):
        read_wav(tmp_path / "long.wav")
    pretrained = target(EncoderSpec(kind="audio", input_shape=(61, 40), pretrained="some/ast"))
    with pytest.raises(SampleError, match="feature extractor"):
        read(tmp_path, "long.wav", pretrained)


def test_a_thousand_channels_are_unpacked_a_block_at_a_time(tmp_path, monkeypatch):
    """What is read at a time is bounded by values, not by frames."""
    monkeypatch.setattr("edgefl.data.sounds._BLOCK", 1000)
    soundfile.write(tmp_path / "a.wav", np.tile(TONE[:500, None], 300), 16000)
    taken, read_block = [], soundfile.SoundFile.read

    def counted(self, frames, **options):
        block = read_block(self, frames, **options)
        taken.append(block.size)
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    samples, _ = read_sound(tmp_path / "a.wav")
    np.testing.assert_allclose(samples, TONE[:500], atol=1e-4)
    assert max(taken) <= 1000


@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_a_tone_above_the_bands_is_not_heard_in_them(rate):
    """Not as one that folds back, 2 kHz of 6 kHz at 8 kHz, nor as what its window leaks, made as loud as can be."""
    moments = np.arange(rate) / rate
    high = (0.3 * np.sin(2 * np.pi * 6000 * moments)).astype(np.float32)
    high = np.round(high * 32768) / np.float32(32768)
    assert log_mel(high, rate, 40).max() == 0
    low = (0.3 * np.sin(2 * np.pi * 1000 * moments)).astype(np.float32)
    assert np.abs(log_mel(low + high, rate, 40) - log_mel(low, rate, 40)).max() < 0.1
    assert log_mel(low, rate, 40).max() == 1


def test_a_clip_whose_channels_cancel_out_is_silent(tmp_path, bare_or_not):
    """Half a per cent of one channel is left of two: 46 dB below, not a picture of what rounding left."""
    both = np.stack([TONE, -0.995 * TONE], axis=1)
    write_wav(tmp_path / "a.wav", (both * 32767).astype("<i2"), 16000, channels=2)
    write_wav(tmp_path / "b.wav", (np.stack([TONE, -0.9 * TONE], axis=1) * 32767).astype("<i2"), 16000, channels=2)
    levels = [read(tmp_path, name, Target("audio")).max() for name in ("a.wav", "b.wav")]
    assert levels == [0, 1]


@pytest.fixture(params=[True, False])
def bare_or_not(request, monkeypatch):
    """With soundfile, and without."""
    if request.param:
        monkeypatch.setitem(sys.modules, "soundfile", None)

"""Readers: each kind of file, and each way it can be bad."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from edgefl.data.log_mel import log_mel, mel_bank
from edgefl.data.readers import READERS, SampleError, Target, guess, inside, read, target
from edgefl.data.tokens import SPARE_ROWS, bag, hashed, tokenizer
from edgefl.errors import DataError, MissingDependencyError, ModelError
from edgefl.models.spec import EncoderSpec

SENSOR = Target("sensor", (2, 3))


def test_sensor_from_list_csv_and_npy_agree(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6.5]]
    (tmp_path / "a.csv").write_text("x,y,z\n1,2,3\n\n4,5,6.5\n")
    np.save(tmp_path / "a.npy", np.array(rows))
    for value in (rows, "a.csv", "a.npy"):
        array = read(tmp_path, value, SENSOR)
        assert array.dtype == np.float32
        assert array.tolist() == rows
    assert read(tmp_path, [1, 2, 3], Target("sensor")).shape == (3, 1)  # one channel


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2, 3]], r"shape \[1, 3\], the encoder takes \[2, 3\]"),
        ([[1, 2, 3], [4, 5]], "differ in length"),
        ([[1, 2, 3], [4, 5, 1e300]], "not finite"),
        ([[1, 2, 3], [4, 5, "x"]], "not numbers"),
        ([[1, 2, 3], [4, 5, 10**30]], "not numbers"),
        ([], "shape"),
        (3, "a path is expected, not int"),
        ("none.npy", "no such file"),
        ("../secret.npy", "out of the data set's folder"),
        ("/etc/passwd", "out of the data set's folder"),
        ("link.npy", "out of the data set's folder"),
        ("folder", "is not a file"),
        ("pipe.npy", "is not a file"),
        ("a\0b.npy", "cannot be opened"),
        ("loop.npy", "cannot be opened|no such file"),
        ("bad.npy", r"not a readable \.npy"),
        ("object.npy", "not accepted"),
        ("nan.npy", "absent values in 2 of 2"),
        ("words.csv", "row 2 is not a row of numbers"),
        ("ragged.csv", "row 2 has 2 values, the rows above 3"),
        ("empty.csv", "shape"),
        ("binary.csv", "is no text"),
        ("picture.png", r"read from \.npy, \.csv"),
    ],
)
def test_bad_sensor_values_say_what_is_wrong(tmp_path, value, message):
    root = tmp_path / "data"
    (root / "folder").mkdir(parents=True)
    np.save(tmp_path / "secret.npy", np.ones((2, 3)))
    (root / "link.npy").symlink_to(tmp_path / "secret.npy")
    (root / "loop.npy").symlink_to(root / "loop.npy")
    os.mkfifo(root / "pipe.npy")
    (root / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00 and then nonsense")
    np.save(root / "object.npy", np.array([None]), allow_pickle=True)
    np.save(root / "nan.npy", np.full((2, 3), np.nan))
    (root / "words.csv").write_text("1,2,3\n4,five,6\n")
    (root / "ragged.csv").write_text("1,2,3\n4,5\n")
    (root / "empty.csv").write_text("x,y,z\n")
    (root / "binary.csv").write_bytes(b"\xff\x01\x02")
    (root / "picture.png").write_bytes(b"")
    with pytest.raises(SampleError, match=message):
        read(root, value, SENSOR)


def test_limits_on_files(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    with pytest.raises(SampleError, match="more than the limit of 10"):
        inside(tmp_path, "a.npy", limit=10)
    monkeypatch.setattr("edgefl.data.pictures.MAX_PIXELS", 3)
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(SampleError, match="2 x 2 pixels are too many"):
        read(tmp_path, "a.png", Target("vision"))


def test_pictures_come_in_0_to_1_on_white_at_the_encoders_size(tmp_path):
    Image.new("RGB", (8, 8), (255, 0, 51)).save(tmp_path / "a.png")
    array = read(tmp_path, "a.png", Target("vision", (4, 2, 3)))
    assert array.shape == (4, 2, 3)
    assert np.allclose(array, [1.0, 0.0, 0.2])
    Image.new("RGBA", (3, 3), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read(tmp_path, "clear.png", Target("vision")) == 1).all()
    Image.new("L", (3, 3), 51).save(tmp_path / "grey.png")
    assert read(tmp_path, "grey.png", Target("vision")).shape == (3, 3, 1)
    assert read(tmp_path, "grey.png", Target("vision", (3, 3, 3))).shape == (3, 3, 3)
    np.save(tmp_path / "a.npy", np.full((4, 4), 255, dtype=np.uint8))
    assert (read(tmp_path, "a.npy", Target("vision", (4, 4, 1))) == 1).all()


def test_bad_pictures(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff nonsense")
    with pytest.raises(SampleError, match=r"a\.jpg: no picture of a format that is read"):
        read(tmp_path, "a.jpg", Target("vision"))
    Image.new("RGB", (64, 64)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:60])
    with pytest.raises(SampleError, match="not a readable picture"):
        read(tmp_path, "cut.png", Target("vision"))
    np.save(tmp_path / "b.npy", np.full((2, 2, 3), 200.0))
    with pytest.raises(SampleError, match="pixels from 200 to 200"):
        read(tmp_path, "b.npy", Target("vision"))


def test_missing_pillow_names_the_extra(tmp_path, monkeypatch):
    Image.new("L", (3, 3)).save(tmp_path / "a.png")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match="pillow"):
        read(tmp_path, "a.png", Target("vision"))


def test_log_mel_of_a_tone():
    """One second at 8 kHz: (8000 - 256) / 128 + 1 = 61 frames; a 1 kHz tone peaks in the band around 1 kHz."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000).astype(np.float32)
    spectrum = log_mel(tone, 8000, 40)
    assert spectrum.shape == (61, 40)
    mel = np.linspace(2595 * np.log10(1 + 50 / 700), 2595 * np.log10(1 + 4000 / 700), 42)
    centres = 700 * (10 ** (mel[1:-1] / 2595) - 1)
    assert abs(centres[spectrum.mean(axis=0).argmax()] - 1000) < 70  # half a band's width
    assert spectrum.max() == 1
    assert spectrum.min() >= 0
    # A quarter of the amplitude is 12.04 dB less: 1 - 12.04 / 80 against a louder second half.
    both = log_mel(np.concatenate([tone / 4, tone]), 8000, 40)
    assert both[10].max() == pytest.approx(1 - 12.04 / 80, abs=1e-3)


def test_log_mel_cuts_pads_and_bears_silence():
    tone = np.ones(300, dtype=np.float32)
    assert log_mel(tone, 8000, 8, 5).shape == (5, 8)
    assert (log_mel(tone, 8000, 8, 5)[2:] == 0).all()
    assert log_mel(np.ones(90_000, dtype=np.float32), 8000, 8, 5).shape == (5, 8)
    assert (log_mel(np.zeros(8000, dtype=np.float32), 8000, 8) == 0).all()


@pytest.mark.parametrize(("rate", "bands"), [(8000, 40), (16000, 40), (44100, 128)])
def test_every_mel_band_holds_a_bin(rate, bands):
    assert (mel_bank(rate, bands, round(rate * 0.032)).sum(axis=0) > 0).all()


def test_a_bag_holds_words_then_their_n_grams():
    # <cat> has 3 grams of three, 2 of four and 1 of five letters; what is over is cut, what is short is padded.
    ids = bag("Cat cat!", 20, 1000)
    grams = ["cat", "cat", "!", *2 * ["<ca", "cat", "at>", "<cat", "cat>", "<cat>"], "<!>"]
    assert ids.tolist() == [2 + zlib.crc32(gram.encode()) % 998 for gram in grams] + [0] * 4
    assert bag("Cat cat!", 2, 1000).tolist() == ids[:2].tolist()
    shared = set(bag("running", 64).tolist()) & set(bag("runner", 64).tolist()) - {0}
    assert len(shared) == 6  # <ru run unn <run runn <runn


def test_scripts_without_blanks_share_characters_in_a_bag():
    # 東京 and 東: the character, which is a word of its own there
    assert set(bag("東", 8).tolist()) - {0} <= set(bag("東京都", 32).tolist())


def test_hashed_tokens_by_hand():
    ids = hashed("Red, red!", 6, 100)
    red, comma, mark = (2 + zlib.crc32(word) % 98 for word in (b"red", b",", b"!"))
    assert ids.tolist() == [1, red, comma, red, mark, 0]
    assert hashed("one two three four", 3).tolist() == hashed("one two", 3).tolist()
    assert hashed("日本 ünder", 8).max() < 8192
    with pytest.raises(DataError, match="no room for words"):
        hashed("a", 4, 2)


def test_text_inline_and_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("a red house")
    np.save(tmp_path / "a.npy", np.array([1, 5, 7], dtype=np.uint16))
    to = target(EncoderSpec(kind="text", input_shape=(5,), vocabulary=50))
    assert read(tmp_path, "a.txt", to).tolist() == read(tmp_path, "a red house", to).tolist()
    assert read(tmp_path, "a.npy", to).tolist() == [1, 5, 7, 0, 0]
    assert read(tmp_path, "see the file a.txt", to).tolist() == hashed("see the file a.txt", 5, 50).tolist()
    np.save(tmp_path / "a.npy", np.array([1, 50]))
    for value, message in [("a.npy", "valid: 0 to 49"), ("b.txt", "no such file"), (" ", "empty"), (7, "not int")]:
        with pytest.raises(SampleError, match=message):
            read(tmp_path, value, to)


def test_tokenizer_of_a_checkpoint(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "house"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    (tmp_path / "config.json").write_text('{"model_type": "distilbert"}')
    for known in (0, 7, 7 + SPARE_ROWS - 1):
        encode = tokenizer(known, str(tmp_path))
        assert encode("Red house sky", 7).tolist() == [2, 5, 6, 1, 3, 0, 0]
    for known in (6, 7 + SPARE_ROWS):
        with pytest.raises(DataError, match=f"has 7 token ids, the encoder {known}"):
            tokenizer(known, str(tmp_path))
    with pytest.raises(ModelError, match="there is no such folder"):
        tokenizer(0, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.txt", None, "knows no words"),  # transformers gives every word the same id
        ("vocab.txt", b"", "knows no words"),
        ("vocab.txt", b"[PAD]\nred\n", r"has \d token ids, the encoder 300"),
        ("vocab.txt", b"\xff\x00" * 9, "Exception: Error while initializing WordPiece"),
        ("tokenizer.json", b"", "no tokenizer that can be read: JSONDecodeError"),
        ("tokenizer.json", b"{}", "no tokenizer that can be read"),
        ("tokenizer_config.json", b"{", "no tokenizer that can be read: JSONDecodeError"),
        ("config.json", b"{", "not a valid JSON file"),
        ("config.json", None, "no tokenizer that can be read"),
    ],
)
def test_a_tokenizer_with_a_file_missing_or_damaged_is_refused(tmp_path, file, content, message):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(295))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert tokenizer(300, str(tmp_path))("w0", 4).tolist() == [2, 5, 3, 0]
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        tokenizer(300, str(tmp_path))
    assert str(tmp_path) in refused.value.message
    assert "as they were published" in refused.value.remedy


def test_guessing_a_kind():
    assert [guess(v).kind for v in ("a/b.NPY", [1], "c.jpg", "d.wav", "two words", "e.txt")] == [
        "sensor",
        "sensor",
        "vision",
        "audio",
        "text",
        "text",
    ]
    assert guess({"mass": 1}).kind == "table"
    with pytest.raises(SampleError, match="not int"):
        guess(3)


def test_every_kind_of_encoder_has_a_reader():
    for kind in ("sensor", "vision", "text", "audio", "table"):
        assert target(EncoderSpec(kind=kind)).kind in READERS
    with pytest.raises(DataError, match="valid: sensor, vision, audio, text"):
        target(EncoderSpec(kind="smell"))  # type: ignore[arg-type]  # a wrong kind is what is tested


@pytest.mark.parametrize("size", [(12, 4), (4, 12)])
def test_the_middle_of_a_picture_is_cut_out_or_all_of_it_stretched(tmp_path, size):
    """Three squares of 4 pixels in a row, or one below the other: 10, 100, 200. The middle is 100 alone."""
    squares = np.repeat(np.repeat(np.array([[10, 100, 200]], np.uint8), 4, axis=1), 4, axis=0)
    Image.fromarray(squares if size == (12, 4) else squares.T).save(tmp_path / "a.png")
    middle = read(tmp_path, "a.png", Target("vision", (4, 4, 1), crop="center"))
    assert np.allclose(middle, 100 / 255)
    larger = read(tmp_path, "a.png", Target("vision", (8, 8, 1), crop="center"))
    assert np.allclose(larger[2:-2, 2:-2], 100 / 255)  # what lies beside it shows in the outermost pixels
    stretched = read(tmp_path, "a.png", Target("vision", (4, 4, 1)))
    assert stretched.min() < 60 / 255
    assert stretched.max() > 150 / 255


def test_a_sound_has_the_frames_and_bands_that_are_asked_for(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.arange(8000, dtype=np.int16), 8000)
    shapes = [read(tmp_path, "a.wav", Target("audio", shape)).shape for shape in ((0, 16), (30, 0), (90, 16), ())]
    assert shapes == [(61, 16), (30, 40), (90, 16), (61, 40)]

"""Text to token ids: a hashed word tokenizer that needs no vocabulary file, or the tokenizer of a checkpoint.

Hashed: lower-case words and single punctuation marks; id 0 pads, 1 starts every text, 2.. are
``2 + crc32(word) mod (vocabulary - 2)``. Every device computes the same ids without having met. With the default
vocabulary of 8192 and 2000 distinct words, about one word in five shares its id with another.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.errors import DataError, MissingDependencyError
from edgefl.storage.checkpoint_paths import is_own, located

Ids = npt.NDArray[np.int64]
Tokenizer = Callable[[str, int], Ids]

DEFAULT_VOCABULARY = 8192
DEFAULT_LENGTH = 32
PADDING, START = 0, 1
#: Rows that a checkpoint's table has beyond its tokens at most: some are padded to a multiple of 64 or 128. A tokenizer
#: that lacks more was cut short, or belongs to another checkpoint.
SPARE_ROWS = 128
_WORD = re.compile(r"\w+|[^\w\s]")


def hashed(text: str, length: int, vocabulary: int = DEFAULT_VOCABULARY) -> Ids:
    """[length] token ids, cut or padded with 0. ``vocabulary`` counts all ids, padding and start included."""
    if vocabulary < 3:
        raise DataError(
            f"a vocabulary of {vocabulary} has no room for words", remedy="Set vocabulary to 3 or more; 8192 is usual."
        )
    words = _WORD.findall(text.lower())[: length - 1]
    ids = np.full(length, PADDING, dtype=np.int64)
    ids[0] = START
    ids[1 : 1 + len(words)] = [2 + zlib.crc32(word.encode()) % (vocabulary - 2) for word in words]
    return ids


#: Lengths of n-grams, of letters and of characters in scripts without blanks.
_LETTERS, _SIGNS = (3, 4, 5), (1, 2, 3)
#: The first character of such a script (CJK radicals; what comes before is written with blanks).
_FIRST_SIGN = "\u2e80"


def bag(text: str, length: int, vocabulary: int = DEFAULT_VOCABULARY) -> Ids:
    """[length] ids of words and their n-grams, cut or padded with 0 (arXiv 1607.04606); words come first.

    A word's n-grams have 3 to 5 letters, its ends marked by < and >; of scripts without blanks 1 to 3 characters.
    """
    words = _WORD.findall(text.lower())[:length]
    grams = words + [gram for word in words for gram in _grams(word)]
    ids = np.full(length, PADDING, dtype=np.int64)
    kept = grams[:length]
    ids[: len(kept)] = [2 + zlib.crc32(gram.encode()) % (vocabulary - 2) for gram in kept]
    return ids


def _grams(word: str) -> Iterator[str]:
    signs = max(word) >= _FIRST_SIGN
    marked = word if signs else f"<{word}>"
    for n in _SIGNS if signs else _LETTERS:
        yield from (marked[i : i + n] for i in range(len(marked) - n + 1))


_WHOLE = "Give a folder with the tokenizer's files as they were published (tokenizer.json, or vocab.txt)"


def _check_tokens(pretrained: str, tokens: Mapping[str, int], special: int, vocabulary: int) -> None:
    """Raise DataError for a tokenizer without words, which takes every text for the same, or for another table's."""
    if len(tokens) <= special:
        raise DataError(
            f"the tokenizer of {pretrained!r} knows no words: its tokenizer.json or vocab.txt is missing or empty",
            remedy=f"{_WHOLE}.",
        )
    count = max(tokens.values()) + 1
    if vocabulary and not 0 <= vocabulary - count < SPARE_ROWS:
        raise DataError(
            f"the tokenizer of {pretrained!r} has {count} token ids, the encoder {vocabulary}",
            remedy=f"{_WHOLE}: these are of another checkpoint, or cut short.",
        )


def _published(pretrained: str, vocabulary: int) -> Any:
    """A checkpoint's tokenizer, as `transformers` reads it. Raises as :func:`tokenizer`."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependencyError("transformers", "train") from None
    place = located(pretrained)
    try:
        own = AutoTokenizer.from_pretrained(place, **({"local_files_only": True} if Path(place).is_dir() else {}))
    except Exception as error:  # of a damaged file the package tokenizers raises Exception itself
        told = str(error).strip().splitlines() or [""]
        raise DataError(
            f"the checkpoint {pretrained!r} has no tokenizer that can be read: {type(error).__name__}: {told[0]}",
            remedy=f"{_WHOLE}, or a name that can be downloaded or is cached.",
        ) from None
    _check_tokens(pretrained, own.get_vocab(), len(own.all_special_ids), vocabulary)
    return own


#: A tokenizer's own file, which a bundle has beside its model; read without `transformers`.
FILE_ENDING = "tokenizer.json"


def tokenizer_file(pretrained: str, vocabulary: int) -> bytes:
    """A checkpoint's tokenizer as one file, without lengths. Raises as :func:`tokenizer`."""
    own = _published(pretrained, vocabulary)
    backend = getattr(own, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"the tokenizer of {pretrained!r} is written in Python, and cannot be kept as one file",
            remedy="Give a checkpoint with a tokenizer.json.",
        )
    values = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    return json.dumps(values, ensure_ascii=False).encode()


def _from_file(path: Path, vocabulary: int, padding: int) -> Tokenizer:
    """The tokenizer of a bundle. Raises DataError for a damaged file, MissingDependencyError without tokenizers."""
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise MissingDependencyError("tokenizers", "serve") from None
    try:
        text = path.read_text(encoding="utf-8")
        count = Backend.from_str(text).get_vocab_size()
    except Exception as error:  # of a damaged file the package raises Exception itself
        raise DataError(
            f"{path} holds no tokenizer that can be read: {error}", remedy="Copy the bundle's folder again."
        ) from None
    if vocabulary and count > vocabulary:
        raise DataError(
            f"{path} has {count} token ids, the encoder {vocabulary}", remedy="Copy the bundle's folder again."
        )

    @cache
    def cut(length: int) -> Any:
        backend = Backend.from_str(text)
        backend.enable_truncation(length)
        backend.enable_padding(pad_id=padding, length=length)
        return backend

    return lambda text, length: swapped(np.asarray(cut(length).encode(text).ids, dtype=np.int64), padding)


def padding_id(config: str) -> int:
    """The id that a library's configuration (JSON) pads with; 0 for "", of encoders of our own."""
    return int(json.loads(config).get("pad_token_id") or 0) if config else PADDING


def swapped(ids: Ids, padding: int) -> Ids:
    """Ids in which 0 and a checkpoint's own padding have changed places, so that 0 always pads."""
    return np.where(ids == padding, PADDING, np.where(ids == PADDING, padding, ids)) if padding else ids


def tokenizer(vocabulary: int = 0, pretrained: str = "", arch: str = "", config: str = "") -> Tokenizer:
    """(text, length) -> [length] ids: ``pretrained``'s own tokenizer, or hashed words when it is "" or an own file.

    Hashed n-grams as well for the arch bag. ``config``: the library's, of an encoder of its own modules.

    ``vocabulary``: ids that the encoder knows; 0: not known. Raises DataError when the checkpoint has no usable
    tokenizer, ModelError when its package or folder is not there, MissingDependencyError without transformers.
    """
    if pretrained.endswith(FILE_ENDING):
        return _from_file(Path(pretrained), vocabulary, padding_id(config))
    if not pretrained or is_own(pretrained):
        size = vocabulary or DEFAULT_VOCABULARY
        split = bag if arch == "bag" else hashed
        return lambda text, length: split(text, length, size)
    own, padding = _published(pretrained, vocabulary), padding_id(config)
    if own.pad_token_id != padding:
        raise DataError(
            f"the tokenizer of {pretrained!r} pads with id {own.pad_token_id}, the encoder with {padding}",
            remedy=f"{_WHOLE}: these are of another checkpoint.",
        )

    def encode(text: str, length: int) -> Ids:
        ids = own(text, truncation=True, padding="max_length", max_length=length)["input_ids"]
        return swapped(np.asarray(ids, dtype=np.int64), padding)

    return encode

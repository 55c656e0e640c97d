"""Inputs that are nearly right: a valid one is taken apart, some of its values become hostile, and it is put together.

Bytes alone rarely get past a checksum or a header. Hypothesis and the coverage-guided fuzzer both use this; ``rng``
decides everything, so that an input can be made again.
"""

from __future__ import annotations

import io
import json
import lzma
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

Tree = Any
#: The edges of every integer type, and what sizes and counts are lied about with.
INTEGERS = (0, 1, -1, 2, 7, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**48, 2**63 - 1, 2**63, 2**64 - 1)
HOSTILE: tuple[Any, ...] = (
    *INTEGERS,
    *(-number for number in INTEGERS[7:]),
    *(10**30, float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 1e-320, 0.5),
    *("", "\0", "../../x", "/dev/zero", "a" * 300, "é\u202e", "\ud800", "1e999", "NaN", "|", "a/b", "\n"),
    *(None, True, False, [], {}, [[]], {"": ""}, [0] * 40, b"", b"\xff" * 9),
)
#: Words that mean something to a text decoder.
WORDS = (
    *(
        "&a ",
        "*a",
        "<<: *a",
        "!!int ",
        "!!float ",
        "!!binary ",
        "!!timestamp ",
        "? ",
        "- ",
        ": ",
        "|\n",
        ">-\n",
        "---\n",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\ud800",
        "\\0",
        "\0",
        "0x",
        "1:2:3",
        "1e",
        ".inf",
        ".nan",
        "null",
        "~",
        "\t",
        "\r",
    ),
    *(",", "\n", "#", "@", "%", "9" * 70, "true", "-", "\u2028", "\ufeff", "2001-01-01", "1_000", "é"),
)


def mutated(data: bytes, form: str, rng: random.Random) -> bytes:
    """``data`` with one to four things wrong. Falls back to bytes when it is not of this form."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        way = FORMS[form] if rng.random() < 0.8 else _bytes
        try:
            data = way(data, rng)
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            struct.error,
            zipfile.BadZipFile,
            RecursionError,
            EOFError,
        ):
            data = _bytes(data, rng)
        except (msgspec.MsgspecError, OverflowError, zlib.error, lzma.LZMAError, NotImplementedError):
            data = _bytes(data, rng)
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    out, at = bytearray(data), rng.randrange(len(data) + 1)
    size = rng.choice((1, 1, 2, 4, 8, 30))
    match rng.randrange(6):
        case 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        case 1:
            out[at : at + size] = b""
        case 2:
            out[at:at] = rng.randbytes(size)
        case 3:
            out[at:at] = out[(start := rng.randrange(len(out) + 1)) : start + size]
        case 4:
            number = rng.choice(INTEGERS) & (2**64 - 1)
            out[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
        case _:
            del out[at:]
    return bytes(out)


def _text(data: bytes, rng: random.Random) -> bytes:
    places = [0, *(i for i, one in enumerate(data) if one in b" \n:,[{\"'"), len(data)]
    at = rng.choice(places)
    if rng.random() < 0.3:
        lines = data.split(b"\n")
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
        return b"\n".join(lines)
    end = at + rng.choice((0, 0, 1, 5))
    return data[:at] + rng.choice(WORDS).encode("utf-8", "surrogatepass") + data[end:]


def _nodes(tree: Tree) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside, of containers that can be changed."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            todo.append(one[key])
    return found


def _tree(tree: Tree, rng: random.Random) -> Tree:
    nodes = _nodes(tree)
    if not nodes:
        return rng.choice(HOSTILE)
    container, key = rng.choice(nodes)
    value = container[key]
    match rng.randrange(7):
        case 0 | 1 | 2:
            container[key] = rng.choice(HOSTILE)
        case 3:
            del container[key]
        case 4:
            other, place = rng.choice(nodes)
            container[key] = json.loads(json.dumps(other[place], default=str)) if place in _keys(other) else value
        case 5:
            for _ in range(rng.choice((1, 3, 40))):
                value = [value] if rng.random() < 0.5 else {"x": value}
            container[key] = value
        case _:
            new = rng.choice([*HOSTILE, *_keys(container)])
            if isinstance(container, list):
                container.append(new)
            else:
                container[new if isinstance(new, str) else str(new)] = value
    return tree


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def _json(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(_tree(json.loads(data), rng), default=repr).encode()


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json(lines[at], rng) if rng.random() < 0.7 else _text(lines[at], rng)
    return b"\n".join(lines)


def _msgpack(data: bytes, rng: random.Random) -> bytes:
    tree = _tree(msgspec.msgpack.decode(data), rng)
    try:
        return msgspec.msgpack.encode(tree)
    except (UnicodeEncodeError, OverflowError):  # what MessagePack has no form for
        return data


def _frames(data: bytes, rng: random.Random) -> bytes:
    """Frames of a worker: lengths (4) and MessagePack."""
    (length,) = struct.unpack_from(">I", data)
    first = _msgpack(data[4 : 4 + length], rng)
    return struct.pack(">I", len(first)) + first + data[4 + length :]


def _chunk(data: bytes, rng: random.Random) -> bytes:
    """A chunk with a checksum that is right for what is wrong."""
    wrong = _bytes(data, rng)
    head, body = wrong[:44], wrong[52:]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body


def _part(data: bytes, rng: random.Random) -> bytes:
    """A safetensors part with a header that is JSON."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.3:
        body = _bytes(body, rng)
    else:
        header = _json(header, rng) if rng.random() < 0.8 else _text(header, rng)
    return len(header).to_bytes(8, "little") + header + body


def _npy(data: bytes, rng: random.Random) -> bytes:
    """A .npy whose header has the length it says."""
    (length,) = struct.unpack_from("<H", data, 8)
    header, body = data[10 : 10 + length], data[10 + length :]
    if rng.random() < 0.2:
        return data[: 10 + length] + _bytes(body, rng)
    words = (
        b"-1",
        b"0",
        b"4294967296",
        b"1e3",
        b"(",
        b")",
        b",",
        b"'<U0'",
        b"'|O'",
        b"'<M8[s]'",
        b"True",
        b"'",
        b"()",
        b"[]",
    )
    places = [i for i, one in enumerate(header) if one in b" ',(:"]
    at = rng.choice(places)
    header = header[:at] + rng.choice(words) + header[at + rng.choice((0, 0, 3)) :]
    return data[:8] + struct.pack("<H", len(header)) + header + body


def _zip(data: bytes, rng: random.Random) -> bytes:
    """A .npz with a wrong array inside, packed in any way."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    members[name] = _npy(members[name], rng) if rng.random() < 0.7 else members[rng.choice(list(members))]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))) as archive:
        for one, content in members.items():
            archive.writestr(
                rng.choice(("label", "ids", "acc.present")) + ".npy" if rng.random() < 0.1 else one, content
            )
    return out.getvalue()


def _behind_one(way: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """The first byte chooses something, the rest is the input."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        first = bytes([rng.randrange(256)]) if rng.random() < 0.2 else data[:1]
        return first + way(data[1:], rng)

    return mutate


FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": _bytes,
    "text": _text,
    "json": _json,
    "json lines": _lines,
    "msgpack": _msgpack,
    "frames": _frames,
    "chunk": _chunk,
    "part": _part,
    "npy": _npy,
    "zip": _zip,
}
FORMS |= {f"1+{name}": _behind_one(way) for name, way in list(FORMS.items())}

"""Instances of structs with something in every field: never the default; it follows from the name on the wire."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from msgspec import inspect as kinds

#: Fields of a model that hold the names of methods.
_METHODS = {"encoder_sharing": "multiway", "fusion": "mean"}


def filled(kind: Any) -> Any:
    """A struct with something in every field, two entries in every mapping and tuple."""
    return _of(kinds.type_info(kind), kind.__name__)


def _of(kind: kinds.Type, path: str) -> Any:
    number = zlib.crc32(path.encode()) % 1000 + 2
    if isinstance(kind, kinds.StructType | kinds.NamedTupleType):
        return kind.cls(**{field.name: _field(field, path) for field in kind.fields})
    if isinstance(kind, kinds.UnionType):
        return _of(next(one for one in kind.types if not isinstance(one, kinds.NoneType)), path)
    if isinstance(kind, kinds.DictType):
        return {_of(kind.key_type, f"{path}.{n}"): _of(kind.value_type, f"{path}.{n}") for n in "ab"}
    if isinstance(kind, kinds.TupleType):
        return tuple(_of(one, f"{path}.{n}") for n, one in enumerate(kind.item_types))
    if isinstance(kind, kinds.EnumType):
        return max(kind.cls, key=lambda member: member.value)
    if isinstance(kind, kinds.VarTupleType | kinds.CollectionType | kinds.FrozenSetType):
        made = frozenset if isinstance(kind, kinds.FrozenSetType) else tuple
        return made(_of(kind.item_type, f"{path}.{n}") for n in "ab")
    simple: dict[type[kinds.Type], Any] = {
        kinds.StrType: path.rpartition(".")[2] + f"-{number}",
        kinds.IntType: number,
        kinds.FloatType: number + 0.25,
        kinds.BytesType: path.encode(),
        kinds.BoolType: True,
        kinds.AnyType: {"any": [number, "text", None]},
        kinds.CustomType: {"any": [number, "text", None]},  # object
    }
    return kind.values[-1] if isinstance(kind, kinds.LiteralType) else simple[type(kind)]


def _field(field: kinds.Field, path: str) -> Any:
    if isinstance(field.type, kinds.BoolType):
        return field.default is not True
    if field.encode_name in _METHODS:
        return _METHODS[field.encode_name]
    if (field.encode_name, field.default) == ("kind", "sensor"):
        return "vision"  # of an encoder: a name that is installed
    found = _of(field.type, f"{path}.{field.encode_name}")
    if isinstance(field.type, kinds.LiteralType) and found == field.default:
        return field.type.values[0]
    assert found != field.default, f"{path}.{field.name} is as by default"
    return found


def kept(value: Any) -> Any:
    """The value as JSON keeps it."""
    return msgspec.json.decode(msgspec.json.encode(value))

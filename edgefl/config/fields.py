"""Types of single fields that several files share, with messages that say what is allowed."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any

import pydantic
from pydantic import Field

from edgefl.config.yaml_files import parse_bytes
from edgefl.records import MODALITY_RULE, is_modality


def named(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value) is None:
        rule = "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 64"
        raise ValueError(f"{value!r} can not be a name; use {rule}")
    return value


def modality_name(value: str) -> str:
    if not is_modality(value):
        raise ValueError(f"{value!r} can not be a modality's name; use {MODALITY_RULE}")
    return value


def as_text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.date) else value  # YAML reads 2026-11-30 as a date


Bytes = Annotated[int, pydantic.BeforeValidator(parse_bytes), Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0)]
Name = Annotated[str, pydantic.AfterValidator(named)]
Modality = Annotated[str, pydantic.AfterValidator(modality_name)]

"""Low-rank adaptation in a run file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from edgefl.config.yaml_files import Values
from edgefl.records import MAX_FALLBACK_RANKS, MAX_RANK


class LoraConfig(Values):
    """Low-rank adaptation (LoRA): W x + (alpha / rank) B A x; A and B are trained and sent, W is neither."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = Field(8, description="rank of B A")
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="B A counts alpha / rank times; default: 2 x rank"
    )
    fallback_ranks: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_FALLBACK_RANKS)] = Field(
        [], description="smaller ranks, for devices whose budgets are short of `rank`; default: none"
    )
    where: Annotated[list[str], Field(min_length=1)] = Field(
        ["*/stage*"], description="patterns of the parts whose linear maps are adapted: stages and heads"
    )
    maps: Annotated[list[str], Field(min_length=1)] = Field(
        ["*"], description="patterns of the linear maps inside these parts; what fits none is listed"
    )

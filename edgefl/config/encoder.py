"""One modality's encoder in a run file, and how raw files become what it takes."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from edgefl.config.yaml_files import Positive, Values, valid_names
from edgefl.encoder_kinds import kind_names
from edgefl.records import MAX_CATEGORIES, MAX_CELL_NAME, MAX_COLUMNS

MAX_CLIP_S = 60.0  # as edgefl.data.log_mel admits
#: Kinds of columns that are said by a word.
COLUMN_KINDS = ("number", "date", "text", "file")
MAX_LENGTH = 4096  # attention over more tokens than this fits no device here


class EncoderConfig(Values):
    """One modality's encoder. A size name sets the fields below it; fields given here win."""

    kind: str = Field(
        description="what the modality is: sensor, table, vision, text, audio, or a kind of an installed package, "
        "whose samples are read as arrays only (entry points edgefl.encoders)"
    )
    size: str = Field("tiny", description="a size of this kind; `edgefl plan --sizes` lists them")
    width: Positive | None = Field(None, description="token width")
    depth: Positive | None = Field(None, description="transformer blocks, a multiple of model.stages")
    heads: Positive | None = Field(None, description="attention heads")
    mlp_ratio: Annotated[float, Field(gt=0)] | None = Field(None, description="feed-forward width / token width")
    patch: Positive | None = Field(None, description="time steps, pixels or spectrogram bins per patch side")
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="dropout of the encoder")
    image_size: Positive | Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="vision only: pictures of the data are resized to this many pixels, one number or [height, width]; "
        "default: the size's own, else as they are, which must then be alike",
    )
    crop: Literal["stretch", "center"] | None = Field(
        None,
        description="vision only: pictures of other proportions than image_size are stretched (default), or their "
        "middle is cut out (center)",
    )
    window: Positive | None = Field(
        None,
        description="sensor only: time steps of a sample; each recording is cut into windows of this many, which keep "
        "its label; default: a recording is one sample, and all are of one length",
    )
    step: Positive | None = Field(
        None, description="sensor only: time steps between the starts of neighbouring windows; default: window"
    )
    rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="sensor only: Hz to which recordings are resampled; default: they stay as they are"
    )
    source_rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="sensor only: Hz of recordings without a time column, where rate asks for another"
    )
    standardize: Literal["none", "fleet"] | None = Field(
        None,
        description="sensor and table only: fleet: the model takes (x - mean) / std of each channel or column, over "
        "all devices' data, of which each sends count, mean and variance; default: none, of a table fleet",
    )
    columns: dict[str, str | Annotated[list[str], Field(min_length=1)]] = Field(
        {},
        description="the columns of the user's table that it is read from, each with number (or number in UNIT), date "
        "(or date FORM, such as %d.%m.%Y), text, file, or the list of a category's values; needed for tables with rows "
        "by name, else what `edgefl predict` takes of such a file",
    )

    @pydantic.field_validator("columns")
    @classmethod
    def _described(cls, value: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
        for name, told in value.items():
            if isinstance(told, str) and told.split(" ")[0] not in COLUMN_KINDS:
                raise ValueError(f"{name} is {told!r}; write {', '.join(COLUMN_KINDS)}, or a list of values")
            if max(map(len, [name, told] if isinstance(told, str) else [name, *told])) > MAX_CELL_NAME:
                raise ValueError(f"{name:.40}: names and values may have {MAX_CELL_NAME} characters")
            if isinstance(told, list) and len(told) > MAX_CATEGORIES:
                raise ValueError(f"{name} has {len(told)} values; at most {MAX_CATEGORIES} are taken")
        if len(value) > MAX_COLUMNS:
            raise ValueError(f"{len(value)} columns; at most {MAX_COLUMNS} are taken")
        return value

    bands: Positive | None = Field(None, description="audio only: mel bands of a sound; default: 40, or the size's own")
    seconds: Annotated[float, Field(gt=0, le=MAX_CLIP_S)] | None = Field(
        None,
        description="audio only: sounds are cut or padded to this long; default: the size's own, else the first's",
    )
    length: Annotated[int, Field(ge=2, le=MAX_LENGTH)] | None = Field(
        None, description="text only: token ids that a text is cut or padded to; default: 32, or the size's own"
    )
    pool: Literal["token", "mean"] | None = Field(
        None, description="what stands for a sample: token (the class token) or mean (of all real tokens)"
    )
    stride: Positive | None = Field(
        None, description="audio only: bins between the starts of neighbouring patches; default: as wide as a patch"
    )
    vocabulary: Positive | None = Field(None, description="text only: number of token ids")
    positions: Positive | None = Field(
        None, description="text only: rows of the table of positions; default: the text's length"
    )
    arch: Literal["distilbert", "bert", "bag", "bands", "conv"] | None = Field(
        None,
        description="text: whose blocks, or bag: the mean of hashed words and n-grams; audio: bands: spans of all "
        "mel bands, with each band's mean and deviation, in place of AST's squares; vision: conv: convolutions, "
        "and a linear map of all pixels, in place of ViT's patches, whose side is then a power of two",
    )
    pretrained: str = Field(
        "",
        description="what to start from: a transformers checkpoint (folder, which gives the sizes as well; name; "
        "package:NAME/folder), or a file of encoders that benchmarks/accuracy/pretrain.py wrote (.safetensors)",
    )

    @pydantic.field_validator("kind")
    @classmethod
    def _installed(cls, value: str) -> str:
        if value not in (known := kind_names()):
            raise ValueError(f"unknown kind {value!r}; {valid_names(value, known)}")
        return value

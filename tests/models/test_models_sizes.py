"""Model specifications and named sizes: what is refused and how, and the papers' bytes to the digit."""

from __future__ import annotations

import pytest
import torch

from edgefl.encoder_kinds import OWN
from edgefl.errors import ModelError
from edgefl.models.check import encoder_of_size, spec_problems
from edgefl.models.parts import part_size_bytes
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build

torch.set_num_threads(1)

HEAD = HeadSpec(width=24, out=16)
SHAPES: dict[str, tuple[int, ...]] = {
    "sensor": (50, 3),
    "vision": (8, 12, 1),
    "text": (10,),
    "audio": (37, 20),
    "table": (7, 2),
}


def tiny(kind: str, shape: tuple[int, ...] = (), **changes: object) -> EncoderSpec:
    return encoder_of_size(kind, "tiny", shape or SHAPES[kind], **changes)


def four_kinds(**changes: object) -> ModelSpec:
    encoders = {"acc": tiny("sensor"), "image": tiny("vision"), "words": tiny("text"), "sound": tiny("audio")}
    return ModelSpec(**{"encoders": encoders, "head": HEAD, "fusion_width": 12, "classes": 5, **changes})


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"encoders": {}}, "encoders", "no modality"),
        ({"stages": 4}, "encoders.acc.depth", "6 blocks do not split evenly into 4 stages; set depth to 4 or 8"),
        ({"stages": 0}, "stages", "use 1 or more"),
        ({"encoders": {"acc": tiny("sensor", heads=3)}}, "encoders.acc.width", "32 is no multiple of the 3"),
        ({"encoders": {"acc": tiny("sensor", shape=(4,))}}, "encoders.acc.input_shape", "[time, channels]"),
        ({"encoders": {"acc": tiny("sensor", patch=0)}}, "encoders.acc.patch", "use 1 or more"),
        ({"encoders": {"i": tiny("vision", patch=5)}}, "encoders.i.patch", "does not divide an image of 8 x 12"),
        ({"encoders": {"i": tiny("vision", stride=2)}}, "encoders.i.stride", "only patches of audio overlap"),
        ({"encoders": {"s": tiny("audio", stride=-1)}}, "encoders.s.stride", "is -1"),
        ({"encoders": {"w": tiny("text", vocabulary=0)}}, "encoders.w.vocabulary", "number of token ids"),
        ({"encoders": {"w": tiny("text", positions=5)}}, "encoders.w.positions", "5 rows for texts of 10"),
        ({"encoders": {"s": tiny("audio", patch=21)}}, "encoders.s.patch", "larger than a spectrogram"),
        ({"encoders": {"head": tiny("sensor")}}, "encoders.head", "cannot be a modality's name"),
        ({"encoders": {"a/b": tiny("sensor")}}, "encoders.a/b", "cannot be a modality's name"),
        ({"label_names": ("yes", "no")}, "label_names", "2 names for 5 classes"),
    ],
)
def test_unsound_specification_names_the_field(changes: dict[str, object], path: str, message: str):
    spec = four_kinds(**changes)
    assert [p for p in spec_problems(spec) if p.path == path and message in p.message]
    with pytest.raises(ModelError):
        build(spec, device="meta")


def test_every_fault_is_reported_at_once():
    spec = four_kinds(stages=5, classes=-1)
    assert len(spec_problems(spec)) == 5  # classes, and the depth of four encoders
    with pytest.raises(ModelError, match="5 faults"):
        build(spec)


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in OWN for size in OWN[kind].sizes])
def test_every_named_size_can_be_built(kind: str, size: str):
    shape = () if "input_shape" in OWN[kind].sizes[size] else SHAPES[kind]
    encoder = encoder_of_size(kind, size, shape)
    model = build(ModelSpec(encoders={"m": encoder}, head=HEAD), device="meta")
    x = torch.zeros((2, *encoder.input_shape), dtype=torch.int64 if kind == "text" else torch.float32, device="meta")
    assert model.encode("m", x).shape == (2, encoder.width)


def test_unknown_size_lists_the_choices():
    with pytest.raises(ModelError, match="unknown encoder size 'huge'") as caught:
        encoder_of_size("vision", "huge")
    assert "tiny, small, paper" in caught.value.remedy


def test_the_papers_bytes_to_the_digit():
    """arXiv 2407.15426: parameters and buffers of ViT-Tiny/16 at 224 px + DistilBERT base + two heads, in MiB."""
    mib = 2**20
    encoders = {"image": encoder_of_size("vision", "paper"), "text": encoder_of_size("text", "paper")}
    model = build(ModelSpec(encoders=encoders), device="meta")
    size = {part: part_size_bytes(model, part) for part in model.parts_present}
    assert {size[f"image/stage{k}"] + size[f"text/stage{k}"] for k in range(1, 7)} == {30.43212890625 * mib}
    assert round((size["head/image"] + size["head/text"]) / mib, 7) == 151.2539520
    # The paper counts ViT's pooler (a 192 x 192 Linear), which its training does not use, and the numbers 0 to 511 of
    # DistilBERT's positions; our encoders have neither.
    pooler, numbers = 4 * (192 * 192 + 192), 8 * 512
    assert (sum(size.values()) + pooler + numbers) / mib == 425.6274871826172

"""The six figures of LW-FedMML's paper, and the same accounting for another pair of encoders."""

from __future__ import annotations

import pytest
from export_fixture import two_sensors

from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, ModelSpec, part_names
from edgefl.pricing.run_price import Totals, part_bytes, part_flops, totals
from edgefl.registry import method

MIB = 2**20
PAIR = {"image": encoder_of_size("vision", "paper"), "text": encoder_of_size("text", "paper")}
COCO = ModelSpec(PAIR, 6, HeadSpec(), 256, 0)
#: 90 rounds: all at once, as many in each stage, and as the paper trains pretrained encoders layer-wise.
ROUNDS = {"end_to_end": [0, 0, 0, 0, 0, 90], "progressive": [15] * 6, "layerwise": [0, 0, 0, 10, 30, 50]}


def of(model: ModelSpec, schedule: str, epochs: int = 3) -> Totals:
    return totals(model, method("schedule", schedule).stages(model, ROUNDS[schedule], "frozen"), epochs)


def test_sizes_to_the_byte():
    sizes = part_bytes(COCO)
    assert sum(sizes.values()) / MIB == 425.6274871826172
    assert (sizes["image/stage3"] + sizes["text/stage3"]) / MIB == 30.43212890625
    assert (sizes["head/image"] + sizes["head/text"]) / MIB == pytest.approx(151.2539520, abs=1e-7)


@pytest.mark.parametrize(
    ("schedule", "mib", "flops"),
    [("end_to_end", 76613, "2.44e+12"), ("progressive", 62918, "1.45e+12"), ("layerwise", 32794, "1.03e+12")],
)
def test_the_paper_s_six_figures(schedule, mib, flops):
    found = of(COCO, schedule)
    assert found.bytes / MIB == pytest.approx(mib, rel=2e-4)
    assert f"{found.flops:.2e}" == flops


def test_another_pair_of_encoders_supervised():
    """AST beside ViT: by hand, the products of one block of AST are 12 d^2 T + 2 T^2 d, 5 d T for each of two norms."""
    pair = {"audio": encoder_of_size("audio", "base"), "image": encoder_of_size("vision", "paper")}
    model = ModelSpec(pair, 6, HeadSpec(), 256, 309, tuple(str(i) for i in range(309)))
    flops = part_flops(model)
    d, tokens = 768, 2 + 101 * 12
    assert flops["audio/stage4"] == 2 * (12 * d * d * tokens + 2 * tokens * tokens * d + 10 * d * tokens)
    assert flops["task"] == 256 * 309
    assert flops["fusion"] == 512 * 256 + 256 * 256
    found = {schedule: of(model, schedule) for schedule in ROUNDS}
    assert found["layerwise"].flops < found["progressive"].flops < found["end_to_end"].flops
    assert found["layerwise"].bytes < found["progressive"].bytes < found["end_to_end"].bytes
    whole = sum(part_bytes(model).values())
    assert found["end_to_end"].bytes == 180 * whole


@pytest.mark.parametrize("fusion", ["concat", "joint"])
def test_every_part_that_computes_is_counted_whatever_is_fused(fusion: str) -> None:
    found = part_flops(two_sensors(fusion=fusion))
    assert found.keys() <= set(part_names(two_sensors(fusion=fusion)))
    assert all(found[part] > 0 for part in ("fusion", "task", "head/acc", "gyro/stage1"))


def test_each_label_set_has_the_operations_of_its_classifier() -> None:
    found = part_flops(two_sensors(classes=3, label_names=("@a:x", "@a:y", "@b:z")))
    assert found["task/a"] == 2 * found["task/b"] > 0

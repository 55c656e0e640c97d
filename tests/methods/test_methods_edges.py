"""Methods at their edges: what errors name and advise, and options that only a recipe sets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_objectives import forward_of, table
from test_schedule import MODEL

from edgefl.data.tokens import PADDING
from edgefl.errors import DataError, ProtocolError
from edgefl.methods import cluster, fedopt
from edgefl.methods.fedmml.schedule import heads
from edgefl.methods.mmic import reconstruction, sketches
from edgefl.methods.pmcmfl import contrast
from edgefl.prototypes.table import FUSED

F32 = np.float32


def test_a_model_with_a_task_and_no_heads_has_something_to_train() -> None:
    assert heads(replace(MODEL, head=replace(MODEL.head, kind="none")), [1, 2])[0].rounds == 3


@pytest.mark.parametrize("step", [fedopt.momentum, fedopt.fedadagrad, fedopt.fedadam, fedopt.fedyogi])
def test_steps_are_f32_whatever_the_options_are(step) -> None:
    for wide in (F32, np.float64):
        before, state = {"w": np.zeros(2, wide)}, None
        for _ in range(2):
            following, carried = step(state, before, {"w": np.ones(2, wide)})
            assert {value.dtype for value in (*following.values(), *carried.values())} == {np.dtype(F32)}
            state = {name: value.astype(wide) for name, value in carried.items()}


# --- sketches


def test_a_strange_sketch_is_described() -> None:
    assert cluster.described({}) == "nothing"
    assert cluster.described({"x" * 50: np.zeros((1, 2), F32)}) == f"'{'x' * 40}' float32 [1, 2]"
    four = {name: np.zeros(1, np.int16) for name in "abcd"}
    assert cluster.described(four) == "'a' int16 [1], 'b' int16 [1], 'c' int16 [1] and 1 more"
    with pytest.raises(ProtocolError, match=r"^not one tensor 'sketch', int16 \[100, 4096\], but nothing$"):
        sketches.check_sketch({})


def test_counts_of_a_sketch_are_shares() -> None:
    counts = np.zeros((sketches.ROWS, 2**sketches.BITS), np.int16)
    counts[:, 0] = 1
    sketches.check_sketch({"sketch": counts})
    for spoiled, low, total in ((-1, -1, 0), (0, 0, 0)):
        bad = counts.copy()
        bad[3, :2] = (1, spoiled) if spoiled else (0, 0)
        with pytest.raises(ProtocolError, match=f"a count of {low} and a row that sums to {total}: shares"):
            sketches.check_sketch({"sketch": bad})
    for other in ({"sketch": counts.astype(np.int32)}, {"sketch": counts[:-1]}, {"sketch": counts, "more": counts}):
        with pytest.raises(ProtocolError, match="not one tensor"):
            sketches.check_sketch(other)


def test_a_text_is_projected_as_the_sum_of_its_words_over_the_root_of_their_number() -> None:
    rows = np.random.default_rng(3).standard_normal((2**15, 50), F32)
    ids = np.array([[5, 7, PADDING], [5, 2**15 + 7, 7], [PADDING] * 3])
    found = cluster._project_tokens(ids, 50, np.random.default_rng(3))
    np.testing.assert_allclose(found[0], (rows[5] + rows[7]) / np.sqrt(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[2], np.zeros(50))
    # To the last bit, since sketches are compared: summed in f32, in the order of the words.
    np.testing.assert_array_equal(found[1], ((rows[5] + rows[7] + rows[7]) / np.sqrt([3.0])).astype(F32))
    assert found.dtype == F32


def test_values_are_projected_block_by_block() -> None:
    values = np.random.default_rng(4).standard_normal((3, 5000)).astype(F32)
    found = cluster._project_values(values, 50, np.random.default_rng(5))
    drawn = np.random.default_rng(5).standard_normal((5000, 50), F32)
    expected = values[:, :4096] @ drawn[:4096] + values[:, 4096:] @ drawn[4096:]
    np.testing.assert_array_equal(found, expected / F32(5000**0.5))
    assert found.dtype == F32


@pytest.mark.parametrize("features", [np.zeros(3), np.zeros((0, 3)), np.zeros((3, 0)), np.array([[np.inf]])])
def test_features_that_cannot_be_sketched_are_refused_with_their_shape(features) -> None:
    with pytest.raises(DataError) as caught:
        cluster.checked_features(features)
    assert caught.value.message == (
        f"a signature needs finite features [N, F] of one sample or more, not {list(features.shape)}"
    )


def test_cluster_models_beside_one_for_each_device_are_a_problem() -> None:
    def recipe(models: str, weight: str) -> dict[str, dict[str, dict[str, object]]]:
        return {"cluster": {"lsh": {"models": models}}, "weight": {weight: {}}}

    assert cluster.two_models(recipe("shared", "relationship")) == []
    assert cluster.two_models(recipe("own", "samples")) == []
    (problem,) = cluster.two_models(recipe("own", "relationship"))
    assert (problem.path, problem.message) == (
        "cluster", "weight: relationship gives each device a model already; set models: shared",
    )  # fmt: skip


# --- objectives


def test_the_fused_contrast_is_against_samples_or_classes_as_its_option_says() -> None:
    fused = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    prototypes = table([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    forward = forward_of({"a": fused}, labels=labels, tables={FUSED: prototypes})
    forward.__dict__["fused"] = fused
    for negatives, by_class in (("samples", False), ("classes", True)):
        found = contrast.fused_loss(forward, temperature=0.5, negatives=negatives)
        expected = contrast.prototype_contrast(fused, prototypes, labels, 0.5, class_level=by_class)
        assert found.item() == pytest.approx(expected.item())
    # one logit for each class: rows (2, 0, 4), (0, 2, 4) against class 0, (2, 2, 8) against class 1
    by_hand = [
        np.log(np.exp([2, 0, 4]).sum()) - 2,
        np.log(np.exp([0, 2, 4]).sum()),
        np.log(np.exp([2, 2, 8]).sum()) - 2,
    ]
    assert found.item() == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_each_projection_is_predicted_from_the_mean_of_the_others_that_a_row_has() -> None:
    full = {
        "a": torch.tensor([[2.0], [9.0]], requires_grad=True),
        "b": torch.tensor([[4.0], [3.0]]),
        "c": torch.tensor([[6.0], [5.0]]),
    }
    has = {"a": torch.tensor([True, False]), "b": torch.tensor([True, True]), "c": torch.tensor([True, True])}
    asked: dict[str, torch.Tensor] = {}

    def reconstruct(modality: str, given: torch.Tensor) -> torch.Tensor:
        asked[modality] = given
        return given

    nothing = torch.zeros(())
    forward = SimpleNamespace(
        spread=(full, has), model=SimpleNamespace(reconstruct=reconstruct), nothing=lambda: nothing
    )
    # a from (4 + 6) / 2; b from (2 + 6) / 2, and 5 where there is no a; c from (2 + 4) / 2, and 3
    found = reconstruction.loss(forward)
    assert {m: given.flatten().tolist() for m, given in asked.items()} == {
        "a": [5.0, 4.0],
        "b": [4.0, 5.0],
        "c": [3.0, 3.0],
    }
    # (5 - 2)^2 of the only row that has a; ((4 - 4)^2 + (5 - 3)^2) / 2; ((3 - 6)^2 + (3 - 5)^2) / 2
    assert found.item() == pytest.approx((9.0 + 2.0 + 6.5) / 3)
    assert not found.requires_grad, "the projections themselves do not move"
    alone = SimpleNamespace(spread=({"a": full["a"]}, {"a": has["a"]}), nothing=lambda: nothing)
    assert reconstruction.loss(alone) is nothing

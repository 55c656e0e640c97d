"""The multiway transformer: layers by hand, rows with different modalities, its parts, stages, gradients and price."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_models_build import tiny
from training_fixture import CLIP, CROSS_ENTROPY, job, model_spec, random_batch, stages_of, with_hyper

from edgefl.errors import ModelError
from edgefl.models.check import spec_problems, token_count
from edgefl.models.encoder import TokenState
from edgefl.models.multiway import FeedForward, MultiwayStage, SharedAttention, merged, patterns, pieces, run_stage
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, is_encoder, modality_of, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.plan.stages import restrict, shallower, trained_stages
from edgefl.pricing.round_price import price_step
from edgefl.registry import method
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary
from edgefl.training.step import make_optimizer, prepare, run_backward, run_forward, train_step

torch.set_num_threads(1)

KINDS = {"acc": "sensor", "image": "vision", "words": "text", "sound": "audio"}
ROWS = {"acc": None, "image": [4, 0, 2], "words": [1, 2, 4], "sound": [3]}
PARTIAL = {"a": [0, 1, 3, 4], "b": [4, 0, 2]}


def multiway(spec: ModelSpec, **changes: object) -> ModelSpec:
    return msgspec.structs.replace(spec, encoder_sharing="multiway", **changes)


def four_kinds(**changes: object) -> ModelSpec:
    encoders = {m: tiny(kind) for m, kind in KINDS.items()}
    return ModelSpec(
        **{"encoders": encoders, "head": HeadSpec(8, 4), "classes": 3, "encoder_sharing": "multiway", **changes}
    )


def inputs_of(spec: ModelSpec, counts: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for m, n in counts.items():
        shape = (n, *spec.encoders[m].input_shape)
        text = spec.encoders[m].kind == "text"
        made[m] = torch.randint(1, 99, shape, generator=generator) if text else torch.rand(shape, generator=generator)
        if text:
            made[m][:, 6:] = 0
    return made


def rows_of(rows: dict[str, list[int] | None]) -> dict[str, torch.Tensor | None]:
    return {m: None if own is None else torch.tensor(own) for m, own in rows.items()}


def shaken(model: StagedModel) -> StagedModel:
    """No norm left at one and zero, no bias at zero, so that a part in the wrong place shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# ---- layers


def test_a_layer_by_hand():
    """Width 2, q = k = 0 (all weights alike), v = out = identity, the feed-forward 0 for a and the bias (1, 2) for b.

    Norms: (2, 0) -> (1, -1), (0, 2) -> (-1, 1). One token of a, two of b: the mean of the values is (-1/3, 1/3), so
    a: (2 - 1/3, 1/3), and b: (-1/3, 2 + 1/3) + (1, 2) = (2/3, 13/3).
    """
    spec = EncoderSpec(width=2, heads=1, depth=1)
    shared, own = MultiwayStage(SharedAttention, spec, 1), {m: MultiwayStage(FeedForward, spec, 1) for m in "ab"}
    with torch.no_grad():
        for module in (shared, *own.values()):
            for name, parameter in module.named_parameters():
                if "norm.weight" not in name:
                    parameter.zero_()
        shared.layers[0].qkv.weight[4:] = torch.eye(2)
        shared.layers[0].out.weight.copy_(torch.eye(2))
        own["b"].layers[0].mlp[2].bias.copy_(torch.tensor([1.0, 2.0]))
    states = {"a": TokenState(torch.tensor([[[2.0, 0.0]]])), "b": TokenState(torch.tensor([[[0.0, 2.0]] * 2]))}
    after = run_stage(shared, own, states)
    torch.testing.assert_close(after["a"].tokens, torch.tensor([[[5 / 3, 1 / 3]]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(after["b"].tokens, torch.tensor([[[2 / 3, 13 / 3]] * 2]), atol=1e-4, rtol=0)
    # Padding: with b's second token not real, the mean over (1, -1) and (-1, 1) is zero.
    masked = {"a": states["a"], "b": TokenState(states["b"].tokens, torch.tensor([[True, False]]))}
    after = run_stage(shared, own, masked)
    torch.testing.assert_close(after["a"].tokens, torch.tensor([[[2.0, 0.0]]]), atol=1e-4, rtol=0)
    assert after["b"].mask is masked["b"].mask


def test_one_modality_alone_is_the_sensor_transformer():
    spec = ModelSpec({"acc": tiny("sensor")}, head=HeadSpec(8, 4))
    plain, both = shaken(build(spec)), shaken(build(multiway(spec)))
    for k in range(1, 7):
        block = plain.part(f"acc/stage{k}").blocks[0]
        shared, own = both.part(f"shared/stage{k}").layers[0], both.part(f"acc/stage{k}").layers[0]
        pairs = [(shared.norm, block.attention_norm), (shared.qkv, block.qkv), (shared.out, block.out)]
        for mine, other in (*pairs, (own.norm, block.mlp_norm), (own.mlp, block.mlp)):
            mine.load_state_dict(other.state_dict())
    for name in ("acc/embed", "acc/norm"):
        both.part(name).load_state_dict(plain.part(name).state_dict())
    x = torch.rand(3, 50, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(both.encode("acc", x), plain.encode("acc", x))
    torch.testing.assert_close(both.encode("acc", x, 2), plain.encode("acc", x, 2))


def test_dropout_acts_in_attention_and_feed_forward_in_training_only():
    encoders = {m: tiny("sensor", dropout=0.5) for m in "ab"}
    model = build(ModelSpec(encoders, head=HeadSpec(8, 4), encoder_sharing="multiway"))
    x = inputs_of(model.spec, {"a": 2, "b": 2})
    for part in ("shared/stage1", "a/stage1"):
        model.eval()
        quiet = model.encode_batch(x, {"a": None, "b": None}, 2, 1)["a"]
        model.part(part).train()
        assert not torch.equal(model.encode_batch(x, {"a": None, "b": None}, 2, 1)["a"], quiet)
        for layer in model.modules():
            if isinstance(layer, torch.nn.Dropout):
                layer.eval()
        loud = not torch.equal(model.encode_batch(x, {"a": None, "b": None}, 2, 1)["a"], quiet)
        assert loud == (part == "shared/stage1"), "the weights of the attention are dropped, too"


# ---- rows


@torch.no_grad()
def test_each_row_is_encoded_with_the_modalities_it_has():
    """Against the row on its own, given exactly what it has; rows of a modality in any order."""
    spec = four_kinds()
    model = shaken(build(spec))
    counts = {m: 5 if own is None else len(own) for m, own in ROWS.items()}
    inputs = inputs_of(spec, counts)
    h = model.encode_batch(inputs, rows_of(ROWS), 5)
    tokens = model.encode_batch_tokens(inputs, rows_of(ROWS), 5)
    assert {m: len(own) for m, own in h.items()} == counts
    for row in range(5):
        place = {m: row if own is None else own.index(row) for m, own in ROWS.items() if own is None or row in own}
        one = {m: inputs[m][i : i + 1] for m, i in place.items()}
        alone = model.encode_batch_tokens(one, dict.fromkeys(one), 1)
        for m, i in place.items():
            torch.testing.assert_close(tokens[m].tokens[i], alone[m].tokens[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(h[m][i], model.pool_tokens(m, alone[m])[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens["words"].mask, inputs["words"] != 0)
    assert tokens["image"].mask is None
    only_acc = model.encode("acc", inputs["acc"])
    assert not torch.allclose(h["acc"][4], only_acc[4], atol=1e-3), "the other modalities must be heard"


@torch.no_grad()
def test_a_complete_batch_and_one_modality():
    spec = four_kinds()
    model = shaken(build(spec))
    inputs = inputs_of(spec, dict.fromkeys(KINDS, 3))
    whole = model.encode_batch(inputs, dict.fromkeys(KINDS), 3)
    rows = {m: torch.arange(3) for m in KINDS}  # the same, said row by row
    for m, h in model.encode_batch(inputs, rows, 3).items():
        torch.testing.assert_close(h, whole[m])
    alone = model.encode_batch({"words": inputs["words"]}, {"words": torch.tensor([5, 0, 1])}, 6)["words"]
    torch.testing.assert_close(alone, model.encode("words", inputs["words"]))
    tokens = model.encode_tokens("words", inputs["words"])
    torch.testing.assert_close(model.pool_tokens("words", tokens), alone)


@torch.no_grad()
def test_padding_does_not_change_what_the_others_see():
    words = tiny("text")
    short = ModelSpec({"acc": tiny("sensor"), "words": tiny("text", shape=(4,), positions=10)}, head=HeadSpec(8, 4))
    long = ModelSpec({"acc": tiny("sensor"), "words": words}, head=HeadSpec(8, 4))
    ids, x = torch.tensor([[7, 8, 9, 3]]), torch.rand(1, 50, 3, generator=torch.Generator().manual_seed(0))
    padded = torch.cat((ids, torch.zeros(1, 6, dtype=torch.int64)), dim=1)
    rows = {"acc": None, "words": None}
    expected = build(multiway(short)).eval().encode_batch({"acc": x, "words": ids}, rows, 1)
    found = build(multiway(long)).eval().encode_batch({"acc": x, "words": padded}, rows, 1)
    for m in rows:
        torch.testing.assert_close(found[m], expected[m], atol=1e-5, rtol=1e-5)


def test_separate_encoders_take_a_batch_as_one_by_one():
    spec = four_kinds(encoder_sharing="separate")
    model = build(spec).eval()
    counts = {m: 5 if own is None else len(own) for m, own in ROWS.items()}
    inputs = inputs_of(spec, counts)
    for m, h in model.encode_batch(inputs, rows_of(ROWS), 5, 2).items():
        assert torch.equal(h, model.encode(m, inputs[m], 2))
    for m, state in model.encode_batch_tokens(inputs, rows_of(ROWS), 5, 2).items():
        assert state.tokens.shape == (counts[m], token_count(spec.encoders[m]), 32)
        torch.testing.assert_close(model.pool_tokens(m, state), model.encode(m, inputs[m], 2), rtol=1e-5, atol=1e-5)


def test_patterns_by_hand():
    rows = rows_of({"a": None, "b": [3, 1], "c": [1]})
    found = patterns({"a": 4, "b": 2, "c": 1}, rows, 4)
    assert {has: {m: i.tolist() for m, i in index.items()} for has, index in found.items()} == {
        ("a",): {"a": [0, 2]},
        ("a", "b"): {"a": [3], "b": [0]},
        ("a", "b", "c"): {"a": [1], "b": [1], "c": [0]},
    }
    assert patterns({"a": 4, "b": 4}, {"a": None, "b": None}, 4) == {("a", "b"): dict.fromkeys("ab", slice(0, 4))}
    nowhere = {m: torch.empty(n, dtype=torch.int64, device="meta") for m, n in (("a", 3), ("b", 1))}
    overlap = patterns({"a": 3, "b": 1}, nowhere, 4)  # unknown rows: as much overlap as there can be
    assert {has: len(index["a"]) for has, index in overlap.items()} == {("a",): 2, ("a", "b"): 1}


def test_pieces_by_hand():
    rows = rows_of({"a": None, "b": [5, 0, 1, 2]})
    found = list(pieces({"a": 6, "b": 4}, rows, 6, 3))
    assert [piece.size for piece in found] == [3, 3]
    assert [piece.own["a"] for piece in found] == [slice(0, 3), slice(3, 6)]
    assert [piece.own["b"].tolist() for piece in found] == [[1, 2, 3], [0]]
    assert found[0].rows == {"a": None, "b": None}  # every row of the piece has b
    assert found[1].rows["b"].tolist() == [2]
    (whole,) = pieces({"b": 4}, rows, 6, 0)
    assert (whole.size, whole.own["b"], whole.rows["b"] is rows["b"]) == (6, slice(None), True)
    assert [p.size for p in pieces({"b": 1}, rows_of({"b": [4]}), 5, 2)] == [1]  # the last; the others have nothing


def test_one_pattern_keeps_no_more_alive_than_it_needs():
    tokens = torch.rand(3, 5, 8)
    pooled = merged("m", [({"m": slice(0, 3)}, {"m": tokens[:, 0]})])["m"]
    assert torch.equal(pooled, tokens[:, 0])
    assert pooled.untyped_storage().nbytes() == 3 * 8 * 4
    assert merged("m", [({"m": slice(0, 3)}, {"m": tokens})])["m"] is tokens


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=3), st.integers(1, 8), st.randoms())
def test_every_row_is_in_one_place_and_comes_back_to_it(own, most, random):
    rows = {}
    for m, chosen in zip("abc", own, strict=False):
        order = sorted(chosen)
        random.shuffle(order)
        rows[m] = torch.tensor(order, dtype=torch.int64)
    rows = {m: one for m, one in rows.items() if len(one)}
    counts = {m: len(one) for m, one in rows.items()}
    if not rows:
        return
    by_pattern = list(patterns(counts, rows, 7).values())
    by_piece = [piece.own for piece in pieces(counts, rows, 7, most)]
    for parts in (by_pattern, by_piece):
        again = merged(rows, ((index, {m: rows[m][own] for m, own in index.items()}) for index in parts))
        assert again.keys() == rows.keys()
        assert all(torch.equal(again[m], one) for m, one in rows.items())
    for index in by_pattern:
        assert len({tuple(rows[m][i].tolist()) for m, i in index.items()}) == 1  # the same rows, in the same order


# ---- parts and stages


def test_parts_by_hand():
    spec = ModelSpec({"a": tiny("sensor"), "b": tiny("sensor")}, 2, classes=2, encoder_sharing="multiway")
    own = ["{}/embed", "{}/stage1", "{}/stage2", "{}/norm", "head/{}"]
    expected = [p.format(m) for m in "ab" for p in own] + ["shared/stage1", "shared/stage2", "fusion", "task"]
    assert part_names(spec) == expected
    assert build(spec, device="meta").parts_present == tuple(expected)
    assert part_names(spec, through=1) == [p for p in expected if not p.endswith("stage2")]
    assert [modality_of(p) for p in ("shared/stage1", "a/stage1", "head/a", "fusion")] == [None, "a", "a", None]
    assert [p for p in expected if not is_encoder(p)] == ["head/a", "head/b", "fusion", "task"]


def test_a_stage_holds_its_own_layers_and_text_has_a_final_norm():
    spec = four_kinds(stages=3)
    model = build(spec, device="meta")
    assert len(model.part("shared/stage3").layers) == len(model.part("image/stage3").layers) == 2
    names = [{n.split(".")[2] for n, _ in model.part(p).named_parameters()} for p in ("shared/stage1", "words/stage1")]
    assert names == [{"norm", "qkv", "out"}, {"norm", "mlp"}]
    assert all(isinstance(model.part(f"{m}/norm"), torch.nn.LayerNorm) for m in KINDS)


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_tokens_of_a_sample_are_as_many_as_counted(kind):
    for changes in ({}, {"stride": 5} if kind == "audio" else {}):
        spec = ModelSpec({"m": tiny(kind, **changes)}, head=HeadSpec(8, 4))
        x = inputs_of(spec, {"m": 2})["m"]
        assert build(spec, ["m/embed"]).embed("m", x).tokens.shape[1] == token_count(spec.encoders["m"])


def test_layerwise_trains_the_shared_stage_with_the_modalities_own():
    spec = multiway(model_spec(), reconstruction=True)
    heads = {"a/norm", "head/a", "b/norm", "head/b", "reconstruct/a", "reconstruct/b", "fusion", "task"}
    for s, stage in enumerate(stages_of(spec), start=1):
        first = {"a/embed", "b/embed"} if s == 1 else set()
        assert set(stage.trained) == first | heads | {f"{owner}/stage{s}" for owner in ("a", "b", "shared")}
        assert set(stage.present) == set(part_names(spec, through=s))
    (whole,) = stages_of(spec, "end_to_end")
    assert whole.trained == whole.present == tuple(part_names(spec))
    kept = [{p for p in variant.trained if p.startswith("shared/")} for variant in shallower(whole)]
    assert kept == [{f"shared/stage{k}" for k in range(lowest, 4)} for lowest in (1, 1, 2, 3)]
    own = restrict(whole, ["b"])
    assert {"shared/stage1", "shared/stage2", "shared/stage3"} <= set(own.trained)
    assert not any(modality_of(p) == "a" for p in own.trained)
    assert trained_stages(method("schedule", "heads").stages(spec, [1, 1, 1], "auto")[0]) == []


def test_shared_attention_learns_at_the_encoders_rate():
    made = job(multiway(model_spec()), lr={"encoder": 0.1, "head": 0.2})
    model = build(made.model, made.stage.present, device="meta")
    encoders, heads = make_optimizer(model, made.stage.trained, made.hyper).groups
    assert (encoders.lr, heads.lr) == (0.1, 0.2)
    expected = [p for n in made.stage.trained if "stage" in n or "norm" in n for p in model.part(n).parameters()]
    assert {id(p) for p in encoders.parameters} == {id(p) for p in expected}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"width": 64}, "encoders.b.width", "is 64, that of a 32"),
        ({"heads": 4}, "encoders.b.heads", "is 4, that of a 2"),
        ({"depth": 12}, "encoders.b.depth", "is 12, that of a 6"),
        ({"dropout": 0.1}, "encoders.b.dropout", "is 0.1, that of a 0.0"),
        ({"pretrained": "x"}, "encoders.b.pretrained", "leave it empty"),
    ],
)
def test_encoders_that_can_not_share_attention_are_named(changes, path, words):
    spec = ModelSpec({"a": tiny("sensor"), "b": tiny("vision", **changes)}, head=HeadSpec(8, 4))
    assert spec_problems(spec) == []
    assert [p.path for p in spec_problems(multiway(spec)) if words in p.message] == [path]
    with pytest.raises(ModelError):
        build(multiway(spec), device="meta")
    assert spec_problems(multiway(four_kinds())) == []


# ---- training


def ready(made, seed: int = 3) -> StagedModel:
    model = build(made.model, made.stage.present)
    prepare(model, made.stage.trained)
    torch.manual_seed(seed)
    return model.double()


def partial(rows: dict[str, list[int]] | None = None) -> Batch:
    batch = random_batch(PARTIAL if rows is None else rows)
    return Batch(batch.size, {m: x.double() for m, x in batch.inputs.items()}, batch.rows, batch.labels)


def gradients(made, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model = ready(made)
    done = run_forward(model, made, batch, Auxiliary())
    run_backward(model, made, batch, done)
    return float(done.loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["layerwise", "end_to_end"])
@pytest.mark.parametrize(
    ("objective", "fusion"),
    [(CROSS_ENTROPY, "concat"), (CROSS_ENTROPY, "mean"), (CLIP, "joint")],
    ids=["concat", "mean", "tokens"],
)
@pytest.mark.parametrize("sharing", ["multiway", "separate"])
def test_the_gradient_in_pieces_is_that_of_the_whole_batch(sharing, objective, fusion, schedule, micro):
    spec = model_spec(classes=3 if objective is CROSS_ENTROPY else 0, stages=2)
    spec = msgspec.structs.replace(spec, encoder_sharing=sharing, fusion=fusion)
    made = job(spec, stages_of(spec, schedule)[-1], objective=objective)
    for batch in (partial({}), partial()):
        whole, expected = gradients(made, batch)
        in_pieces, found = gradients(with_hyper(made, micro_batch=micro), batch)
        assert in_pieces == pytest.approx(whole, abs=1e-9)
        assert set(found) == set(expected)
        if sharing == "multiway":
            assert any("shared/stage2" in name for name in found)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("sharing", ["multiway", "separate"])
@torch.no_grad()
def test_tokens_and_padding_of_a_batch_in_pieces_are_those_of_the_whole(sharing):
    encoders = {m: tiny(kind, depth=2) for m, kind in (("acc", "sensor"), ("words", "text"))}
    spec = ModelSpec(encoders, 2, HeadSpec(8, 4), encoder_sharing=sharing, fusion="joint")
    made = job(spec, method("schedule", "layerwise").stages(spec, [1, 1], "auto")[-1], objective=CLIP)
    rows = {"acc": torch.tensor([0, 1, 3, 4]), "words": torch.tensor([4, 0, 2])}
    batch = Batch(6, inputs_of(spec, {"acc": 4, "words": 3}), rows, None)
    batch.inputs["words"][1, 3:] = 0
    model = build(spec).eval()
    whole, pieces_ = (run_forward(model, with_hyper(made, micro_batch=micro), batch, Auxiliary()) for micro in (0, 2))
    for done in (whole, pieces_):
        assert torch.equal(done.encoded["words"].mask, batch.inputs["words"] != 0)
        assert done.encoded["acc"].mask is None
    for m, expected in model.encode_batch_tokens(batch.inputs, rows, 6).items():
        for done in (whole, pieces_):
            torch.testing.assert_close(done.encoded[m].tokens, expected.tokens, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("micro", [0, 4])
def test_what_one_modality_learns_from_reaches_the_others_parts(micro):
    """Only a's feed-forward is trained and only b's projections count: a is heard through the shared attention."""
    spec = multiway(model_spec(stages=2))
    stage = msgspec.structs.replace(stages_of(spec)[-1], trained=("a/stage1",))
    made = with_hyper(job(spec, stage), micro_batch=micro)
    batch, model = partial({}), ready(made)
    done = run_forward(model, made, batch, Auxiliary())
    run_backward(model, made, batch, replace(done, loss=done.forward.projected["b"].square().sum()))
    assert model.part("a/stage1").layers[0].mlp[0].weight.grad.abs().sum() > 0


def test_with_dropout_both_runs_of_a_piece_draw_the_same():
    """Numerically: the gradient in pieces is the slope of the loss in pieces, dropout and all."""
    spec = multiway(model_spec(dropout=0.4, stages=2))
    made = with_hyper(job(spec, stages_of(spec, "end_to_end")[0]), micro_batch=4)
    batch, model = partial(), ready(made)
    run_backward(model, made, batch, run_forward(model, made, batch, Auxiliary()))

    def loss_at(parameter, index, step):
        with torch.no_grad():
            parameter.view(-1)[index] += step
        torch.manual_seed(3)
        value = float(run_forward(model, made, batch, Auxiliary()).loss.detach())
        with torch.no_grad():
            parameter.view(-1)[index] -= step
        return value

    for part, name in (("shared/stage1", "layers.0.qkv.weight"), ("b/stage1", "layers.0.mlp.0.weight")):
        parameter = dict(model.part(part).named_parameters())[name]
        index = int(parameter.grad.abs().argmax())
        slope = (loss_at(parameter, index, 1e-6) - loss_at(parameter, index, -1e-6)) / 2e-6
        assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("micro", [0, 4])
def test_frozen_parts_keep_every_bit_and_trained_ones_change(micro):
    spec = multiway(model_spec(dropout=0.2, stages=2))
    stage = stages_of(spec)[-1]
    made = with_hyper(job(spec, stage), micro_batch=micro)
    model = build(spec, stage.present)
    prepare(model, stage.trained)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_step(model, made, random_batch(PARTIAL), make_optimizer(model, stage.trained, made.hyper), Auxiliary())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    owners = {n.removeprefix("_parts.").split(".")[0] for n in changed}
    assert {"shared/stage2", "a/stage2", "b/stage2", "head/a"} <= owners <= set(stage.trained)


@pytest.mark.parametrize("micro", [0, 4])
@pytest.mark.parametrize("rows", [{}, {"b": [0, 1, 2]}], ids=["complete", "nested"])
def test_the_price_on_shapes_alone_is_that_of_the_step(micro, rows):
    spec = multiway(model_spec(stages=2))
    made = job(stage=stages_of(spec)[-1], spec=spec, micro_batch=micro)
    batch = random_batch(rows)
    model = build(spec, made.stage.present)
    prepare(model, made.stage.trained)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    with FlopCounter() as counter:
        train_step(model, made, batch, optimizer, Auxiliary())
    assert price_step(made, {m: len(x) for m, x in batch.inputs.items()})[1] == counter.flops > 0


def test_rows_that_overlap_less_never_cost_more_than_their_price():
    spec = multiway(model_spec(stages=2))
    model = build(spec)
    flops = []
    for rows in ({"a": [0, 1, 2], "b": [0, 1, 2]}, {"a": [0, 1, 2], "b": [2, 3, 4]}, {"a": [0, 1, 2], "b": [3, 4, 5]}):
        batch = random_batch(rows)
        with FlopCounter() as counter:
            model.encode_batch(batch.inputs, batch.rows, batch.size)
        flops.append(counter.flops)
    assert flops == sorted(set(flops), reverse=True)


def test_absent_modalities_cost_no_memory():
    spec = multiway(model_spec(stages=2))
    model = build(spec)
    peaks = []
    for rows in ({}, {"b": [0, 1, 2]}, {"b": [0]}):
        batch = random_batch(rows)
        with LiveBytes() as live:
            kept = model.encode_batch(batch.inputs, batch.rows, batch.size)  # with its graph
        peaks.append(live.live)
        del kept
    assert peaks == sorted(set(peaks), reverse=True)

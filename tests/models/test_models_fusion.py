"""Kinds of fusion, reconstruction and matching: by hand, against torch's own layers, and which stage trains what."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from test_models_build import tiny
from training_fixture import model_spec, stages_of

from edgefl.errors import ModelError
from edgefl.models.check import spec_problems, token_count
from edgefl.models.encoder import TokenState
from edgefl.models.heads import mean_of_shown
from edgefl.models.joint_fusion import Attention, Given, JointFusion, SelfLayer, Sequence, evened_out
from edgefl.models.spec import HeadSpec, JointSpec, ModelSpec, fused_width, modality_of, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.plan.stages import encoder_stage, is_closing, restrict, with_closing
from edgefl.records import is_modality
from edgefl.registry import method, methods

torch.set_num_threads(1)

HEAD = HeadSpec(8, 4)


def spec_of(kinds: str = "sensor text", **changes: object) -> ModelSpec:
    encoders = {m: tiny(kind) for m, kind in zip("abc", kinds.split(), strict=False)}
    fields = {"encoders": encoders, "head": HEAD, "classes": 3, "joint": JointSpec(8, 2, 2), **changes}
    return ModelSpec(**fields)


def joint_model(kinds: str = "sensor text") -> StagedModel:
    """A joint fusion and classifier in evaluation mode, nothing in them at zero or one."""
    model = build(spec_of(kinds, fusion="joint"), ["fusion", "task"]).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def given_of(model: StagedModel, size: int = 4, seed: int = 0) -> tuple[dict, dict]:
    """Projections [size, d] and tokens [size, N, D] of every modality; texts end in padding."""
    generator = torch.Generator().manual_seed(seed)
    projections, tokens = {}, {}
    for m, encoder in model.spec.encoders.items():
        projections[m] = torch.randn(size, 4, generator=generator)
        values = torch.randn(size, token_count(encoder), encoder.width, generator=generator)
        mask = None
        if encoder.kind == "text":
            mask = torch.arange(values.shape[1]) < torch.tensor([[10], [4], [1], [7]])[:size]
        tokens[m] = TokenState(values, mask)
    return projections, tokens


# ---- mean


def test_mean_by_hand():
    """Row 0 has both: ((1, 2) + (5, -2)) / 2 = (3, 0); row 1 has b only; row 2 has nothing."""
    r = {"a": torch.tensor([[1.0, 2], [9, 9], [9, 9]]), "b": torch.tensor([[5.0, -2], [4, 6], [9, 9]])}
    has = {"a": torch.tensor([True, False, False]), "b": torch.tensor([True, True, False])}
    assert mean_of_shown(list(r.values()), list(has.values())).tolist() == [[3, 0], [4, 6], [0, 0]]
    assert mean_of_shown(list(r.values())).tolist() == [[3, 0], [6.5, 7.5], [9, 9]]
    model = build(spec_of(fusion="mean", head=HeadSpec(8, 2)), ["task"])
    assert model.fuse(r, has).tolist() == [[3, 0], [4, 6], [0, 0]]
    assert model.fuse(r, has, counted={**has, "b": has["a"]}).tolist() == [[3, 0], [0, 0], [0, 0]]


def test_what_stands_where_a_modality_is_absent_does_not_matter_to_the_mean():
    a = torch.tensor([[1.0], [float("nan")]]).requires_grad_()
    has = [torch.tensor([True, False]), torch.tensor([True, True])]
    mean = mean_of_shown([a, torch.tensor([[3.0], [7.0]])], has)
    mean.sum().backward()
    assert mean.tolist() == [[2], [7]]
    assert a.grad.tolist() == [[0.5], [0]]


def test_a_mean_has_no_part_and_the_task_takes_its_width():
    spec = spec_of(fusion="mean", fusion_width=0)
    assert "fusion" not in part_names(spec)
    assert [fused_width(spec_of(fusion=kind)) for kind in ("concat", "mean", "joint")] == [256, 4, 4]
    assert build(spec, ["task"]).part("task").in_features == 4
    assert spec_problems(spec) == []
    with pytest.raises(ModelError, match=r"needs the modalities \['a', 'b'\], but got \['a', 'x'\]"):
        build(spec, ["task"]).fuse({"a": torch.zeros(1, 4), "x": torch.zeros(1, 4)})
    with pytest.raises(ModelError, match=r"but got \[\]"):
        build(spec, ["task"]).fuse({})


# ---- joint, layer by layer


@torch.no_grad()
def test_joint_attention_is_torchs_own():
    attention = Attention(8, 2)
    own = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    own.in_proj_weight.copy_(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))
    own.in_proj_bias.copy_(torch.cat([attention.q.bias, attention.k.bias, attention.v.bias]))
    own.out_proj.load_state_dict(attention.out.state_dict())
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 5, 8, generator=generator), torch.randn(3, 4, 8, generator=generator)
    mask = torch.tensor([[True] * 4, [True, False, True, False], [True, False, False, False]])
    torch.testing.assert_close(attention(q, k, None), own(q, k, k)[0])
    torch.testing.assert_close(attention(q, k, mask), own(q, k, k, key_padding_mask=~mask)[0])


@torch.no_grad()
def test_a_self_attention_layer_is_torchs_own():
    layer = SelfLayer(8, 2)
    own = torch.nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    parts = [layer.attention.q, layer.attention.k, layer.attention.v]
    own.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
    own.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    generator = torch.Generator().manual_seed(0)
    pairs = [(own.self_attn.out_proj, layer.attention.out), (own.linear1, layer.mlp[0]), (own.linear2, layer.mlp[2])]
    for theirs, mine in (*pairs, (own.norm1, layer.attention_norm), (own.norm2, layer.mlp_norm)):
        for parameter in mine.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        theirs.load_state_dict(mine.state_dict())
    x = torch.randn(3, 5, 8, generator=generator)
    mask = torch.tensor([[True] * 5, [True, False, True, False, True], [True, False, False, False, False]])
    torch.testing.assert_close(layer(x, None), own(x))
    torch.testing.assert_close(layer(x, mask), own(x, src_key_padding_mask=~mask))


@pytest.mark.parametrize(("tokens", "length"), [(7, 3), (6, 3), (5, 5), (1, 4), (3, 5)])
def test_evening_out_is_adaptive_average_pooling(tokens, length):
    x = torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(0))
    expected = F.adaptive_avg_pool1d(x.transpose(1, 2), length).transpose(1, 2)
    for mask in (None, torch.ones(2, tokens, dtype=torch.bool)):
        found, real = evened_out(Sequence(x, mask, None), length)
        torch.testing.assert_close(found, expected)
        assert real is None or real.all()


def test_evening_out_leaves_padding_out_and_repeats_a_stand_in():
    """Five tokens to two bins: 0..2 and 2..4. Row 0 has three real ones: (1 + 2 + 3) / 3 and 3 alone; row 1 has one, so
    that its second bin is not real; row 2 lacks the modality, and its one token fills both."""
    x = torch.tensor([[1.0, 2, 3, 99, 99], [4, 99, 99, 99, 99], [7, 99, 99, 99, 99]]).unsqueeze(2)
    mask = torch.arange(5) < torch.tensor([[3], [1], [1]])
    pooled, real = evened_out(Sequence(x, mask, torch.tensor([True, True, False])), 2)
    assert pooled.squeeze(2).tolist() == [[2, 3], [4, 0], [7, 7]]
    assert real.tolist() == [[True, True], [True, False], [True, True]]


# ---- joint, whole


@torch.no_grad()
def test_joint_fusion_by_hand():
    """Width 2, no self-attention layers, q = k = 0 and v = out = identity: a token gains the mean of the other's norms.

    a: two tokens (2, 0), (0, 2), position of the second (0, 2), so (2, 0), (0, 4): norms (1, -1), (-1, 1), mean 0.
    b: one token, 3 at its only entry times (1, 2), so (3, 6): norm (-1, 1).
    a gains (-1, 1): (1, 1), (-1, 5), pooled to one: (0, 3). b gains 0. Projected by [[0, 1, 0, 0], [0, 0, 4/3, 0]]:
    (3, 4), normalised (0.6, 0.8).
    """
    encoders = {"a": tiny("text", (2,), width=2, heads=1), "b": tiny("text", (1,), width=1, heads=1)}
    spec = ModelSpec(encoders, head=HeadSpec(8, 2), classes=2, fusion="joint", joint=JointSpec(2, 1, 1))
    model = build(spec, ["fusion"])
    fusion = model.part("fusion")
    fusion.layers = torch.nn.ModuleList()
    for name, parameter in fusion.named_parameters():
        if not name.startswith("norms"):
            parameter.zero_()
    for attention in fusion.cross:
        attention.v.weight.copy_(torch.eye(2))
        attention.out.weight.copy_(torch.eye(2))
    fusion.inputs[0].tokens.weight.copy_(torch.eye(2))
    fusion.inputs[0].position_embeddings[0, 1] = torch.tensor([0.0, 2.0])
    fusion.inputs[1].tokens.weight.copy_(torch.tensor([[1.0], [2.0]]))
    fusion.project.weight.copy_(torch.tensor([[0, 1, 0, 0], [0, 0, 4 / 3, 0]]))
    tokens = {"a": TokenState(torch.tensor([[[2.0, 0], [0, 2]]])), "b": TokenState(torch.tensor([[[3.0]]]))}
    r = dict.fromkeys("ab", torch.zeros(1, 2))
    torch.testing.assert_close(model.fuse(r, tokens=tokens), torch.tensor([[0.6, 0.8]]), atol=1e-4, rtol=0)
    # Without b, its stand-in: 2 r + (1, 0) = (5, 0), norm (1, -1); a gains that: (3, -1), (1, 3), pooled (2, 1).
    fusion.inputs[1].stand_in.weight.copy_(2 * torch.eye(2))
    fusion.inputs[1].stand_in.bias.copy_(torch.tensor([1.0, 0.0]))
    r = {"a": torch.zeros(1, 2), "b": torch.tensor([[2.0, 0.0]])}
    expected = F.normalize(torch.tensor([[1.0, 4 / 3 * 5]]), dim=1)
    torch.testing.assert_close(model.fuse(r, tokens={"a": tokens["a"]}), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kinds", ["sensor", "text", "sensor text", "text vision audio"])
@torch.no_grad()
def test_rows_of_a_joint_batch_do_not_touch_each_other(kinds):
    model = joint_model(kinds)
    projections, tokens = given_of(model)
    first = next(iter(tokens))
    has = {first: torch.tensor([True, False, True, True])}
    whole = model.fuse(projections, has, tokens)
    assert whole.shape == (4, 4)
    assert (whole.norm(dim=1) <= 1 + 1e-6).all()
    assert model.classify(whole).shape == (4, 3)
    for i in range(4):
        one = slice(i, i + 1)
        alone = model.fuse(
            {m: r[one] for m, r in projections.items()},
            {first: has[first][one]},
            {m: TokenState(s.tokens[one], None if s.mask is None else s.mask[one]) for m, s in tokens.items()},
        )
        torch.testing.assert_close(alone[0], whole[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kinds", ["sensor text", "text sensor", "text vision audio"])
@torch.no_grad()
def test_an_absent_modality_is_its_stand_in_however_it_is_said(kinds):
    """As rows without tokens, as ``has``, and, where nobody has it, without any tokens."""
    model = joint_model(kinds)
    projections, tokens = given_of(model)
    m, *others = tokens
    hidden = torch.tensor([True, False, True, False])
    expected = model.fuse(projections, {m: hidden}, tokens)
    own = TokenState(tokens[m].tokens[[2, 0]], None if tokens[m].mask is None else tokens[m].mask[[2, 0]])
    found = model.fuse(projections, None, {**tokens, m: own}, {m: torch.tensor([2, 0])})
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    both = model.fuse(projections, {m: hidden & torch.tensor([False, True, True, True])}, tokens)
    rows = {m: torch.tensor([2, 0])}
    found = model.fuse(projections, {m: torch.tensor([False, True, True, True])}, {**tokens, m: own}, rows)
    torch.testing.assert_close(found, both, atol=1e-6, rtol=1e-5)
    nobody = model.fuse(projections, None, {o: tokens[o] for o in others})
    denied = model.fuse(projections, {m: torch.zeros(4, dtype=torch.bool)}, tokens)
    torch.testing.assert_close(nobody, denied, atol=1e-6, rtol=1e-5)
    # The tokens of an absent modality do not count, its stand-in does; where it is there, it is the other way round.
    other = {**tokens, m: TokenState(tokens[m].tokens + 1, tokens[m].mask)}
    changed = model.fuse(projections, {m: hidden}, other)
    assert torch.equal(changed[~hidden], expected[~hidden])
    assert not torch.isclose(changed[hidden], expected[hidden]).all(1).any()
    moved = model.fuse({**projections, m: projections[m] + 1}, {m: hidden}, tokens)
    assert torch.equal(moved[hidden], expected[hidden])
    assert not torch.isclose(moved[~hidden], expected[~hidden]).all(1).any()


@torch.no_grad()
def test_padding_does_not_count_in_a_joint_embedding():
    model = joint_model("text sensor")
    projections, tokens = given_of(model)
    expected = model.fuse(projections, None, tokens)
    noise = torch.where(tokens["a"].mask.unsqueeze(2), tokens["a"].tokens, 9.0)
    found = model.fuse(projections, None, {**tokens, "a": TokenState(noise, tokens["a"].mask)})
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    only = joint_model("text")
    projections, tokens = given_of(only)
    noise = torch.where(tokens["a"].mask.unsqueeze(2), tokens["a"].tokens, 9.0)
    found = only.fuse(projections, None, {"a": TokenState(noise, tokens["a"].mask)})
    torch.testing.assert_close(found, only.fuse(projections, None, tokens), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_padded_text_alone_is_the_text_without_padding():
    model = joint_model("text")
    projections, tokens = given_of(model)
    expected = model.fuse(projections, None, tokens)[1]  # 4 of 10 tokens are real
    model.part("fusion").length = 4
    cut = {"a": TokenState(tokens["a"].tokens[1:2, :4])}
    found = model.fuse({"a": projections["a"][1:2]}, None, cut)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_joint_fusion_from_inputs_to_logits_reaches_every_parameter(device):
    spec = spec_of("sensor text audio", fusion="joint", stages=1, encoder_sharing="multiway")
    model = build(spec, device=device)
    shapes = {"a": (3, 50, 3), "b": (4, 10), "c": (3, 37, 20)}
    x = {m: torch.ones(shape, dtype=torch.int64 if m == "b" else None, device=device) for m, shape in shapes.items()}
    rows = {"a": torch.tensor([0, 1, 3]).to(device), "b": None, "c": torch.tensor([3, 1, 2]).to(device)}
    states = model.encode_batch_tokens(x, rows, 4)
    filled = {}
    for m, state in states.items():
        r = model.project(m, model.pool_tokens(m, state))
        filled[m] = r if rows[m] is None else r.new_zeros(4, 4).index_copy(0, rows[m], r)
    has = {"b": torch.ones(4, dtype=torch.bool, device=device)}
    logits = model.classify(model.fuse(filled, has, states, rows))
    assert logits.shape == (4, 3)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert device == "meta" or all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_joint_fusion_without_tokens_says_what_to_pass():
    model = joint_model()
    projections, tokens = given_of(model)
    with pytest.raises(ModelError, match="needs the tokens") as caught:
        model.fuse(projections)
    assert "encode_batch_tokens" in caught.value.remedy
    with pytest.raises(ModelError, match=r"fusion needs the modalities \['a', 'b'\], but got \['a'\]"):
        model.fuse({"a": projections["a"]}, None, tokens)


def test_the_size_of_the_published_joint_module():
    """Patches 196 + 1 at 768, texts of 40 at 768, to 512. By hand: 2 inputs of 768*256 + 256, stand-ins 512*256 + 256,
    (197 + 40)*256 positions, 2 norms of 512, 2 x 4 maps of 256*256 + 256, 3 layers of 12*512^2 + 13*512, and
    512*512 + 512: 393,728 + 262,656 + 60,672 + 527,360 + 9,457,152 + 262,656. The paper gives 11.2 M, not itemised."""
    encoders = {
        "image": tiny("vision", (224, 224, 3), patch=16, width=768, heads=12),
        "text": tiny("text", (40,), width=768, heads=12),
    }
    spec = ModelSpec(encoders, head=HeadSpec(8, 512), classes=2, fusion="joint")
    with torch.device("meta"):
        fusion = JointFusion(spec)
    layers = 3 * (12 * 512**2 + 13 * 512)
    inputs = 2 * (768 * 256 + 256) + 2 * (512 * 256 + 256) + 237 * 256
    crossing = 2 * 512 + 8 * (256**2 + 256)
    expected = layers + inputs + crossing + 512 * 512 + 512
    assert sum(p.numel() for p in fusion.parameters()) == expected == 10_964_224
    assert fusion.length == 40


def test_positions_are_drawn_and_a_lone_modality_crosses_nothing():
    fusion = build(spec_of("sensor", fusion="joint"), ["fusion"]).part("fusion")
    assert 0.01 < fusion.inputs[0].position_embeddings.std() < 0.03
    assert (len(fusion.cross), len(fusion.norms), len(fusion.layers)) == (0, 0, 2)
    both = build(spec_of("sensor text", fusion="joint"), ["fusion"], device="meta").part("fusion")
    assert {m.heads for m in both.modules() if isinstance(m, Attention)} == {2}
    given = Given(torch.ones(2, 4), None, None, None)  # nobody has it: one token, from its stand-in
    assert fusion([given]).shape == (2, 4)


# ---- reconstruction and matching


def test_reconstruction_and_matching_by_hand():
    """First weights 1 and -1 on the first entry, then sums: gelu(2) + gelu(-2) = 1.9545 - 0.0455 = 1.9090."""
    spec = spec_of("sensor sensor sensor", reconstruction=True, matching="prior")
    model = build(spec, ["reconstruct/a", "match/a", "match/b"])
    for mlp in (model.part("reconstruct/a"), model.part("match/a")["to/c"]):
        with torch.no_grad():
            for parameter in mlp.parameters():
                parameter.zero_()
            mlp[0].weight[:2, 0] = torch.tensor([1.0, -1.0])
            mlp[2].weight[0, :2] = 1.0
    r = torch.tensor([[2.0, 7, 7, 7]])
    for made in (model.reconstruct("a", r), model.match("a", r, "c")):
        torch.testing.assert_close(made, torch.tensor([[1.9090, 0, 0, 0]]), atol=1e-4, rtol=0)
    assert not torch.equal(model.match("a", r, "b"), model.match("a", r, "c"))
    assert set(model.part("match/b")) == {"to/a", "to/c"}


def test_matching_by_a_part_or_to_a_modality_that_is_not_there_is_refused():
    r = torch.zeros(2, 4)
    classifier = build(spec_of(matching="classifier"), ["match/a"])
    assert classifier.match("a", r).shape == (2, 3)
    with pytest.raises(ModelError, match="'match/b' is not in this model"):
        classifier.match("b", r)
    prior = build(spec_of(matching="prior"), ["match/a"])
    with pytest.raises(ModelError, match="no prior to ''"):
        prior.match("a", r)
    with pytest.raises(ModelError, match="no prior to 'a'"):
        prior.match("a", r, "a")


def test_a_modality_named_like_a_method_has_a_prior():
    encoders = {"keys": tiny("sensor"), "type": tiny("sensor")}
    model = build(ModelSpec(encoders, head=HEAD, matching="prior"), ["match/keys"])
    assert model.match("keys", torch.zeros(1, 4), "type").shape == (1, 4)


# ---- parts and stages


def test_parts_beyond_the_encoders_and_whose_they_are():
    spec = spec_of(reconstruction=True, matching="classifier", stages=2)
    after = ["reconstruct/a", "reconstruct/b", "fusion", "task", "match/a", "match/b"]
    assert part_names(spec)[-6:] == after
    assert part_names(spec, through=1)[-4:] == after[:4]  # nothing to match with before the last stage
    assert build(spec, device="meta").parts_present == tuple(part_names(spec))
    assert [modality_of(p) for p in after] == ["a", "b", None, None, "a", "b"]
    assert [encoder_stage(p) for p in ("match/embed", "reconstruct/stage1", "shared/stage2")] == [None, None, 2]
    assert not any(is_modality(name) for name in ("shared", "reconstruct", "match"))


@pytest.mark.parametrize("schedule", methods("schedule"))
@pytest.mark.parametrize("sharing", ["separate", "multiway"])
def test_no_schedule_has_the_matchers_which_a_closing_round_trains_alone(schedule, sharing):
    spec = model_spec(stages=2)
    spec = msgspec.structs.replace(spec, matching="prior", reconstruction=True, encoder_sharing=sharing)
    stages = stages_of(spec, schedule)
    *same, closing = with_closing(spec, stages)
    assert tuple(same) == stages
    assert (closing.index, closing.depth, closing.rounds) == (len(stages) + 1, spec.stages, 1)
    assert closing.trained == ("match/a", "match/b")
    assert closing.present == tuple(part_names(spec))
    assert [is_closing(stage) for stage in (*stages, closing)] == [False] * len(stages) + [True]
    assert with_closing(spec, [*stages, closing]) == (*stages, closing)
    for stage in stages:
        assert not any(p.startswith("match/") for p in stage.present)
        assert not any(p.startswith("match/") for p in stage.trained)
        assert {"reconstruct/a", "reconstruct/b", "head/a", "head/b", "task", "fusion"} <= set(stage.trained)
        assert set(stage.trained) <= set(stage.present)


def test_heads_by_hand():
    spec = msgspec.structs.replace(model_spec(stages=2), reconstruction=True, matching="classifier")
    (stage,) = method("schedule", "heads").stages(spec, [3, 4], "auto")
    assert (stage.index, stage.depth, stage.rounds) == (1, 2, 7)
    assert stage.present == tuple(part for part in part_names(spec) if not part.startswith("match/"))
    assert stage.trained == ("head/a", "head/b", "reconstruct/a", "reconstruct/b", "fusion", "task")


def test_heads_with_nothing_to_train_is_refused():
    spec = msgspec.structs.replace(model_spec(classes=0), head=HeadSpec(12, 8, kind="none"))
    with pytest.raises(ModelError, match="schedule heads would train nothing") as caught:
        method("schedule", "heads").stages(spec, [1, 1, 1], "auto")
    assert "head.kind" in caught.value.remedy
    labelled = msgspec.structs.replace(spec, classes=2, fusion="mean")
    assert method("schedule", "heads").stages(labelled, [1, 1, 1], "auto")[0].trained == ("head/a", "head/b", "task")


def test_a_device_keeps_what_makes_the_modality_it_lacks():
    spec = msgspec.structs.replace(model_spec(stages=1), reconstruction=True, matching="prior")
    own = restrict(stages_of(spec, "end_to_end")[0], ["a"])
    assert own.trained == ("a/embed", "a/stage1", "a/norm", "head/a", "reconstruct/a", "fusion", "task")
    assert set(own.present) == {*own.trained, "reconstruct/b"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"fusion": "sum"}, "fusion", "'sum' is unknown; choose concat, joint, mean"),
        ({"encoder_sharing": "all"}, "encoder_sharing", "choose separate, multiway"),
        ({"matching": "nearest"}, "matching", "choose none, classifier, prior"),
        ({"fusion": "joint", "joint": JointSpec(10, 4)}, "joint.width", "10 is no multiple of the 4"),
        ({"fusion": "joint", "joint": JointSpec(8, 0)}, "joint.width", "no multiple of the 0"),
        ({"fusion": "joint", "joint": JointSpec(8, 2, 0)}, "joint.layers", "use 1 or more"),
        ({"matching": "classifier", "classes": 0}, "matching", "the model has none"),
        ({"encoders": {"a": tiny("sensor")}, "matching": "prior"}, "matching", "two or more"),
        ({"encoders": {"a": tiny("sensor")}, "reconstruction": True}, "reconstruction", "two or more"),
        (
            {"encoders": {"a": msgspec.structs.replace(tiny("text"), arch="gpt")}},
            "encoders.a.arch",
            "choose distilbert, bert",
        ),
        ({"fusion_width": 0}, "fusion_width", "use 1 or more"),
    ],
)
def test_unsound_choices_name_the_field(changes, path, words):
    found = spec_problems(spec_of(**changes))
    assert [p.path for p in found] == [path]
    assert words in found[0].message

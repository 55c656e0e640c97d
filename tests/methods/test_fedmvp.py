"""FedMVP (arXiv 2406.11048) as printed: the shared projection (eq. 3), unit vectors, completion by class."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from losses_fixture import near
from test_data_completion import ENCODERS, some
from test_models_build import tiny
from training_fixture import CROSS_ENTROPY, dataset, job, model_spec, parts_of, random_batch, stages_of

from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.methods.fedmvp.completion import complete, nearest
from edgefl.models.encoder import TokenState
from edgefl.models.joint_fusion import JointFusion
from edgefl.models.parts import part_size_bytes
from edgefl.models.spec import HeadSpec, JointSpec, ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.compile import compile_run
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import train_round
from edgefl.training.step import prepare, run_forward

torch.set_num_threads(1)

SHARED = JointSpec(8, 2, 1, shared=True)


def shared_spec(modalities: str = "ab", **changes) -> ModelSpec:
    return msgspec.structs.replace(model_spec(modalities=modalities), fusion="joint", joint=SHARED, **changes)


# ---- the shared projection


@torch.no_grad()
def test_one_projection_makes_the_joint_embedding_and_each_modalitys_by_hand():
    """f(h) = W h / |W h| with W = [[0, 3], [4, 0]]: X^a of h = (1, 1) is (3, 4) / 5 = (.6, .8).

    No attention layers, and everything in the joint path zero but the way out, whose bias is (2, 2): X^joint is
    (6, 8) / 10, the same. With the bias (0, 2) it is (6, 0) / 6.
    """
    encoders = {"a": tiny("text", (2,), width=2, heads=1), "b": tiny("text", (1,), width=2, heads=1)}
    spec = ModelSpec(encoders, head=HeadSpec(8, 2), classes=2, fusion="joint", joint=JointSpec(2, 1, 1, shared=True))
    model = build(spec, ["head/a", "head/b", "fusion"])
    fusion = model.part("fusion")
    fusion.layers = torch.nn.ModuleList()
    for parameter in fusion.parameters():
        parameter.zero_()
    fusion.project.weight.copy_(torch.tensor([[0.0, 3], [4, 0]]))
    h = torch.tensor([[1.0, 1]])
    near(model.project("a", h).double(), [[0.6, 0.8]])
    near(model.project("b", 7 * h).double(), [[0.6, 0.8]])  # one projection for both, and the length does not count
    tokens = {"a": TokenState(torch.ones(1, 2, 2)), "b": TokenState(torch.ones(1, 1, 2))}
    fusion.widen.bias.copy_(torch.tensor([2.0, 2]))
    near(model.fuse({"a": h, "b": h}, None, tokens).double(), [[0.6, 0.8]])
    fusion.widen.bias.copy_(torch.tensor([0.0, 2]))
    near(model.fuse({"a": h, "b": h}, None, tokens).double(), [[1.0, 0]])
    assert [len(list(model.part(f"head/{m}").parameters())) for m in "ab"] == [0, 0]


def pass_of(model: StagedModel, **objective):
    made = job(model.spec, stages_of(model.spec, "heads")[-1], objective={**CROSS_ENTROPY, **objective})
    prepare(model, made.stage.trained)
    return run_forward(model, made, random_batch(), Auxiliary())


def test_every_embedding_is_a_unit_vector_and_the_projection_learns_from_each():
    model = build(shared_spec())
    done = pass_of(model, mcm={"weight": 1.0, "temperature": 0.07, "form": "literal"}, ram={"weight": 1.0})
    for x in (done.forward.fused, *done.forward.spread[0].values()):
        near(torch.linalg.vector_norm(x.detach(), dim=1).double(), torch.ones(6, dtype=torch.float64))
    loss = done.forward.projected["a"][:, 0].sum()
    (gradient,) = torch.autograd.grad(loss, [model.part("fusion").project.weight])
    assert gradient.abs().max() > 0  # MCM's X^M is what the trained projection makes, not a head of its own


def test_heads_are_only_what_narrower_encoders_need():
    encoders = {"wide": tiny("sensor", width=12, heads=2), "narrow": tiny("sensor", width=8, heads=2)}
    model = build(ModelSpec(encoders, head=HeadSpec(9, 5), classes=3, fusion="joint", joint=SHARED))
    assert [p.shape for p in model.part("head/wide").parameters()] == []
    assert [tuple(p.shape) for p in model.part("head/narrow").parameters()] == [(12, 8), (12,)]
    assert model.project("narrow", torch.randn(4, 8)).shape == (4, 5)


def test_the_classifier_has_two_layers():
    task = build(shared_spec(), ["task"]).part("task")
    assert [tuple(p.shape) for p in task.parameters()] == [(6, 6), (6,), (3, 6), (3,)]


# ---- what RAM compares (V4)


def test_ram_compares_unit_vectors_whatever_the_fusion_by_hand(monkeypatch: pytest.MonkeyPatch):
    """f = (3, 4), r = (5, 0): unit vectors (.6, .8) and (1, 0), apart by sqrt(.16 + .64) = .894427.

    The classifier says logits (10 x, 0) and the class is 0: CE is lower from (1, 0) than from (.6, .8). Of the raw
    vectors it is too, but they are 4.47 apart.
    """
    from edgefl.methods.fedmvp.joint_terms import ram_loss as loss

    class Seen:
        labels = torch.tensor([0])
        fused = torch.tensor([[3.0, 4]])
        spread = ({"a": torch.tensor([[5.0, 0]])}, {"a": torch.tensor([True])})

        @staticmethod
        def classify(x):
            return torch.stack((10 * x[:, 0], torch.zeros(len(x))), dim=1)

    near(loss(Seen()).double(), 0.894427191)


@pytest.mark.parametrize("term", ["mcm", "ram"])
def test_each_loss_switched_off_changes_what_is_learned(term: str):
    terms = {"mcm": {"weight": 1.0, "temperature": 0.07, "form": "literal"}, "ram": {"weight": 1.0}}
    spec, learned = shared_spec(), []
    for chosen in (terms, {name: options for name, options in terms.items() if name != term}):
        made = job(spec, stages_of(spec, "heads")[-1], objective={**CROSS_ENTROPY, **chosen}, epochs=2)
        learned.append(train_round(made, dataset(24), parts_of(made)).parts["fusion"]["project.weight"])
    assert np.abs(learned[0] - learned[1]).max() > 1e-4


# ---- its size


def paper(**encoders) -> ModelSpec:
    return ModelSpec(encoders, head=HeadSpec(8, 512), classes=200, fusion="joint", joint=JointSpec(shared=True))


def test_the_size_of_the_published_joint_module_with_its_shared_projection():
    """As ``test_models_fusion`` counts it; the projection is 768 -> 512, after 512 -> 768, the classifier two layers:
    393,728 + 262,656 + 60,672 + 527,360 + 9,457,152 + 393,984 + 393,728, and 365,256. The paper gives 11.2 M;
    without the stand-ins of absent modalities (262,656), which it has no need of, the module has 11.23 M."""
    image = tiny("vision", (224, 224, 3), patch=16, width=768, heads=12)
    text = tiny("text", (40,), width=768, heads=12)
    model = build(paper(image=image, text=text), ["head/image", "head/text", "fusion", "task"], device="meta")
    sizes = {part: sum(p.numel() for p in model.part(part).parameters()) for part in model.parts_present}
    assert sizes == {"head/image": 0, "head/text": 0, "fusion": 11_489_280, "task": 365_256}
    assert sizes["fusion"] - 262_656 == pytest.approx(11.2e6, rel=0.005)


def fusion_size(count: int, joint: JointSpec, width: int = 32) -> int:
    encoders = {f"s{i}": tiny("sensor", width=width, heads=2) for i in range(count)}
    spec = ModelSpec(encoders, head=HeadSpec(8, 64), classes=3, fusion="joint", joint=joint)
    with torch.device("meta"):
        return sum(p.numel() for p in JointFusion(spec).parameters())


def test_every_further_modality_adds_the_same_few_parameters():
    sizes = [fusion_size(count, JointSpec(32, 4, 3, shared=True)) for count in (3, 4, 5, 6)]
    (added,) = set(np.diff(sizes).tolist())
    assert added < 0.1 * sizes[0]


SIX = """
name: six
recipe: fedmvp
data: {test: test.npz}
model: {stages: 2, encoders: {%s}}
training: {rounds: [1, 1], batch_size: 6}
"""


def test_six_small_sensors_make_a_small_model(tmp_path):
    """Encoders of 6 x 0.3 MiB. With a joint width of 6 x 256 the joint module alone had 323 MiB."""
    (tmp_path / "run.yaml").write_text(SIX % ", ".join(f"s{i}: {{kind: sensor, size: tiny}}" for i in range(6)))
    config, recipe = load_run(str(tmp_path / "run.yaml"), [])
    shapes = dict.fromkeys(config.model.encoders, (64, 2))
    spec = compile_run(config, recipe, run="six", shapes=shapes, label_names=("x", "y")).model
    assert (spec.joint.shared, spec.joint.width) == (True, 32)
    model = build(spec, device="meta")
    sizes = {part: part_size_bytes(model, part) for part in model.parts_present}
    encoders = sum(size for part, size in sizes.items() if part.startswith("s"))
    assert sizes["fusion"] + sizes["task"] < encoders < 2 * 2**20


# ---- completion by class (V1)


def test_the_nearest_of_the_samples_own_class_lends_its_other_half():
    """Row 3 = (8, 9) of class y lacks words. Nearest by a is row 2 = (9, 9), of class x; of class y there is row 1."""
    data = some([1, 1, 1, 1], [1, 1, 1, 0])
    done = complete(data, ENCODERS, nearest(data))
    assert done.dataset.modalities["words"][3].tolist() == [1, 7, 8, 0]
    assert done.other == {}
    assert done.metrics() == {"completed": 1.0, "completed_other_class": 0.0}
    assert done.reason() == ""


def test_a_class_without_a_complete_sample_borrows_from_others_and_that_is_told():
    data = some([1, 1, 1, 1], [1, 0, 1, 0])
    done = complete(data, ENCODERS, nearest(data))
    assert done.dataset.modalities["words"][3].tolist() == [1, 9, 3, 0]
    assert (done.made["words"], done.other) == (2, {"words": {"y": 2}})
    assert done.metrics() == {"completed": 2.0, "completed_other_class": 2.0}
    assert "2 of y lacking words" in done.reason()


def test_a_sample_without_a_label_is_completed_from_any_class():
    data = some([1, 1, 1, 1], [1, 1, 1, 0])
    bare = Dataset(data.modalities, data.present, np.array([0, 1, 0, -1]), data.label_names, data.ids)
    done = complete(bare, ENCODERS, nearest(bare))
    assert done.dataset.modalities["words"][3].tolist() == [1, 9, 3, 0]
    assert done.other == {}

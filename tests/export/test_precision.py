"""Bundles in float16 and 8-bit integers: what is converted, what is left, and what is told."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixture import LABELS, exported, sensor, some_state, some_tables, stage_of, two_sensors, windows
from onnx import TensorProto, helper

from edgefl.data.dataset import Dataset
from edgefl.errors import ExportError
from edgefl.export import precision
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MODEL_FILE, Axis, Manifest, Port, read_manifest
from edgefl.export.drafts import TrainedState
from edgefl.export.form import Form
from edgefl.export.measure import Samples, in_memory, losses, right
from edgefl.export.precision_record import Reduced, SubsetLoss
from edgefl.export.reduced import Exact, reduced
from edgefl.export.runtime import Prediction, find_bundles, load_bundle
from edgefl.export.session import open_session
from edgefl.export.tables import read_tables
from edgefl.models.spec import EncoderSpec


def exact(name: str) -> Exact:
    folder = exported().directory / name
    manifest = read_manifest(folder)
    return Exact(manifest, (folder / MODEL_FILE).read_bytes(), read_tables(folder, manifest))


@functools.cache
def samples() -> Samples:
    """Windows with the f32 bundle's answers as labels; every fourth lacks gyro."""
    inputs = windows(exported().spec, 400, seed=2)
    has = np.arange(400) % 4 > 0
    inputs["gyro"][~has] = 0
    answers = load_bundle(exported().directory / "acc+gyro").predict(inputs, present={"gyro": has}).classes
    present = {"acc": np.ones(400, bool), "gyro": has}
    ids = [str(i) for i in range(400)]
    return Samples(Dataset(inputs, present, answers, exported().spec.label_names, ids), "windows")


def operators(data: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_model_from_string(data).graph.node]


@functools.cache
def in_int8() -> Exact:
    return reduced(exact("acc+gyro"), "int8", samples(), 100.0)


def test_int8_holds_every_large_weight_in_8_bits():
    done, before = in_int8(), exact("acc+gyro")
    record = done.manifest.reduced
    assert operators(done.data).count("MatMulInteger") == record.converted == 8  # two layers of an MLP a block
    assert not [one for one in onnx.load_model_from_string(done.data).opset_import if one.domain]
    assert done.manifest.precision == "int8"
    assert (record.before_bytes, done.manifest.size_bytes) == (len(before.data), len(done.data))
    assert (done.manifest.inputs, done.manifest.outputs) == (before.manifest.inputs, before.manifest.outputs)
    assert [value.name for value in onnx.load_model_from_string(done.data).graph.input] == [
        port.name for port in (*done.manifest.inputs, *done.manifest.presence, *done.manifest.tables)
    ]


def test_the_record_tells_every_subset_the_latency_and_the_machine():
    record = in_int8().manifest.reduced
    assert [(one.given, one.samples) for one in record.losses] == [
        (("acc", "gyro"), 300),
        (("acc",), 400),
        (("gyro",), 300),
    ]
    assert record.losses[0].before == 100.0
    assert record.measure == "accuracy"
    assert [one.batch for one in record.timings] == [1, 32]
    assert all(one.before_ms > 0 < one.after_ms and one.runs >= 3 for one in record.timings)
    assert record.machine
    assert (record.provider, record.data) == ("CPUExecutionProvider", "windows")


def products(*, coarse: bool) -> Exact:
    """logits = x @ fine + x @ coarse + x @ fair, where x_0 is 0. ``coarse``: that weighs 1000."""
    rng, names = np.random.default_rng(0), ("fine", "coarse", "fair")
    weights = {name: rng.standard_normal((256, 4)).astype(np.float32) for name in names}
    weights["coarse"][0] = 1000 if coarse else 1
    nodes = [helper.make_node("MatMul", ["x", f"{n}.weight"], [n], name=n) for n in names]
    nodes += [
        helper.make_node("Sum", list(names), ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in ("logits", "probabilities")]
    kept = [onnx.numpy_helper.from_array(one, f"{n}.weight") for n, one in weights.items()]
    graph = helper.make_graph(nodes, "g", [x], outputs, kept)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    manifest = Manifest(
        name="x",
        modalities=("x",),
        labels=LABELS,
        inputs=(Port("x", "float32", ("batch", 256)),),
        axes={"batch": Axis()},
        encoders={"x": EncoderSpec("sensor", (256,))},
    )
    return Exact(manifest, proto.SerializeToString())


@functools.cache
def vectors() -> Samples:
    """400 vectors without labels, 0 in front."""
    x = np.random.default_rng(1).standard_normal((400, 256)).astype(np.float32)
    x[:, 0] = 0
    return Samples(Dataset({"x": x}, {"x": np.ones(400, bool)}, None, (), [str(i) for i in range(400)]), "vectors")


def test_what_costs_too_much_is_left_in_f32_and_named():
    free = reduced(products(coarse=True), "int8", vectors(), 100.0).manifest.reduced
    assert (free.measure, free.left, free.converted) == ("agreement", (), 3)
    assert free.worst > 10
    done = reduced(products(coarse=True), "int8", vectors(), 3.0)
    record = done.manifest.reduced
    assert record.worst <= 3.0
    assert (record.left, record.converted) == (("coarse",), 2)
    assert operators(done.data).count("MatMulInteger") == 2
    assert reduced(products(coarse=False), "int8", vectors(), 3.0).manifest.reduced.left == ()


def test_the_noisiest_node_is_ranked_first():
    proto = precision.loaded(products(coarse=True).data)
    found = precision.weight_of(proto, ())
    assert list(found) == ["fine", "coarse", "fair"]
    assert precision.by_noise(proto, found, {"x": vectors().data.modalities["x"][:4]})[0] == "coarse"


def test_what_no_choice_of_nodes_allows_is_refused(monkeypatch: pytest.MonkeyPatch):
    wrong = lambda *_: losses({("acc",): ANSWER}, {("acc",): OTHER}, DATA)  # noqa: E731
    monkeypatch.setattr("edgefl.export.reduced.losses", wrong)
    with pytest.raises(ExportError, match=r"acc in int8 loses 50.0 points given acc \(100.0 to 50.0 % of 2 samples\)"):
        reduced(exact("acc"), "int8", samples(), 1.0)


ANSWER, OTHER = Prediction(classes=np.array([0, 1])), Prediction(classes=np.array([0, 2]))
DATA = Dataset({"acc": np.zeros((2, 1), np.float32)}, {"acc": np.ones(2, bool)}, None, (), ["0", "1"])


def flattened(task: str) -> Exact:
    """x, flattened, as embedding or logits: a value beyond 65504 is infinite in float16."""
    names = ["embedding.x"] if task == "embed" else ["logits", "probabilities"]
    nodes = [helper.make_node("Flatten", ["x"], ["f"], name="f")]
    nodes += [helper.make_node("ReduceL2", ["f"], ["n"], name="n", axes=[1], keepdims=1)] if task == "embed" else []
    last = {"embedding.x": ("Div", ["f", "n"]), "logits": ("Identity", ["f"]), "probabilities": ("Softmax", ["f"])}
    nodes += [helper.make_node(last[name][0], last[name][1], [name], name=name) for name in names]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in names]
    graph = helper.make_graph(nodes, "g", [x], outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    manifest = Manifest(
        name="x",
        task=task,
        modalities=("x",),
        labels=() if task == "embed" else LABELS,
        inputs=(Port("x", "float32", ("batch", 4)),),
        axes={"batch": Axis()},
        encoders={"x": EncoderSpec("sensor", (4,))},
    )
    return Exact(manifest, proto.SerializeToString())


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_answers_that_overflow_in_f16_are_refused(task: str):
    x = np.eye(4, dtype=np.float32)
    given = lambda: Samples(Dataset({"x": x}, {"x": np.ones(4, bool)}, None, (), list("0123")), "x")  # noqa: E731
    assert reduced(flattened(task), "f16", given(), 0.0).manifest.reduced.worst == 0.0
    x[3, 3] = 1e6
    with pytest.raises(ExportError, match=r"x in f16 gives answers that are not finite \(NaN or infinite\) given x"):
        reduced(flattened(task), "f16", given(), 100.0)


@pytest.mark.parametrize("points", [(math.nan, 50.0), (50.0, math.nan), (-math.inf, 50.0)])
def test_no_loss_is_worse_than_one_that_is_no_number(points: tuple[float, ...]):
    record = Reduced(losses=tuple(SubsetLoss(("x",), 1, 100.0, 100.0 - lost) for lost in points))
    assert math.isnan(record.worst)
    assert Reduced(losses=record.losses[1:]).worst == pytest.approx(points[1], nan_ok=True)


def test_f16_is_smaller_and_its_tables_stay_exact():
    done = reduced(exact("acc"), "f16", samples(), 100.0)
    proto, whole = (onnx.load_model_from_string(data) for data in (done.data, exact("acc").data))
    floats = [
        sum(onnx.numpy_helper.to_array(one).nbytes for one in model.graph.initializer if one.data_type in {1, 10})
        for model in (proto, whole)
    ]
    assert floats[0] < 0.6 * floats[1]  # of the file of this small one the graph is most
    assert {value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)} == {1, 7}
    bundle = in_memory(done.manifest, done.data, done.given)
    inputs, far = {"acc": windows(exported().spec, 3)["acc"]}, some_tables(exported().spec)
    far = {m: type(t)(t.means * np.float32(1e6), t.counts) for m, t in far.items()}  # beyond float16
    before = load_bundle(exported().directory / "acc").predict(inputs, prototypes=far)
    after = bundle.predict(inputs, prototypes=far)
    np.testing.assert_allclose(after.logits, before.logits, rtol=0.02)


def test_convolutions_get_ranges_from_the_samples():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) / 10 for shape in ((32, 3, 5, 5), (32 * 16, 8))]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv", pads=[2, 2, 2, 2], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Flatten", ["b"], ["c"], name="flat"),
        helper.make_node("MatMul", ["c", "v"], ["y"], name="product"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])
    kept = [onnx.numpy_helper.from_array(one, name) for one, name in zip(weights, "wv", strict=True)]
    graph = helper.make_graph(nodes, "g", [x], [y], kept)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    proto = precision.loaded(data)
    found = precision.weight_of(proto, ())
    assert found == {"conv": "w", "product": "v"}
    values = {"x": rng.standard_normal((16, 3, 8, 8)).astype(np.float32)}
    int8 = precision.to_int8(proto, found, values, reduce_range=False)
    assert {"QuantizeLinear", "DequantizeLinear", "Conv", "MatMulInteger"} <= set(operators(int8))
    (before,), (after,) = (open_session(one).run(["y"], values) for one in (data, int8))
    assert 0 < np.abs(after - before).max() < 0.05 * np.abs(before).max()
    assert set(precision.by_noise(proto, found, values)) == {"conv", "product"}


@pytest.mark.slow
def test_pictures_beside_prototype_tables_get_ranges_with_the_tables_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    picture = EncoderSpec("vision", (16, 16, 3), width=32, depth=2, heads=2, patch=8)
    spec = two_sensors(encoders={"acc": sensor(), "image": picture})
    _, parts = some_state(spec)
    values = windows(spec, 40)
    values["image"] = np.random.default_rng(0).random(values["image"].shape, np.float32)
    data = Dataset(values, dict.fromkeys(spec.encoders, np.ones(40, bool)), None, (), list(map(str, range(40))))
    state = TrainedState(spec, stage_of(spec), parts)
    form = Form(("int8",), max_loss=100.0)
    export_bundles(state, tmp_path / "bundles", form=form, samples=Samples(data, "windows"))
    record = read_manifest(tmp_path / "bundles-int8" / "acc+image").reduced
    assert record is not None
    assert record.calibrated == 1
    told = capfd.readouterr()
    assert "onnxruntime" not in told.out + told.err


@pytest.mark.parametrize("least", [0, 1, 2, 3, 5, 8, 9, 12, 13])
def test_as_few_nodes_as_it_takes_are_left_out(least: int):
    asked: list[int] = []
    found = precision.fewest(lambda count: asked.append(count) or count >= least, 12)
    assert found == (least if least <= 12 else None)
    assert len(asked) == len(set(asked)) <= 9


def test_processors_that_saturate_get_weights_of_7_bits():
    assert precision.needs_reduced_range("model name: x\nflags\t\t: fpu avx2 avx512f\n")
    assert not precision.needs_reduced_range("flags\t\t: fpu avx2 avx_vnni\n")
    assert not precision.needs_reduced_range("processor: 0\nFeatures: fp asimd\n")  # arm


def test_right_is_by_label_by_agreement_or_by_cosine():
    assert right(ANSWER, OTHER, np.array([0, 2])) == (2, 100.0)
    assert right(ANSWER, OTHER, np.array([1, -1])) == (1, 0.0)
    assert right(ANSWER, OTHER, None) == (2, 50.0)
    unit = Prediction(embeddings={"acc": np.array([[1.0, 0], [0, 0]])})  # the second sample lacks acc
    turned = Prediction(embeddings={"acc": np.array([[0.6, 0.8], [0, 0]])})
    samples_seen, cosine = right(unit, turned, None)
    assert (samples_seen, cosine) == (1, pytest.approx(60.0))


def test_samples_of_other_sensors_are_refused():
    data = Dataset({"acc": np.zeros((2, 12, 3), np.float32)}, {"acc": np.ones(2, bool)}, None, (), ["0", "1"])
    with pytest.raises(ExportError, match="no sample has 'gyro'"):
        reduced(exact("gyro"), "int8", Samples(data, "x"), 1.0)


def test_a_folder_of_two_precisions_is_refused(tmp_path: Path):
    for name in ("acc", "gyro"):
        shutil.copytree(exported().directory / name, tmp_path / name)
    manifest = tmp_path / "gyro" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"precision": "f32"', '"precision": "int8"'))
    with pytest.raises(ExportError, match="different precisions: acc f32, gyro int8"):
        find_bundles(tmp_path)

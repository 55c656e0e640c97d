"""Bundles that reach for files, memory or time of the machine that serves them, refused before onnxruntime reads them.

`python tests/attacks/test_attacks_bundles.py` prints what holds with the onnxruntime that is imported.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as Tensor
from onnx import helper, numpy_helper

from edgefl.cli.main import main
from edgefl.errors import ExportError
from edgefl.export.model_file import check_model
from edgefl.export.runtime import load_bundle
from edgefl.export.session import open_session

KEPT = Path(__file__).parents[1] / "export/kept_bundles/acc"
#: Rows and columns of a weight that is read from elsewhere.
SIZE = 4


def _model() -> onnx.ModelProto:
    return onnx.load(KEPT / "model.onnx")


def _outside(tensor: onnx.TensorProto, place: str) -> None:
    """Let a tensor's values lie in the file ``place``."""
    tensor.ClearField("raw_data")
    tensor.data_location = Tensor.EXTERNAL
    tensor.external_data.add(key="location", value=place)


def _weight(place: str) -> onnx.TensorProto:
    made = numpy_helper.from_array(np.ones(SIZE, np.float32), "outside")
    _outside(made, place)
    return made


def _initializer(model: onnx.ModelProto, place: str) -> None:
    _outside(next(one for one in model.graph.initializer if one.raw_data), place)


def _entry_alone(model: onnx.ModelProto, place: str) -> None:
    model.graph.initializer[0].external_data.add(key="location", value=place)


def _flag_alone(model: onnx.ModelProto, _place: str) -> None:
    model.graph.initializer[0].data_location = Tensor.EXTERNAL


def _attribute(model: onnx.ModelProto, place: str) -> None:
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=_weight(place)))


def _attributes(model: onnx.ModelProto, place: str) -> None:
    node = helper.make_node("Constant", [], ["c"], value_float=1.0)
    node.attribute[0].tensors.append(_weight(place))
    model.graph.node.insert(0, node)


def _branch(place: str, kind: str) -> onnx.NodeProto:
    then = helper.make_graph(
        [helper.make_node("Identity", ["outside"], ["o"])], "then", [],
        [helper.make_tensor_value_info("o", Tensor.FLOAT, [SIZE])], [_weight(place)],
    )  # fmt: skip
    return helper.make_node(kind, ["yes"], ["chosen"], then_branch=then, else_branch=then)


def _subgraph(model: onnx.ModelProto, place: str) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(0, _branch(place, "If"))


def _renamed_subgraph(model: onnx.ModelProto, place: str) -> None:
    model.graph.node.insert(0, _branch(place, "Identity"))


def _function(model: onnx.ModelProto, place: str) -> None:
    node = helper.make_node("Constant", [], ["o"], value=_weight(place))
    own = helper.make_function("own", "Outside", [], ["o"], [node], [helper.make_opsetid("", 18)])
    model.functions.append(own)


def _sparse(model: onnx.ModelProto, place: str) -> None:
    places = numpy_helper.from_array(np.arange(SIZE, dtype=np.int64), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(_weight(place), places, [SIZE]))


def _sparse_attribute(model: onnx.ModelProto, place: str) -> None:
    places = numpy_helper.from_array(np.arange(SIZE, dtype=np.int64), "places")
    sparse = helper.make_sparse_tensor(_weight(place), places, [SIZE])
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], sparse_value=sparse))


def _training(model: onnx.ModelProto, place: str) -> None:
    model.training_info.add().initialization.initializer.append(_weight(place))


def _operator(kind: str, domain: str = "") -> Callable[[onnx.ModelProto, str], None]:
    def add(model: onnx.ModelProto, _place: str) -> None:
        model.graph.node.insert(0, helper.make_node(kind, [], ["odd"], domain=domain))

    return add


def _endless(model: onnx.ModelProto, _place: str) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"])], "body",
        [helper.make_tensor_value_info("turn", Tensor.INT64, []), helper.make_tensor_value_info("go", Tensor.BOOL, [])],
        [helper.make_tensor_value_info("on", Tensor.BOOL, [])],
    )  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array(2**62), "turns"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(0, helper.make_node("Loop", ["turns", "yes"], [], body=body))


#: How a model reaches beyond its file -> what it is refused for.
REACHES: dict[str, tuple[Callable[[onnx.ModelProto, str], None], str]] = {
    "initializer": (_initializer, "weights outside the file"),
    "entry alone": (_entry_alone, "weights outside the file"),
    "flag alone": (_flag_alone, "weights outside the file"),
    "attribute": (_attribute, "weights outside the file"),
    "attributes": (_attributes, "weights outside the file"),
    "subgraph": (_subgraph, "a graph within a node|the operator 'If'"),
    "renamed subgraph": (_renamed_subgraph, "a graph within a node"),
    "function": (_function, "functions of its own"),
    "sparse": (_sparse, "sparse weights"),
    "sparse attribute": (_sparse_attribute, "sparse weights"),
    "training": (_training, "instructions for training"),
    "loop": (_endless, "a graph within a node|the operator 'Loop'"),
    "sequence": (_operator("SequenceEmpty"), "the operator 'SequenceEmpty'"),
    "domain": (_operator("Add", "own.domain"), "the operator 'Add' of the domain 'own.domain'"),
    "compiled": (_operator("EPContext", "com.microsoft"), "the operator 'EPContext' of the domain 'com.microsoft'"),
}


def _bundle(folder: Path, data: bytes, **changes: object) -> Path:
    """A bundle whose manifest fits the model file ``data``."""
    shutil.copytree(KEPT, folder)
    (folder / "model.onnx").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest |= {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data), **changes}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _ended(*words: object) -> SystemExit:
    """How a command ends."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value


def _samples(folder: Path) -> Path:
    path = folder / "samples.npz"
    np.savez(path, acc=np.zeros((2, 4, 2), np.float32))
    return path


@pytest.mark.parametrize("how", REACHES)
@pytest.mark.parametrize("place", ["private.bin", "/etc/hostname", "*/_ORT_MEM_ADDR_/*"])
def test_a_model_that_reaches_beyond_its_file_is_refused(tmp_path: Path, how: str, place: str) -> None:
    reach, said = REACHES[how]
    model = _model()
    reach(model, place)
    data = model.SerializeToString()
    with pytest.raises(ExportError, match=said) as refused:
        load_bundle(_bundle(tmp_path / "bundle", data))
    assert refused.value.exit_code == 18
    with pytest.raises(ExportError, match=said):
        open_session(data)


def test_no_command_takes_weights_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _model()
    Path("private.bin").write_bytes(next(one for one in model.graph.initializer if one.raw_data).raw_data)
    _initializer(model, "private.bin")
    folder = _bundle(tmp_path / "bundle", model.SerializeToString())
    for command in (["predict", folder, _samples(tmp_path)], ["serve", folder, "--host", ":0"]):
        assert _ended(*command).code == 18
        assert "weights outside the file" in capsys.readouterr().err


#: Bytes that readers of protobuf take for different things, or for nothing -> what they are refused for.
BYTES = {
    "no protobuf": (b"not a model", "bytes that are no protobuf"),
    "a group": (b"\x0b\x0c", "bytes that are no protobuf"),
    "field 0": (b"\x00\x01", "bytes that are no protobuf"),
    "cut": (b"\x3a\x7f\x0a", "a message that is cut off"),
    "endless number": (b"\x08" + b"\xff" * 20, "a number that never ends"),
    "endless key": (b"\xff" * 9, "a number that never ends"),
    "an unknown field": (b"\x08\x09\xfa\x3e\x00", "the unknown field 1007"),
    "a graph that is a number": (b"\x08\x09\x38\x00", "a damaged ModelProto"),
    "two operators": (b"\x3a\x0c\x0a\x0a\x22\x03Add\x22\x03Add", "a node without an operator, or with several"),
    "no operator": (b"\x3a\x02\x0a\x00", "a node without an operator"),
    "fields without end": (b"\x08\x01" * 500_001, "more than 500000 fields"),
    "a key of five bytes": (b"\xba\x80\x80\x80\x10\x00", "bytes that are no protobuf"),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_read_in_two_ways_are_refused(name: str) -> None:
    data, said = BYTES[name]
    with pytest.raises(ExportError, match=said):
        check_model(data)


def test_a_second_graph_is_walked_too() -> None:
    """Of two messages in a field that takes one, readers make one: the union."""
    model = _model()
    second = onnx.ModelProto()
    second.graph.initializer.append(_weight("private.bin"))
    with pytest.raises(ExportError, match="weights outside the file"):
        check_model(model.SerializeToString() + second.SerializeToString())


def test_a_model_in_onnxruntimes_own_format_is_refused() -> None:
    """onnxruntime knows its own format by these letters, wherever protobuf has them in a text."""
    data = b"\x12\x08" + b"xxORTMxx"[:8] + _model().SerializeToString()
    assert data[4:8] == b"ORTM"
    check_model(data)
    assert open_session(data).get_outputs()  # read as what was checked


def _big(count: int, *, from_input: bool) -> bytes:
    """A model of the kept bundle's ports that makes ``count`` numbers, by a constant shape or by one of its input."""
    model = _model()
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.array([count], np.int64), "many"))
    if from_input:
        graph.node.insert(0, helper.make_node("Shape", [graph.input[0].name], ["rows"], start=0, end=1))
        graph.node.insert(1, helper.make_node("Mul", ["rows", "many"], ["shape"]))
    graph.node.insert(2 * from_input, helper.make_node("ConstantOfShape", ["shape" if from_input else "many"], ["big"]))
    graph.node.insert(2 * from_input + 1, helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=1))
    (last,) = [node for node in graph.node if "logits" in node.output]
    last.output[list(last.output).index("logits")] = "before"
    for node in graph.node:
        node.input[:] = ["before" if name == "logits" else name for name in node.input]
    graph.node.append(helper.make_node("Add", ["before", "sum"], ["logits"]))
    return model.SerializeToString()


@pytest.mark.parametrize("from_input", [True, False])
def test_a_node_that_makes_64_gib_ends_in_a_sentence(
    tmp_path: Path, from_input: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = _bundle(tmp_path / "bundle", _big(2**34, from_input=from_input))
    assert _ended("predict", folder, _samples(tmp_path)).code == 18
    told = capfd.readouterr().err
    assert "the model asks for more memory than there is: onnxruntime may take" in told
    assert ".cc:" not in told


def test_more_labels_than_the_model_has_are_refused(tmp_path: Path) -> None:
    data = (KEPT / "model.onnx").read_bytes()
    labels = [str(i) for i in range(1_000_000)]
    with pytest.raises(ExportError, match="names 1000000 labels, more than 100000"):
        load_bundle(_bundle(tmp_path / "many", data, labels=labels))
    with pytest.raises(ExportError, match="names 3 labels, and its logits are"):
        load_bundle(_bundle(tmp_path / "few", data, labels=labels[:3]))


if __name__ == "__main__":
    import onnxruntime

    with tempfile.TemporaryDirectory() as made:
        for number, (name, (reach_out, _)) in enumerate(REACHES.items()):
            changed = _model()
            reach_out(changed, "/etc/hostname" if name == "initializer" else "private.bin")
            try:
                load_bundle(_bundle(Path(made) / str(number), changed.SerializeToString()))
                sys.exit(f"{name}: BROKEN with onnxruntime {onnxruntime.__version__}")
            except ExportError as error:
                sys.stdout.write(f"{name}: holds: {error.message}\n")
        sys.stdout.write(f"onnxruntime {onnxruntime.__version__}: holds\n")

"""A bundle's folder as a model of Triton: its configuration against Triton's own schema. No server is tried here."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from export_fixture import LABELS, exported
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from edgefl.export import triton
from edgefl.export.bundle_format import MODEL_FILE, Manifest, read_manifest
from edgefl.export.runtime import load_bundle


def parsed(manifest: Manifest) -> model_config_pb2.ModelConfig:
    return text_format.Parse(triton.config(manifest), model_config_pb2.ModelConfig())


def test_with_tables_as_inputs_every_axis_is_told_and_nothing_is_gathered():
    manifest = read_manifest(exported().directory / "acc+gyro")
    found = parsed(manifest)
    assert (found.name, found.backend, found.max_batch_size) == ("acc+gyro", "onnxruntime", 0)
    assert not found.HasField("dynamic_batching")
    told = {one.name: (one.data_type, list(one.dims)) for one in (*found.input, *found.output)}
    assert told["acc"] == (model_config_pb2.TYPE_FP32, [-1, 12, 3])
    assert told["gyro.present"] == (model_config_pb2.TYPE_FP32, [-1])
    assert told["prototypes.acc"] == (model_config_pb2.TYPE_FP32, [6, 8])
    assert told["matched"] == (model_config_pb2.TYPE_INT64, [-1, 2, 3])
    assert told.keys() == {
        port.name for port in (*manifest.inputs, *manifest.presence, *manifest.tables, *manifest.outputs)
    }


def test_with_fixed_tables_the_axis_of_samples_is_tritons():
    found = parsed(msgspec.structs.replace(read_manifest(exported().directory / "acc+gyro"), tables=()))
    assert (found.max_batch_size, found.HasField("dynamic_batching")) == (32, True)
    ports = {one.name: one for one in found.input}
    assert list(ports["acc"].dims) == [12, 3]
    assert (list(ports["acc.present"].dims), list(ports["acc.present"].reshape.shape)) == ([1], [])
    assert ports["acc.present"].HasField("reshape")
    (labelled,) = [one for one in found.output if one.label_filename]
    assert (labelled.name, list(labelled.dims)) == ("probabilities", [4])


def test_the_folder_stays_a_bundle(tmp_path: Path):
    folder = Path(shutil.copytree(exported().directory / "acc", tmp_path / "acc"))
    triton.add(folder, read_manifest(folder))
    assert (folder / "1" / MODEL_FILE).samefile(folder / MODEL_FILE)
    assert (folder / "labels.txt").read_text().split() == list(LABELS)
    assert load_bundle(folder).modalities == ("acc",)

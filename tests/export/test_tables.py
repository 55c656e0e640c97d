"""Prototype tables of a bundle: beside the model, inputs with defaults, or fixed; and bundles of earlier releases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from export_fixture import exported, some_tables, stage_of, windows

from edgefl.errors import DataError, ExportError
from edgefl.export import tracing
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MANIFEST_FILE, MODEL_FILE, TABLES_FILE, encode_json, read_manifest
from edgefl.export.drafts import Draft, TrainedState
from edgefl.export.form import Form
from edgefl.export.runtime import load_bundle
from edgefl.export.tables import MOST_NUMBERS, encode_tables, read_tables, table_arrays
from edgefl.prototypes.table import ClassMeans

KEPT = Path(__file__).parent / "kept_bundles"


def test_the_file_beside_the_model_holds_the_tables_to_the_bit():
    told = json.loads((exported().directory / "acc" / TABLES_FILE).read_text())
    table = some_tables(exported().spec)["gyro"]
    assert told["prototypes.gyro"]["shape"] == [6, 8]
    found = np.array(told["prototypes.gyro"]["data"], np.float32).reshape(6, 8)
    np.testing.assert_array_equal(found[:4], np.where(table.present[:, None], table.means, 0))
    assert told["prototypes.gyro.valid"]["data"] == [0, 1, 1, 1, 0, 0]


def test_a_call_without_the_tables_is_an_error_in_any_runtime():
    session = load_bundle(exported().directory / "acc").session
    with pytest.raises(ValueError, match=r"Required inputs \(\[.*prototypes\.acc.*\]\) are missing"):
        session.run(["logits"], windows(exported().spec, 1) | {})


@pytest.mark.parametrize("damage", ["gone", "other", "shape"])
def test_damaged_tables_are_refused(tmp_path: Path, damage: str):
    folder = Path(shutil.copytree(exported().directory / "acc", tmp_path / "acc"))
    file, manifest = folder / TABLES_FILE, read_manifest(folder)
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        file.write_bytes(file.read_bytes().replace(b"1.0", b"0.0", 1))
    else:
        data = encode_tables({"prototypes.acc": np.zeros((6, 8), np.float32)})
        file.write_bytes(data)
        named = msgspec.structs.replace(manifest, table_sha256=__import__("hashlib").sha256(data).hexdigest())
        (folder / MANIFEST_FILE).write_bytes(encode_json(named))
    said = {"gone": "cannot be read", "other": "is damaged: sha256", "shape": "does not hold the tables"}
    with pytest.raises(ExportError, match=said[damage]):
        load_bundle(folder)


def test_tables_too_large_for_text_are_refused():
    large = {"prototypes.acc": np.zeros((MOST_NUMBERS // 64 + 1, 64), np.float32)}
    with pytest.raises(ExportError, match="there is room for 4194304"):
        encode_tables(large)


@pytest.mark.parametrize("where", ["optional", "fixed"])
def test_tables_inside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """The traced file of the fixture, with its tables put in as the exporter would."""
    form, spec = Form(tables=where), exported().spec

    def known(draft: Draft, asked: Form, _: object) -> bytes:
        proto = onnx.load(str(exported().directory / draft.manifest.name / MODEL_FILE))
        tracing._place_tables(proto, draft.tables, asked.tables)
        return proto.SerializeToString()

    monkeypatch.setattr("edgefl.export.tracing.to_onnx", known)
    export_bundles(TrainedState(spec, stage_of(spec), exported().parts), tmp_path / "b", capacity=6, form=form)
    bundle, beside = load_bundle(tmp_path / "b" / "acc"), load_bundle(exported().directory / "acc")
    assert not (bundle.directory / TABLES_FILE).exists()
    inputs, other = {"acc": windows(spec, 5)["acc"]}, some_tables(spec, seed=9)
    np.testing.assert_array_equal(bundle.predict(inputs).logits, beside.predict(inputs).logits)
    checked = {one.mask for one in bundle.manifest.parity}
    if where == "optional":
        assert checked == {"prototype", "zero", "override"}
        replaced = [one.predict(inputs, prototypes=other).logits for one in (bundle, beside)]
        np.testing.assert_array_equal(*replaced)
        return
    assert (checked, bundle.manifest.masks, bundle.manifest.tables) == ({"prototype"}, ("prototype",), ())
    with pytest.raises(DataError, match=r"has room for \[0, 0\]"):
        bundle.predict(inputs, prototypes=other)


def test_zeros_by_default_and_prototypes_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a model that was trained with zeros: whoever gives the tables as they are beside the model has zeros too."""
    spec = exported().spec
    monkeypatch.setattr(
        "edgefl.export.tracing.to_onnx",
        lambda draft, *_: (exported().directory / draft.manifest.name / MODEL_FILE).read_bytes(),
    )
    state = TrainedState(spec, stage_of(spec), exported().parts, plain="zero")
    export_bundles(state, tmp_path / "b", capacity=6)
    bundle, other = load_bundle(tmp_path / "b" / "acc"), load_bundle(exported().directory / "acc")
    inputs = {"acc": windows(spec, 5)["acc"]}
    zeros, prototypes = (other.predict(inputs, mask=mask).logits for mask in ("zero", "prototype"))
    assert np.abs(zeros - prototypes).max() > 1e-3
    np.testing.assert_array_equal(bundle.predict(inputs).logits, zeros)
    np.testing.assert_array_equal(bundle.predict(inputs, mask="prototype").logits, prototypes)
    np.testing.assert_array_equal(
        bundle.predict(inputs, prototypes=some_tables(spec)).logits, prototypes
    )  # given tables stand in
    assert (bundle.manifest.mask, bundle.manifest.masks) == ("zero", ("prototype", "zero"))
    told = json.loads((bundle.directory / TABLES_FILE).read_text())
    assert not any(told["prototypes.gyro.valid"]["data"])
    assert any(told["prototypes.gyro"]["data"])
    assert "all marked by 0: zeros stand in" in (bundle.directory / "README.md").read_text()


@pytest.mark.parametrize("where", ["optional", "fixed"])
def test_without_tables_beside_it_a_model_trained_with_zeros_has_zeros_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    seen: list[Draft] = []

    def caught(draft: Draft, *_: object) -> bytes:
        seen.append(draft)
        raise ExportError("far enough")

    monkeypatch.setattr("edgefl.export.tracing.to_onnx", caught)
    state = TrainedState(exported().spec, stage_of(exported().spec), exported().parts, plain="zero")
    with pytest.raises(ExportError, match="far enough"):
        export_bundles(state, tmp_path / "b", form=Form(tables=where))
    assert (seen[0].manifest.mask, seen[0].manifest.masks, seen[0].tables) == ("zero", ("zero",), {})


@pytest.mark.parametrize("mask", ["prototype", "zero"])
@pytest.mark.parametrize("name", ["acc", "acc+gyro"])
def test_a_bundle_of_release_0_1_answers_as_it_did(name: str, mask: str):
    """Its tables have defaults in the model, and their flags are of type bool."""
    told, bundle = json.loads((KEPT / "answers.json").read_text()), load_bundle(KEPT / name)
    assert bundle.manifest.tables[1].dtype == "bool"
    inputs = {"acc": np.array(told["acc"], np.float32)}
    answers = bundle.predict(inputs, mask=mask)
    np.testing.assert_allclose(answers.logits, told["logits"][f"{name} {mask}"], atol=1e-5)
    ones = {m: ClassMeans(np.ones((4, 4), np.float32), np.ones(4, np.float32)) for m in ("acc", "gyro")}
    moved = bundle.predict(inputs, mask=mask, prototypes=ones).logits
    assert (np.abs(moved - answers.logits).max() > 1e-3) == (mask == "prototype")


def test_a_bundle_without_tables_has_no_file():
    assert read_tables(Path("nowhere"), msgspec.structs.replace(read_manifest(KEPT / "acc"), table_file="")) == {}
    assert table_arrays({}) == {}

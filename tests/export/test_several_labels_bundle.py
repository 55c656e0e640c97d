"""A bundle whose samples may have several labels: each class is answered by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from export_fixture import LABELS, some_state, stage_of, two_sensors, windows

from edgefl.cli.main import main
from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import set_names
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.export.measure import right
from edgefl.export.runtime import load_bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = two_sensors(label_names=set_names(LABELS))
    _, parts = some_state(spec, prototypes=False)
    folder = tmp_path_factory.mktemp("several") / "bundles"
    export_bundles(TrainedState(spec, stage_of(spec), parts), folder, mask="zero")
    return folder


def test_probabilities_are_sigmoids_and_labels_those_above_one_half(bundles: Path) -> None:
    bundle = load_bundle(bundles / "acc+gyro")
    found = bundle.predict(windows(two_sensors(), 9))
    np.testing.assert_allclose(found.probabilities, torch.from_numpy(found.logits).sigmoid(), atol=1e-6)
    told = [";".join(np.array(LABELS)[row >= 0.5]) or "none" for row in found.probabilities]
    assert list(found.labels) == told
    assert len(set(told)) > 1
    session = onnxruntime.InferenceSession(str(bundles / "acc+gyro/model.onnx"), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["labels"]) == list(LABELS)


def test_predict_lists_every_label_with_its_probability(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = windows(two_sensors(), 9)
    found = load_bundle(bundles / "acc+gyro").predict(arrays)
    sets = found.probabilities >= 0.5
    there, ids = {m: np.ones(9, bool) for m in arrays}, [f"w{i}" for i in range(9)]
    Dataset(arrays, there, sets.argmax(1), set_names(LABELS), ids, sets=sets).save_npz(tmp_path / "x.npz")
    with pytest.raises(SystemExit):
        main(["predict", str(bundles), str(tmp_path / "x.npz"), "--format", "json"])
    body = json.loads(capsys.readouterr().out)
    first = body["predictions"][0]
    assert first["labels"] == [name for name, p in first["probabilities"].items() if p >= 0.5]
    assert list(first["probabilities"]) == list(LABELS)
    assert [each["truth"] for each in body["predictions"]] == list(found.labels)
    assert body["averages"] == {"mean_average_precision": 1.0, "macro_f1": 1.0}
    assert body["accuracy"] is None
    with pytest.raises(SystemExit):
        main(["predict", str(bundles), str(tmp_path / "x.npz")])
    out = " ".join(capsys.readouterr().out.split())
    assert "Mean average precision 100.0 %, macro F1 100.0 %." in out


def test_a_lower_precision_is_judged_by_every_class() -> None:
    """Of 2 x 2 answers three are right."""
    from edgefl.export.runtime import Prediction

    told = Prediction(("x", "none"), np.array([0, 0]), np.array([[0.9, 0.2], [0.4, 0.1]]), np.zeros((2, 2)))
    assert right(told, told, np.array([[1, 1], [0, 0]])) == (2, 75.0)
    assert right(told, told, np.array([[1, 1], [-1, -1]])) == (1, 50.0)

"""One bundle of three sensors answers samples with any of them, as the evaluation does."""

from __future__ import annotations

import functools
import json
import tempfile
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from export_fixture import LABELS, Parts, sensor, some_state, stage_of, two_sensors, windows
from test_predict import edgefl

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MANIFEST_FILE, MODEL_FILE, TABLES_FILE, Manifest, read_manifest
from edgefl.export.drafts import TrainedState
from edgefl.export.graph import BundleGraph
from edgefl.export.parity import subset_list
from edgefl.export.runtime import apply, choose, find_bundles, load_bundle
from edgefl.export.tables import read_tables
from edgefl.models.spec import JointSpec, ModelSpec
from edgefl.models.staged import StagedModel
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.registry import method
from edgefl.training.evaluate import Criteria, evaluate, judge

NAMES = ("acc", "gyro", "press")
SUBSETS = [some for n in (1, 2, 3) for some in combinations(NAMES, n)]
_KEPT: list[tempfile.TemporaryDirectory] = []
pytestmark = pytest.mark.timeout(300)  # the first to ask waits for two exports


def three_sensors(**changes: object) -> ModelSpec:
    encoders = {"acc": sensor(depth=1), "gyro": sensor(depth=1, input_shape=(10, 2)), "press": sensor(depth=1)}
    return two_sensors(**{"encoders": encoders, "stages": 1, **changes})


@functools.cache
def exported() -> tuple[ModelSpec, Parts, Path]:
    """Bundles acc and acc+gyro+press with both masks; the other sensors' would be as acc. Do not change the folder."""
    spec = three_sensors()
    _, parts = some_state(spec)
    _KEPT.append(tempfile.TemporaryDirectory(prefix="edgefl-bundles-"))
    directory = Path(_KEPT[-1].name) / "bundles"
    with mock.patch("edgefl.export.bundle._inputs", return_value=[("acc",), NAMES]):
        export_bundles(TrainedState(spec, stage_of(spec, 1), parts), directory)
    return spec, parts, directory


def labelled(spec: ModelSpec, count: int = 40) -> Dataset:
    """Every second sample lacks a sensor, every fourth two."""
    arrays = windows(spec, count)
    present = {m: np.ones(count, bool) for m in arrays}
    for row in range(0, count, 2):
        present[NAMES[row // 2 % 3]][row] = False
        present[NAMES[(row // 2 + 1) % 3]][row] = row % 4 == 0
    for m, array in arrays.items():
        array[~present[m]] = 0
    ids = [f"w{i}" for i in range(count)]
    return Dataset(arrays, present, np.arange(count) % 4, spec.label_names, ids)


@pytest.mark.parametrize("mask", ["zero", "prototype"])
@pytest.mark.parametrize("given", SUBSETS, ids="+".join)
def test_every_subset_is_served_with_the_evaluation_s_accuracy(given: tuple[str, ...], mask: str):
    spec, parts, directory = exported()
    data = Dataset(
        windows(spec, 40), {m: np.ones(40, bool) for m in NAMES}, np.arange(40) % 4, LABELS, [str(i) for i in range(40)]
    )
    bundle = load_bundle(directory / "acc+gyro+press")
    answer = bundle.predict({m: data.modalities[m] for m in given}, mask=mask)
    rows = evaluate(spec, stage_of(spec, 1), parts, data, Criteria(prototypes=True))
    shown = "none" if given == NAMES else mask
    (wanted,) = [r.value for r in rows if (r.available, r.missing, r.metric) == (given, shown, "accuracy")]
    assert (answer.classes == data.labels).mean() == pytest.approx(wanted)
    assert set(answer.matched) == set(NAMES) - set(given)
    for match in answer.matched.values():
        assert (match.rows >= 0).any() == (mask == "prototype")
    if given == ("acc",):
        alone = load_bundle(directory / "acc").predict({"acc": data.modalities["acc"]}, mask=mask)
        np.testing.assert_allclose(answer.logits, alone.logits, atol=1e-4)


def test_what_stands_in_for_an_absent_sensor_is_not_looked_at():
    spec, _, directory = exported()
    bundle, x = load_bundle(directory / "acc+gyro+press"), windows(spec, 3)
    has = {"press": [True, False, True]}
    found = bundle.predict(x, present=has)
    x["press"][1] = np.nan
    np.testing.assert_array_equal(bundle.predict(x, present=has).logits, found.logits)
    two = bundle.predict({m: x[m][1:2] for m in ("acc", "gyro")})
    np.testing.assert_allclose(found.logits[1:2], two.logits, atol=1e-5)
    assert (found.matched["press"].rows[[0, 2]] == -1).all()
    session = onnxruntime.InferenceSession(str(directory / "acc+gyro+press" / MODEL_FILE))
    raw = windows(spec, 3) | {f"{m}.present": np.ones(3, np.float32) for m in NAMES}
    raw |= read_tables(directory / "acc+gyro+press", bundle.manifest)
    raw["press.present"][1], raw["press"][1] = 0, 1e6
    np.testing.assert_allclose(session.run(["logits"], raw)[0], found.logits, atol=1e-5)


def test_samples_that_lack_different_sensors_are_answered_in_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spec, parts, directory = exported()
    data = labelled(spec)
    data.save_npz(tmp_path / "some.npz")
    assert edgefl("predict", directory, tmp_path / "some.npz", "--format", "json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["answered"] == 40
    for row, entry in enumerate(body["predictions"]):
        assert entry["given"] == [m for m in NAMES if data.present[m][row]]
        assert entry["bundle"] == ("acc" if entry["given"] == ["acc"] else "acc+gyro+press")
        assert set(entry.get("matched", {})) == set(NAMES) - set(entry["given"])
    assert set(body["by_bundle"]) == {"acc", "acc+gyro+press"}
    assert sum(one["samples"] for one in body["by_given"].values()) == 40
    assert body["by_given"]["acc+gyro+press"]["mask"] == "none"
    model = some_state(spec)[0]
    figures = judge(model, data, 1, from_tensors(parts["prototypes"]), NAMES, Criteria(mask="prototype"))
    assert body["accuracy"] == pytest.approx(figures["accuracy"])
    # the bundle of all alone does as well
    assert edgefl("predict", directory / "acc+gyro+press", tmp_path / "some.npz", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == body["accuracy"]
    assert edgefl("predict", directory, tmp_path / "some.npz") == 0
    captured = capsys.readouterr()
    assert "gyro+press" in captured.out
    assert "not used" not in captured.err
    # a bundle of one sensor takes only that one, and says what it leaves
    assert edgefl("predict", directory / "acc", tmp_path / "some.npz", "--bad-samples", "skip") == 0
    assert "not used: press, which no bundle here takes" in capsys.readouterr().err


def test_a_folder_of_samples_uses_all_each_of_them_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec, _, directory = exported()
    x = windows(spec, 1)
    for m in NAMES:
        np.savetxt(tmp_path / f"{m}.csv", x[m][0], delimiter=",", fmt="%.9g")
    lines = [{"id": "+".join(some), **{m: f"{m}.csv" for m in some}} for some in SUBSETS]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert edgefl("predict", directory, tmp_path, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert ["+".join(entry["given"]) for entry in found] == [line["id"] for line in lines]
    bundle = load_bundle(directory / "acc+gyro+press")
    for entry, some in zip(found, SUBSETS, strict=True):
        wanted = bundle.predict({m: x[m] for m in some}).probabilities.max()
        assert entry["probability"] == pytest.approx(float(wanted), abs=1e-4)


def older(tmp_path: Path) -> Path:
    """The same bundles as an earlier version wrote them: the manifest of the complete one knows no subsets."""
    directory = exported()[2]
    for name in ("acc", "acc+gyro+press"):
        (tmp_path / name).mkdir(parents=True)
        for file in (MODEL_FILE, TABLES_FILE):
            (tmp_path / name / file).write_bytes((directory / name / file).read_bytes())
        fields = json.loads((directory / name / MANIFEST_FILE).read_text())
        for field in ("subsets", "presence"):
            del fields[field]
        (tmp_path / name / MANIFEST_FILE).write_text(json.dumps(fields))
    return tmp_path


def test_an_earlier_export_refuses_what_it_would_drop_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = exported()[0]
    bundles = find_bundles(older(tmp_path))
    assert bundles[tmp_path / "acc+gyro+press"].subsets == "complete"
    data = labelled(spec)
    two = data.subset(
        [row for row in range(40) if data.present["acc"][row] and sum(data.present[m][row] for m in NAMES) == 2][:1]
    )
    with pytest.raises(
        DataError, match=r"has acc \+ .*no bundle uses them together: (gyro|press) would be dropped"
    ) as told:
        apply(bundles, two)
    assert "--modality" in told.value.remedy
    alone = [row for row in range(40) if [m for m in NAMES if data.present[m][row]] == ["acc"]]
    (one,), left = apply(bundles, data.subset(alone))
    assert (one.bundle, one.modalities, len(one.rows), len(left)) == ("acc", ("acc",), len(alone), 0)
    with pytest.raises(DataError, match="needs press as well"):
        load_bundle(tmp_path / "acc+gyro+press").predict({m: a for m, a in windows(spec, 2).items() if m != "press"})
    two.save_npz(tmp_path / "two.npz")
    assert edgefl("predict", tmp_path / "acc+gyro+press", tmp_path / "two.npz") == DataError.exit_code
    assert "alone; there are: acc+gyro+press" in capsys.readouterr().err


def test_a_sample_with_nothing_is_refused():
    spec, _, directory = exported()
    bundle, x = load_bundle(directory / "acc+gyro+press"), windows(spec, 3)
    with pytest.raises(DataError, match="sample 1 has none of acc, gyro, press"):
        bundle.predict(x, present={m: [True, False, True] for m in NAMES})
    with pytest.raises(DataError, match=r"number of samples: acc 3, gyro 3, press 3, acc \(present\) 2"):
        bundle.predict(x, present={"acc": [True, False]})
    with pytest.raises(DataError, match="needs acc, gyro, press as well") as told:
        bundle.predict({})
    assert "one or more of" in told.value.remedy
    with pytest.raises(DataError, match="has not all of acc"):
        load_bundle(directory / "acc").predict({"acc": x["acc"]}, present={"acc": [True, True, False]})


def test_the_manifest_says_what_it_serves_and_what_was_checked():
    _, _, directory = exported()
    manifest = read_manifest(directory / "acc+gyro+press")
    assert (manifest.subsets, manifest.absent, manifest.fills) == ("any", (), NAMES)
    assert [(port.name, port.dtype, port.shape) for port in manifest.presence] == [
        (f"{m}.present", "float32", ("batch",)) for m in NAMES
    ]
    for mask in ("prototype", "zero", "override"):
        for size in (1, 5):
            checked = {
                g for one in manifest.parity if (one.mask, one.sizes["batch"]) == (mask, size) for g in one.given
            }
            assert checked == {"+".join(some) for some in SUBSETS}
    assert all(manifest.serves(some) for some in SUBSETS)
    assert not manifest.serves(())
    assert not manifest.serves(("acc", "heart"))
    single = read_manifest(directory / "acc")
    assert (single.subsets, single.presence, single.serves(("acc",)), single.serves(NAMES)) == (
        "complete",
        (),
        True,
        False,
    )


def test_the_bundle_that_takes_fewest_and_drops_nothing_is_chosen():
    bundles = {Path(m): Manifest(modalities=(m,)) for m in "abc"}
    bundles[Path("all")] = Manifest(modalities=(*"abc",), subsets="any")
    for has, wanted in (("a", "a"), ("ab", "all"), ("bc", "all"), ("abc", "all")):
        assert choose(bundles, frozenset(has)) == Path(wanted)
    assert choose(bundles, frozenset("ax")) is None
    assert choose({Path("all"): bundles[Path("all")]}, frozenset("c")) == Path("all")


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (2, 3), (3, 7), (4, 15), (6, 15)])
def test_all_subsets_are_checked_up_to_four_modalities(count: int, wanted: int):
    names = tuple("abcdef"[:count])
    found = subset_list(names, np.random.default_rng(0))
    assert len(found) == len(set(found)) == wanted
    assert found[0] == names
    assert {(m,) for m in names} <= set(found)


# Every way to share, to fuse and to fill in, before its export

WAYS: dict[str, dict[str, object]] = {
    "concat": {},
    "mean": {"fusion": "mean"},
    "joint": {"fusion": "joint", "joint": JointSpec(8, 2, 1)},
    "shared": {"fusion": "joint", "joint": JointSpec(8, 2, 1, shared=True)},
    "multiway": {"encoder_sharing": "multiway"},
    "multiway joint": {"encoder_sharing": "multiway", "fusion": "joint", "joint": JointSpec(8, 2, 1)},
}


def test_a_stand_in_of_zeros_does_not_count_in_a_mean():
    # acc knows the first two classes, the others the last two: from acc alone nothing can be found for them
    spec = three_sensors(fusion="mean")
    model, parts = some_state(spec)
    tables = from_tensors(parts["prototypes"])
    known = np.array([1, 1, 0, 0], np.float32)
    tables = {m: ClassMeans(t.means, known if m == "acc" else 1 - known) for m, t in tables.items()}
    parts["prototypes"] = to_tensors(tables)
    data = labelled(spec)
    only = Dataset({"acc": data.modalities["acc"]}, {"acc": np.ones(40, bool)}, data.labels, LABELS, data.ids)
    by_prototype, by_zeros = (
        judge(model, only, 1, tables, NAMES, Criteria(mask=mask)) for mask in ("prototype", "zero")
    )
    assert by_prototype == by_zeros
    answers = in_torch(model, _all_lack(data, "gyro", "press"), parts, "prototype")
    assert (answers.argmax(1) == data.labels).mean() == by_zeros["accuracy"]


def _all_lack(data: Dataset, *names: str) -> Dataset:
    present = {m: np.full(len(data), m not in names) for m in data.present}
    return Dataset(data.modalities, present, data.labels, data.label_names, data.ids)


def in_torch(model: StagedModel, data: Dataset, parts: Parts, mask: str) -> np.ndarray:
    """What the graph answers before its export, each sample by what it has."""
    tables = {} if mask == "reconstruction" else from_tensors(parts["prototypes"])
    make = method("missing", "prototype" if tables else mask).make  # a mask of zeros is one whose tables hold no row
    graph = BundleGraph(model, 1, NAMES, make)
    inputs = tuple(torch.from_numpy(data.modalities[m]) for m in NAMES)
    presence = tuple(torch.from_numpy(data.present[m].astype(np.float32)) for m in NAMES)
    shown: list[torch.Tensor] = []
    for table in tables.values():
        shown += [torch.from_numpy(table.means), torch.from_numpy(table.present & (mask == "prototype"))]
    with torch.no_grad():
        return graph(inputs, presence, tuple(shown))[0].numpy()


@pytest.mark.parametrize("mask", ["zero", "prototype", "reconstruction"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_answers_each_sample_as_the_evaluation_does(way: str, mask: str):
    spec = three_sensors(**WAYS[way], reconstruction=mask == "reconstruction")
    model, parts = some_state(spec)
    data = labelled(spec)
    labels = in_torch(model, data, parts, mask).argmax(1)
    tables = from_tensors(parts["prototypes"]) if mask == "prototype" else {}
    answered = Dataset(data.modalities, data.present, labels, data.label_names, data.ids)
    agreed = judge(model, answered, 1, tables, NAMES, Criteria(mask=mask))
    assert agreed["accuracy"] == 1.0

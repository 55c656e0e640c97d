"""The verbs `edgefl export` and `edgefl predict`, as a user types them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from export_fixture import LABELS, exported, sensor, stage_of, windows

from coordinator.core.moves import SavedRound, SaveEnd
from coordinator.ledger.ledger import Ledger
from edgefl.cli.main import main
from edgefl.cli.predict import _notes, read_input
from edgefl.cli.scored import Seen, accuracy, averages
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, EdgeFLError, ExportError
from edgefl.export.bundle_format import MODEL_FILE, Index, Manifest, read_manifest
from edgefl.export.drafts import Draft
from edgefl.export.runtime import Answers, Prediction, choose, find_bundles, load_bundle
from edgefl.plan.job import RunPlan
from edgefl.protocol.tensors import encode_part
from edgefl.storage.objects import ObjectStore


def edgefl(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], error: type[EdgeFLError], *words: object) -> str:
    """What the command said when it ended with the error's exit code and no traceback."""
    assert edgefl(*words) == error.exit_code
    said = capsys.readouterr().err
    assert "what to do:" in said
    assert "Traceback" not in said
    return said


def samples(count: int = 8, *, labels: bool = True) -> Dataset:
    """Sample 0 has only acc, sample 1 only gyro, the others both; labels are what the complete bundle answers."""
    spec = exported().spec
    arrays = windows(spec, count)
    present = {m: np.ones(count, dtype=bool) for m in arrays}
    truth = load_bundle(exported().directory / "acc+gyro").predict(arrays).classes
    for m, row in (("gyro", 0), ("acc", 1)):
        present[m][row] = False
        arrays[m][row] = 0
    return Dataset(
        arrays, present, truth if labels else None, LABELS if labels else (), [f"w{i}" for i in range(count)]
    )


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "test.npz"
    samples().save_npz(path)
    return path


# edgefl predict


def test_each_sample_goes_to_the_bundle_that_takes_what_it_has(npz: Path, capsys: pytest.CaptureFixture[str]):
    assert edgefl("predict", exported().directory, npz, "--format", "json") == 0
    body = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in body["predictions"]] == [f"w{i}" for i in range(8)]
    assert [entry["bundle"] for entry in body["predictions"]] == ["acc", "gyro"] + ["acc+gyro"] * 6
    assert body["by_bundle"]["acc+gyro"] == {"samples": 6, "accuracy": 1.0, "mask": "none"}
    right = [entry["label"] == entry["truth"] for entry in body["predictions"]]
    assert body["accuracy"] == sum(right) / 8
    first = body["predictions"][0]
    assert sum(match["weight"] for match in first["matched"]["gyro"]) == pytest.approx(1, abs=1e-5)
    assert {match["label"] for match in first["matched"]["gyro"]} == {"run", "swim"}
    assert first["probability"] == max(first["probabilities"].values()) == first["probabilities"][first["label"]]


def test_the_table_names_label_truth_bundle_and_accuracy(npz: Path, capsys: pytest.CaptureFixture[str]):
    assert edgefl("predict", exported().directory, npz, "--limit", 3) == 0
    out = capsys.readouterr().out
    for word in ("sample", "label", "probability", "truth", "acc+gyro", "3 of 8 samples shown", "Accuracy"):
        assert word in out
    assert "w3" not in out


def test_one_bundle_leaves_out_samples_it_can_not_take(npz: Path, capsys: pytest.CaptureFixture[str]):
    assert edgefl("predict", exported().directory / "gyro", npz, "--format", "json", "--bad-samples", "skip") == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body["answered"] == 7
    assert "w0" not in {entry["id"] for entry in body["predictions"]}
    assert "left out" in captured.err


def test_without_labels_there_is_no_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    samples(labels=False).save_npz(tmp_path / "x.npz")
    assert edgefl("predict", exported().directory, tmp_path / "x.npz", "--format", "json", "--limit", 2) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["accuracy"] is None
    assert [entry["truth"] for entry in body["predictions"]] == [None, None]
    assert edgefl("predict", exported().directory, tmp_path / "x.npz") == 0
    assert "truth" not in capsys.readouterr().out


def test_the_zero_mask_by_option(npz: Path, capsys: pytest.CaptureFixture[str]):
    command = ("predict", exported().directory, npz, "--modality", "acc", "--bad-samples", "skip", "--format", "json")
    assert edgefl(*command, "--mask", "zero") == 0
    zero = json.loads(capsys.readouterr().out)
    assert zero["predictions"][0]["matched"] == {"gyro": []}
    assert set(zero["by_bundle"]) == {"acc"}
    data = samples()
    expected = load_bundle(exported().directory / "acc").predict({"acc": data.modalities["acc"][:1]}, mask="zero")
    assert zero["predictions"][0]["label"] == expected.labels[0]


def test_a_folder_with_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    x = windows(exported().spec, 1)
    np.save(tmp_path / "a.npy", x["acc"][0])
    lines = [
        {"id": "both", "label": "swim", "acc": "a.npy", "gyro": x["gyro"][0].tolist()},
        {"id": "one", "acc": "a.npy"},
    ]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert edgefl("predict", exported().directory, tmp_path, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert [(entry["id"], entry["bundle"], entry["truth"]) for entry in found] == [
        ("both", "acc+gyro", "swim"),
        ("one", "acc", None),
    ]


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_a_single_sample_is_recognised_by_its_shape(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]):
    x = windows(exported().spec, 1)["gyro"]
    path = tmp_path / f"sample.{suffix}"
    np.save(path, x[0]) if suffix == "npy" else np.savetxt(path, x[0], delimiter=",", fmt="%.9g")
    assert edgefl("predict", exported().directory, path, "--format", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    expected = load_bundle(exported().directory / "gyro").predict({"gyro": x})
    assert (found["id"], found["bundle"], found["label"]) == (path.name, "gyro", expected.labels[0])
    assert found["probability"] == pytest.approx(float(expected.probabilities.max()), abs=1e-6)


def test_several_files_are_one_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    x = windows(exported().spec, 1)
    for m, array in x.items():
        np.save(tmp_path / f"{m}.npy", array[0])
    files = (tmp_path / "acc.npy", f"gyro={tmp_path / 'gyro.npy'}")
    assert edgefl("predict", exported().directory, *files, "--format", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    expected = load_bundle(exported().directory / "acc+gyro").predict(x)
    assert (found["id"], found["bundle"], found["label"]) == ("acc.npy+gyro.npy", "acc+gyro", expected.labels[0])
    assert "are both acc" in refused(capsys, DataError, "predict", exported().directory, *[tmp_path / "acc.npy"] * 2)


def test_a_sample_that_fits_two_modalities_needs_a_word(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((12, 3), np.float32))
    known = {"acc": sensor(), "ankle": sensor()}
    with pytest.raises(DataError, match=r"may be acc or ankle") as raised:
        read_input([str(tmp_path / "x.npy")], known, LABELS, [], "error")
    assert "--modality acc" in raised.value.remedy
    assert list(read_input([str(tmp_path / "x.npy")], known, LABELS, ["ankle"], "error").modalities) == ["ankle"]


def test_bad_input_is_named(tmp_path: Path, npz: Path, capsys: pytest.CaptureFixture[str]):
    bundles = exported().directory
    np.save(tmp_path / "odd.npy", np.zeros((7, 7), np.float32))
    np.savez(tmp_path / "wide.npz", acc=np.zeros((2, 12, 4), np.float32))
    np.savez(tmp_path / "other.npz", heart=np.zeros((2, 12, 4), np.float32))
    np.savez(tmp_path / "gyro.npz", gyro=np.zeros((2, 10, 2), np.float32))
    (tmp_path / "a.mp4").write_bytes(b"")
    for file, said in (
        (tmp_path / "odd.npy", "acc: has shape [7, 7], the encoder takes [12, 3]"),
        (tmp_path / "wide.npz", "samples of 'acc' have shape [12, 4], the encoder takes [12, 3]"),
        (tmp_path / "other.npz", "no modality called acc or gyro"),
        (tmp_path / "a.mp4", "cannot be read"),
        (tmp_path / "nothing.npz", "there is no such file"),
        (tmp_path / "nothing", "does not exist"),
    ):
        assert said in refused(capsys, DataError, "predict", bundles, file)
    np.save(tmp_path / "walk.npy", np.zeros((100, 3), np.float32))
    assert "Cut it into pieces" in refused(capsys, DataError, "predict", bundles, tmp_path / "walk.npy")
    assert "no modality called acc" in refused(capsys, DataError, "predict", bundles / "acc", tmp_path / "gyro.npz")
    assert "no bundle takes heart" in refused(capsys, DataError, "predict", bundles, npz, "--modality", "heart")


def test_a_missing_or_damaged_bundle_is_named(tmp_path: Path, npz: Path, capsys: pytest.CaptureFixture[str]):
    assert "there is no bundle" in refused(capsys, ExportError, "predict", tmp_path / "nowhere", npz)
    copy = Path(shutil.copytree(exported().directory, tmp_path / "bundles"))
    data = bytearray((copy / "acc" / MODEL_FILE).read_bytes())
    data[100] ^= 1
    (copy / "acc" / MODEL_FILE).write_bytes(data)
    assert "is damaged: sha256" in refused(capsys, ExportError, "predict", copy, npz)


def test_a_run_stands_for_its_bundles(tmp_path: Path, npz: Path, capsys: pytest.CaptureFixture[str]):
    runs, words = tmp_path / "runs", (npz, "--format", "json", "--runs", tmp_path / "runs")
    said = refused(capsys, ExportError, "predict", "latest", *words)
    assert "there is no bundle latest: there is no run in" in said
    shutil.copytree(exported().directory, runs / "demo-1" / "bundles")
    (runs / "demo-1" / "ledger.sqlite").touch()
    for name in ("latest", "demo", "demo-1"):
        assert edgefl("predict", name, *words) == 0
        assert len(json.loads(capsys.readouterr().out)["predictions"]) == 8
    (runs / "demo-2").mkdir()
    (runs / "demo-2" / "ledger.sqlite").touch()  # the newest, made with --no-export
    os.utime(runs / "demo-2" / "ledger.sqlite", (future := time.time() + 60, future))
    os.utime(runs / "demo-2", (future, future))
    assert edgefl("predict", "latest", *words) == 0
    assert "demo-2 has no bundles; these are of demo-1, the newest run that has" in capsys.readouterr().err
    assert "the run demo-2 has no bundles" in refused(capsys, ExportError, "predict", "demo-2", *words)
    shutil.rmtree(runs / "demo-2")
    said = refused(capsys, ExportError, "predict", "demi", *words)
    assert "no run 'demi'" in said
    assert "Runs there: demo-1" in said
    shutil.rmtree(runs / "demo-1" / "bundles")
    said = refused(capsys, ExportError, "predict", "latest", *words)
    assert f"the run demo-1 has no bundles\nwhat to do: Write them: edgefl export demo-1 --runs {runs}" in said


def test_a_score_on_samples_that_a_run_trained_on_is_told_from_its_test(
    tmp_path: Path, npz: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "runs" / "demo"
    shutil.copytree(exported().directory, run / "bundles")
    data = samples()
    data.subset([2, 3, 4]).save_npz(run / "shares" / "test.npz")
    data.subset([1, 5, 6]).save_npz(run / "shares" / "device-1.npz")
    wrong = np.where(np.arange(8) == 3, (data.labels + 1) % len(LABELS), data.labels)
    dataclasses.replace(data, labels=wrong).save_npz(npz)
    for folder in (run / "bundles", run / "bundles" / "acc+gyro"):
        assert edgefl("predict", folder, npz, "--bad-samples", "skip", "--format", "json") == 0
        body = json.loads(capsys.readouterr().out)
        assert (body["trained_on"], body["held_out"]["samples"]) == (3, 3)
        assert body["held_out"]["accuracy"] == pytest.approx(2 / 3)
    assert edgefl("predict", run / "bundles", npz) == 0
    assert "The run trained on 3 of them. On the 3 of its test set: Accuracy 66.7 %" in capsys.readouterr().out
    assert edgefl("predict", run / "bundles", run / "shares" / "test.npz", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["held_out"] is None
    assert edgefl("predict", run / "bundles", run / "shares" / "device-1.npz") == 0
    assert "The run trained on 3 of them. New ones may be answered worse." in capsys.readouterr().out
    dataclasses.replace(data, ids=[f"new{i}" for i in range(8)]).save_npz(npz)
    assert edgefl("predict", run / "bundles", npz, "--bad-samples", "skip", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["trained_on"] == 0


def test_the_bundle_with_most_of_what_is_there_is_chosen():
    names = (("a",), ("b",), ("c",), ("a", "b", "c"))
    bundles = {Path("+".join(given)): Manifest(modalities=given) for given in names}
    assert choose(bundles, frozenset("abc")) == Path("a+b+c")
    assert choose(bundles, frozenset("bc")) is None  # neither b nor c may drop the other
    assert choose(bundles, frozenset("c")) == Path("c")
    assert choose(bundles, frozenset("x")) is None


def test_averages_are_over_the_answers_of_all_bundles():
    """Truth x y x, the fourth has none: "y" of x, .6 and .1, are 1 and 0 below that of y, .5: half of the pairs."""
    labels = np.array([0, 1, 0, -1])
    data = Dataset({"a": np.zeros((4, 1), np.float32)}, {"a": np.ones(4, bool)}, labels, ("x", "y"), [*"1234"])
    first = Prediction(classes=np.array([1, 0]), probabilities=np.array([[0.4, 0.6], [0.9, 0.1]], np.float32))
    other = Prediction(classes=np.array([0, 0]), probabilities=np.array([[0.5, 0.5], [1, 0]], np.float32))
    answers = [Answers("a", ("a",), np.array([0, 2]), first), Answers("b", ("a",), np.array([1, 3]), other)]
    assert averages(data, answers) == {"macro_f1": pytest.approx(0.25), "macro_auroc": pytest.approx(0.5)}
    assert averages(data.subset([3]), answers[:0]) == {}
    assert _notes(data, Seen(), answers, 4)[0].endswith(", macro F1 25.0 %, macro AUROC 50.0 %.")


def test_accuracy_counts_labelled_samples_only():
    data = Dataset(
        {"a": np.zeros((4, 1), np.float32)}, {"a": np.ones(4, bool)}, np.array([0, 1, -1, 1]), ("x", "y"), [*"1234"]
    )
    answers = [
        Answers("a", ("a",), np.array([0, 2]), Prediction(classes=np.array([0, 1]))),
        Answers("b", ("a",), np.array([1, 3]), Prediction(classes=np.array([0, 1]))),
    ]
    assert accuracy(data, answers) == pytest.approx(2 / 3)
    unlabelled = data.subset([2])
    assert accuracy(unlabelled, [Answers("a", ("a",), np.array([0]), Prediction(classes=np.array([0])))]) is None


# edgefl export


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs with one, r1, whose first round of stage 2 is done; and r2, which has no finished round."""
    spec = exported().spec
    for run, done in (("r1", True), ("r2", False)):
        store = ObjectStore(tmp_path / run / "objects")
        manifest = {name: store.put(encode_part(tensors)) for name, tensors in exported().parts.items()}
        plan = RunPlan(run=run, name=run, recipe="test", model=spec, stages=(stage_of(spec, 1), stage_of(spec)))
        with Ledger(tmp_path / run / "ledger.sqlite") as ledger:
            ledger.create(plan, manifest, {}, 1.0)
            if done:
                ledger.commit(run, [SavedRound(2, 1, 1, "done", manifest=manifest)], [], 2.0)
                ledger.commit(run, [SaveEnd("done")], [], 3.0)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes seconds: the state is that of the fixture, so its files are what the exporter would write."""

    def known(draft: Draft, *_rest: object) -> bytes:
        return (exported().directory / draft.manifest.name / MODEL_FILE).read_bytes()

    monkeypatch.setattr("edgefl.export.tracing.to_onnx", known)


@pytest.mark.usefixtures("quick")
def test_export_writes_bundles_into_the_run_and_notes_them(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert edgefl("export", "r1", "--runs", runs, "--capacity", 6, "--format", "json") == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert (body["run"], body["stage"], body["round"], body["mask"]) == ("r1", 2, 1, "both")
    assert "exporting run r1 after stage 2 of 2, round 1 of 1" in captured.err
    assert "bundle 3 of 3: acc+gyro" in captured.err
    folder = runs / "r1" / "bundles"
    assert [row["path"] for row in body["bundles"]] == [str(path / MODEL_FILE) for path in find_bundles(folder)]
    index = msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)
    assert [row.name for row in index.bundles] == ["acc", "gyro", "acc+gyro"]
    parts = read_manifest(folder / "acc").parts
    assert set(parts) == {p for p in stage_of(exported().spec).present if "gyro" not in p} | {"prototypes"}
    with Ledger(runs / "r1" / "ledger.sqlite") as ledger:
        assert {row.path for row in ledger.report("r1").bundles} == {
            f"bundles/{r.name}/{MODEL_FILE}" for r in index.bundles
        }


@pytest.mark.usefixtures("quick")
def test_export_elsewhere_as_a_table(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ("export", "r1", "--runs", runs, "-o", tmp_path / "out", "--capacity", 6)
    assert edgefl(*command) == 0
    out = capsys.readouterr().out
    assert "Exported bundles" in out
    assert "acc + gyro" in out
    assert edgefl(*command) == 0  # an earlier export is replaced
    assert not (runs / "r1" / "bundles").exists()


def test_export_names_what_is_missing(runs: Path, capsys: pytest.CaptureFixture[str]):
    from edgefl.errors import ExportError, RunError, StoreError

    assert "has not finished a round" in refused(capsys, RunError, "export", "r2", "--runs", runs)
    assert "no run 'x'" in refused(capsys, RunError, "export", "x", "--runs", runs)
    assert "no room for 4 classes" in refused(capsys, ExportError, "export", "r1", "--runs", runs, "--capacity", 2)
    (runs / "r1" / "thesis.tex").write_text("")
    said = refused(capsys, ExportError, "export", "r1", "--runs", runs, "-o", runs / "r1")
    assert "not an earlier export" in said
    shutil.rmtree(runs / "r1" / "objects")
    assert "cannot read" in refused(capsys, StoreError, "export", "r1", "--runs", runs)

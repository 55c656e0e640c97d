"""examples/edgefl_extra, a package of its own: beside EdgeFL its methods, encoder and data train over MQTT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.ledger.ledger import Ledger
from device_agent.trainer.local_trainer import _lacking
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.job import Job, Slots
from edgefl.protocol.tensors import decode_part
from edgefl.storage.objects import ObjectStore

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "edgefl_extra"


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed too."""
    target = tmp_path_factory.mktemp("extra")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(EXAMPLE)], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}


def ran(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgefl.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_it_brings_trains_over_a_broker_and_is_exported(beside: dict[str, str], tmp_path: Path):
    settings = ["--set", "training.rounds=[1,1]", "--set", "slots.cluster=pacfl", "--trainers", "1", "--no-page"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), "--runs", str(tmp_path), "--format", "json", *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "done"
    recipe = report["config"]["recipe"]
    assert (recipe["objective"], recipe["select"]) == (
        {"focal": {"weight": 1.0, "gamma": 2.0}},
        {"cyclic": {"share": 0.5}},
    )
    assert report["config"]["run"]["model"]["encoders"]["upper"]["kind"] == "conv_sensor"
    (run,) = tmp_path.iterdir()
    predicted = ran(beside, "predict", str(run / "bundles"), str(run / "shares" / "test.npz"), "--format", "json")
    assert predicted.returncode == 0, predicted.stderr
    first, second = ({row["device"] for row in report["assignments"] if row["round"] == number} for number in (1, 2))
    assert (first, second) == ({"east", "north"}, {"south", "west"})
    grouped = [round_["record"]["clusters"].keys() for round_ in report["rounds"]]  # by the bases that each has sent
    assert grouped == [first, first | second]
    assert not any(round_["record"]["refused"] for round_ in report["rounds"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_fusion_stand_ins_and_feddyn_train_a_fleet_over_a_broker(beside: dict[str, str], tmp_path: Path):
    chosen = ["slots.schedule=end_to_end", "slots.select=all", "slots.fusion=gated", "slots.weight=equal"]
    chosen += ["slots.missing={learned_token: {spread: 0}}", "data.missing={rate: 0.3}", "training.rounds=[2, 0]"]
    chosen += ["slots.objective={cross_entropy: {}, feddyn: {}}", "slots.optimise=feddyn"]
    chosen += ["fleet=[{name: north}, {name: south}]"]
    settings = [word for one in chosen for word in ("--set", one)]
    options = ["--runs", str(tmp_path), "--format", "json", "--trainers", "1", "--no-page", "--no-export"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), *options, *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for round_ in report["rounds"]:
        assert not round_["record"]["refused"]
        assert {"fusion", "missing"} < round_["record"]["parts"].keys()
        assert round_["record"]["feddyn"] == {"part": 1.0}
    masks = {row["missing"] for row in report["evaluations"] if row["available"] == ["upper"]}
    assert masks == {"zero", "learned_token"}
    (run,) = tmp_path.iterdir()
    with Ledger(run / "ledger.sqlite", create=False) as ledger:
        states = ledger.states(report["run"])
    store, last = ObjectStore(run / "objects"), states[max(states)]
    (tokens,) = decode_part(store.read(last["missing"].id)).values()
    assert np.abs(tokens).max(axis=1).min() > 1e-3  # each began as zeros
    assert all(np.abs(h).max() > 0 for h in decode_part(store.read(last["server/optimise/fusion"].id)).values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_fusion_trains_a_fleet_over_a_broker_and_answers_with_one_modality(beside: dict[str, str], tmp_path: Path):
    chosen = ["slots.select=all", "slots.objective=cross_entropy", "slots.fusion={gated: {gate: sigmoid}}"]
    chosen += ["slots.missing={learned_token: {drop: 0.2}}"]
    chosen += ["data.missing={rate: 0.3}", "training.rounds=[0, 2]"]
    settings = [word for one in chosen for word in ("--set", one)]
    options = ["--runs", str(tmp_path), "--format", "json", "--trainers", "1", "--no-page"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), *options, *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["config"]["recipe"]["fusion"] == {"gated": {"gate": "sigmoid"}}
    assert not any(round_["record"]["refused"] for round_ in report["rounds"])
    (run,) = tmp_path.iterdir()
    bundles = json.loads((run / "bundles" / "index.json").read_text())["bundles"]
    assert [row["name"] for row in bundles] == ["upper", "lower", "upper+lower"]
    assert max(row["max_difference"] for row in bundles) < 1e-4
    with np.load(run / "shares" / "test.npz") as test:
        np.savez(tmp_path / "upper.npz", **{name: test[name] for name in test.files if not name.startswith("lower")})
    command = ("predict", str(run / "bundles" / "upper+lower"), str(tmp_path / "upper.npz"), "--format", "json")
    done = ran(dict(os.environ), *command)  # a bundle needs no package
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert {tuple(row["given"]) for row in answers["predictions"]} == {("upper",)}
    (alone,) = (
        row["value"]
        for row in report["evaluations"]
        if (row["round"], row["available"], row["missing"], row["metric"])
        == (2, ["upper"], "learned_token", "accuracy")
    )
    assert answers["accuracy"] == pytest.approx(alone, abs=0.01)


@pytest.mark.slow
def test_its_fusion_is_priced(beside: dict[str, str]):
    """Of two modalities: 2 maps d w + w and gates 2 d x 2 w + 2 w, in place of layers 2 d w + w and w w + w."""
    d, w, found = 256, 128, {}
    for fusion in ("concat", "gated"):
        settings = (
            "--set",
            f"slots.fusion={fusion}",
            "--set",
            f"model.head.out={d}",
            "--set",
            f"model.fusion_width={w}",
        )
        done = ran(beside, "plan", str(EXAMPLE / "run.yaml"), *settings, "--format", "json")
        assert done.returncode == 0, done.stderr
        found[fusion] = json.loads(done.stdout)["schedules"][0]["memory"]["weights"]
    gated, concat = 2 * (d * w + w) + 4 * d * w + 2 * w, 2 * d * w + w + w * w + w
    assert found["gated"] - found["concat"] == 4 * (gated - concat)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_upload_and_pace_train_a_fleet_over_a_broker(beside: dict[str, str], tmp_path: Path):
    """Each device sends one modality a round, and the stage ends before its planned rounds."""
    pace = "slots.pace={smartfreeze: {window: 2, slope: 0.5, patience: 2}}"
    upload = "slots.upload={mfedmc: {recency: 2}}"  # more than impact and size together: each modality has its turn
    chosen = ["slots.schedule=end_to_end", "slots.select=all", "slots.objective=cross_entropy", upload, pace]
    settings = [word for one in [*chosen, "training.rounds=[6, 0]"] for word in ("--set", one)]
    options = ["--runs", str(tmp_path), "--format", "json", "--trainers", "1", "--no-page", "--no-export"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), *options, *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["record"]["stage"]["over"] for row in report["rounds"]] == [False, False, True]
    model = {row["measured"]["payload_down_bytes"]["value"] for row in report["assignments"] if row["round"] == 1}
    assert len(model) == 1, "all of it is trained, and without an upload it would come back"
    for row in report["assignments"]:
        sent, most = (row[which]["payload_up_bytes"]["value"] for which in ("measured", "predicted"))
        assert sent <= most < 0.8 * min(model)
    turns: dict[str, set[str]] = {}
    for round_ in report["rounds"]:
        parts = {part: told["devices"].keys() for part, told in round_["record"]["parts"].items()}
        assert parts["task"] == parts["fusion"] == {"north", "east", "south", "west"}
        assert not round_["record"]["refused"]
        for device in parts["task"]:
            mine = {part for part in parts if device in parts[part]} - {"task", "fusion"}
            (modality,) = {part.removeprefix("head/").partition("/")[0] for part in mine}
            assert {f"head/{modality}", f"{modality}/embed", f"{modality}/stage2"} < mine
            turns.setdefault(device, set()).add(modality)
    assert list(turns.values()) == [{"upper", "lower"}] * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_private_combination_trains_a_fleet_over_a_broker(beside: dict[str, str], tmp_path: Path):
    chosen = ["recipe=dp-fedavg", "slots.objective=cross_entropy", "slots.select=all", "training.rounds=[3, 0]"]
    chosen += ["slots.combine={adaptive_clip: {noise: 2, epsilon: 3}}", "fleet=[{name: north}, {name: south}]"]
    settings = [word for one in chosen for word in ("--set", one)]
    options = ["--runs", str(tmp_path), "--format", "json", "--trainers", "1", "--no-page", "--no-export"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), *options, *settings)
    assert done.returncode == 0, done.stderr
    rounds = [row["record"] for row in json.loads(done.stdout)["rounds"]]
    assert [row["account"]["epsilon"] for row in rounds] == pytest.approx([1.993, 2.943], abs=1e-3)  # three: 3.7
    clips = [row["screened"]["bound"] for row in rounds]
    assert clips[0] == 0.1 != clips[1] == rounds[0]["screened"]["next"]
    assert [row["noise"]["deviation"] for row in rounds] == pytest.approx([2 / 0.9**0.5 * c / 2 for c in clips])


def test_its_options_are_checked_like_our_own(beside: dict[str, str]):
    done = ran(beside, "plan", str(EXAMPLE / "run.yaml"), "--set", "slots.objective={focal: {gama: 1}}")
    assert done.returncode == 10
    assert "focal has no option 'gama'; did you mean 'gamma'?" in " ".join(done.stderr.split())
    done = ran(beside, "plan", str(EXAMPLE / "run.yaml"), "--set", "slots.select={banzhaf_sampled: {samples: 0}}")
    assert done.returncode == 10
    assert "banzhaf_sampled.samples is 0; give a number from 1 upwards" in " ".join(done.stderr.split())


def test_without_it_its_names_are_unknown():
    done = ran(dict(os.environ), "plan", str(EXAMPLE / "run.yaml"))
    assert done.returncode == 10
    assert "unknown choice 'focal'" in " ".join(done.stderr.split())


def test_without_it_its_kind_of_encoder_is_refused_with_what_is_installed(tmp_path: Path):
    settings = ["data.source=basic_motions", "slots={}", "model.encoders={acc: {kind: conv_sensor}}"]
    overrides = [word for one in settings for word in ("--set", one)]
    done = ran(dict(os.environ), "plan", str(EXAMPLE / "run.yaml"), *overrides)
    assert done.returncode == 10
    told = " ".join(done.stderr.split())
    assert "unknown kind 'conv_sensor'" in told
    assert "valid: sensor, table, vision, text, audio" in told


def test_its_kind_of_encoder_reads_no_files(beside: dict[str, str]):
    program = (
        "from edgefl.data.readers import target; from edgefl.models.check import encoder_of_size; import sys; "
        "kind = encoder_of_size('conv_sensor', 'tiny', (8, 3)); assert 'torch' not in sys.modules; target(kind)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=beside, capture_output=True, text=True, timeout=60)
    assert "files are not read for an encoder of kind 'conv_sensor'" in done.stderr


def test_a_device_without_a_kind_of_encoder_refuses_in_words():
    upper, lower = EncoderSpec("conv_sensor", (4, 8)), EncoderSpec("sensor", (4, 8))
    told = _lacking(Job(model=ModelSpec({"upper": upper, "lower": lower})))
    kinds = "sensor, table, vision, text, audio"  # and those that other tests of this process have made
    assert told.startswith(f"on this device: encoder kind 'conv_sensor' is unknown; installed: {kinds}")


def test_a_device_without_an_upload_refuses_in_words():
    assert _lacking(Job(slots=Slots(upload={"mfedmc": {}}))) == "not installed on this device: upload: mfedmc"


def test_a_device_without_a_fusion_refuses_in_words():
    assert _lacking(Job(model=ModelSpec(fusion="gated"))) == "not installed on this device: fusion: gated"


def test_a_device_without_the_method_behind_a_signature_refuses_in_words():
    assert _lacking(Job(signature="sketch")) == ""
    assert _lacking(Job(signature="bases")) == "not installed on this device: signature: bases"


def test_a_package_that_does_not_load_is_named_to_who_asks_for_its_method(tmp_path: Path):
    info = tmp_path / "torn-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[edgefl.methods]\ntorn = torn_package\n")
    (tmp_path / "torn_package.py").write_text("raise RuntimeError('no libtorn.so')\n")
    program = "from edgefl.registry import method, methods; methods('weight'); method('weight', 'torn')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "unknown method 'torn' (package torn has it but does not load: RuntimeError: no libtorn.so)" in done.stderr
    program = "from edgefl.registry import not_installed; print(not_installed({'cluster': {'lsh': {}}}, 'bases'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    why = "package torn has it but does not load: RuntimeError: no libtorn.so"
    assert done.stdout == f"not installed on this device: signature: bases; {why}\n"

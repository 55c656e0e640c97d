"""The claims' studies: run files load, tuning is fair and blind to the test, and verdicts follow from intervals."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from data_fixture import needed
from memory_fleet import share
from report_fixture import run_report

from benchmarks.accuracy.claims import __main__ as program
from benchmarks.accuracy.claims import carry, page, test_set_worker, tuning
from benchmarks.accuracy.claims.judge import BASELINES, MEASURES, SMALLER, Comparison, claims_of, judged, verdict
from benchmarks.accuracy.claims.outcome import Outcome, Point, Results, curve_of, outcome_of, own
from benchmarks.accuracy.claims.page import write
from benchmarks.accuracy.claims.study import FOLDER, TUNING_SEED, Cell, Study, Trial, digest, set_field
from benchmarks.common.exclusive import claimed
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.run_records import AssignmentRow

#: Whose rounds are what a claim compares.
OTHER_ROUNDS = {"lw-fedmml-even"}
PAPERS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture(params=PAPERS)
def study(request) -> Study:
    return Study(request.param)


def loaded(values, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return load_run(str(tmp_path / "run.yaml"))


def test_every_method_of_a_task_is_a_run_file_that_loads(study, tmp_path):
    cells = [cell for cell in study.cells() if cell.seed == study.seeds[0]]
    assert {cell.task for cell in cells} == set(study.tasks)
    assert {cell.method for cell in cells} == set(study.methods)
    for cell in {(cell.task, cell.method): cell for cell in cells}.values():
        for trial in study.trials(study.tuned_as(cell))[-1:]:
            config, recipe = loaded(study.run_file(cell, trial.settings), tmp_path)
            assert (config.seed, recipe.name) == (cell.seed, study.methods[cell.method]["recipe"])
            assert config.training.lr.head == trial.settings["lr"]


def test_every_claim_compares_cells_that_are_run(study):
    cells = {(cell.task, cell.condition, cell.method) for cell in study.cells()}
    claims = claims_of(study.values)
    assert claims
    for one in (comparison for claim in claims for comparison in claim.comparisons):
        conditions = {one.condition, *([one.falling] if one.falling else [])}
        assert {(one.task, c, m) for c in conditions for m in (one.left, one.right)} <= cells
        assert one.measure in MEASURES
        assert isinstance(one.bound, float | int) or one.bound in {"", *BASELINES, *study.methods}
        assert not one.right_measure or one.right_measure in MEASURES


def test_fedmvps_parts_are_switched_off_in_the_setting_that_tuning_chose():
    study = Study("fedmvp")
    cell = next(cell for cell in study.cells() if cell.method == "fedmvp")
    whole = tuning.chosen(study, cell, Results(program.RESULTS / "fedmvp-tuning.jsonl"))["slots.objective"]
    for part in ("mcm", "ram"):
        left = study.methods[f"fedmvp-{part}"]["set"]["slots.objective"]
        assert left == {name: value for name, value in whole.items() if name != part}


def test_every_method_has_as_many_settings_to_try(study):
    for task in study.tasks:
        tuned = {study.tuned_as(cell) for cell in study.cells() if cell.task == task}
        assert set(Counter(len(study.trials(cell)) for cell in tuned)) == {study.values["tuning"]["settings"]}
        for cell in tuned:
            trials = study.trials(cell)
            assert len({trial.key for trial in trials}) == len(trials)
            assert cell.seed == TUNING_SEED not in study.seeds
            assert len(study.finals(trials)) == study.values["tuning"]["finals"]


def test_data_rounds_and_share_of_a_task_are_the_same_for_every_method(study):
    for task in study.tasks:
        first = study.seeds[0]
        for condition in study.tasks[task]["conditions"]:
            cells = [c for c in study.cells() if (c.task, c.condition, c.seed) == (task, condition, first)]
            made = {
                c.method: study.run_file(c, {"lr": 1e-3}) for c in cells if not study.methods[c.method].get("alone")
            }
            files = list(made.values())
            for field in ("data", "round", "evaluate"):
                assert all(file[field] == files[0][field] for file in files)
            names = [[device["name"] for device in file["fleet"]] for file in files]
            assert all(each == names[0] for each in names)
            assert len({str(file["training"]) for method, file in made.items() if method not in OTHER_ROUNDS}) == 1
            assert len({sum(file["training"]["rounds"]) for file in files}) == 1


def test_a_trial_sees_no_test_set_and_a_third_of_the_rounds(study):
    cell = study.tuned_as(next(study.cells()))
    trial = study.trials(cell)[0]
    values = study.trial_file(trial, "train.npz")
    assert values["data"]["source"] == "train.npz"
    assert "test" not in values["data"]
    rounds = study.tasks[cell.task]["run"]["training"]["rounds"]
    assert values["training"]["rounds"] == [n // 3 for n in rounds]
    assert study.trial_file(trial._replace(short=False), "train.npz")["training"]["rounds"] == rounds


def test_a_quick_study_has_one_seed_and_a_sixth_of_the_rounds(study):
    quick, cell = Study(study.paper, quick=True), next(study.cells())
    assert {one.seed for one in quick.cells()} == {study.seeds[0]}
    whole, part = (one.run_file(cell, {"lr": 1e-3}) for one in (study, quick))
    assert part["training"].pop("rounds") == [-(-n // 6) for n in whole["training"].pop("rounds")]
    assert part == whole
    trial = study.trials(study.tuned_as(cell))[0]._replace(short=False)
    assert quick.trial_file(trial, "data.npz") == study.trial_file(trial, "data.npz")


def test_half_of_the_devices_are_incomplete():
    mmic = Study("mmic")
    missing = mmic.run_file(Cell("mmic", "har", "mm50-mc50", "mmic", 1), {"lr": 1e-3})["data"]["missing"]
    assert (missing["rate"], missing["lose"], len(missing["complete"])) == (0.5, "one", 15)
    missing = mmic.run_file(Cell("mmic", "har", "mm20-mc30", "mmic", 1), {"lr": 1e-3})["data"]["missing"]
    assert len(missing["complete"]) == 21


def test_a_variant_changes_what_was_tuned_for_the_other():
    mmic = Study("mmic")
    cell = Cell("mmic", "har", "mm50-mc50", "mmic-static", 1)
    assert mmic.tuned_as(cell).method == "fedadagrad"
    slots = mmic.run_file(cell, {"lr": 1e-3, "slots.optimise": {"fedadagrad": {"lr": 0.03}}})["slots"]
    assert slots["optimise"] == {"fedadagrad": {"lr": 0.03}}
    assert set(slots["select"]) == {"banzhaf"}


def test_one_device_with_all_data_lacks_nothing():
    values = Study("mmic").run_file(Cell("mmic", "har", "mm50-mc50", "centralised", 1), {"lr": 1e-3})
    assert values["fleet"] == [{"name": "all"}]
    assert (values["data"]["missing"], values["data"]["partition"]) == ({}, "uniform")
    assert values["data"]["source"] == Study("mmic").tasks["har"]["run"]["data"]["source"]


def test_fields_are_set_by_dotted_names_and_taken_away():
    values = {"a": 1}
    set_field(values, "b.c", {"d": 2})
    set_field(values, "a", None)
    assert values == {"b": {"c": {"d": 2}}}


def test_where_an_encoder_lies_makes_no_other_run():
    assert digest({"m": ["/x/one.safetensors"]}) == digest({"m": ["/y/one.safetensors"]})
    assert digest({"m": ["/x/one.safetensors"]}) != digest({"m": ["/x/two.safetensors"]})


def a_row(method="mmic", seed=1, values=(0.5,), condition="mm50-mc50", **fields) -> Outcome:
    points = tuple(Point(n, {"acc+gyro|none|accuracy": v}) for n, v in enumerate(values, start=1))
    return Outcome("mmic", "har", condition, method, seed, "file", curve=points, **fields)


def table(*rows: Outcome):
    found = {}
    for row in rows:
        found.setdefault((row.task, row.condition, row.method), {})[row.seed] = row
    return found


def test_accuracy_is_the_mean_of_the_last_third_and_best_its_best():
    row = a_row(values=(0.1, 0.9, 0.2, 0.3, 0.4, 0.6))
    assert MEASURES["accuracy"](row) == pytest.approx(50.0)
    assert MEASURES["best accuracy"](row) == pytest.approx(60.0)
    assert MEASURES["accuracy"](a_row(values=())) is None


@pytest.mark.parametrize(
    ("gains", "margin", "lower", "verdict_"),
    [
        ((0.02, 0.021, 0.019), 0.0, False, "yes"),
        ((0.02, 0.021, 0.019), 3.0, False, "no"),
        ((0.02, 0.021, 0.019), 0.0, True, "no"),
        ((0.05, -0.05, 0.01), 0.0, False, "undecided"),
        ((-0.003, -0.0031, -0.0029), -0.5, False, "yes"),
        ((0.02,), 0.0, False, "undecided"),
        ((0.01, -0.01, 0.0), 0.0, False, SMALLER),
        ((0.01, -0.01, 0.0), -5.0, False, "yes"),
        ((0.06, 0.04, 0.05), 5.0, False, SMALLER),
    ],
)
def test_a_comparison_is_decided_by_its_interval(gains, margin, lower, verdict_):
    rows = [a_row("mmic", n, (0.8 + gain,)) for n, gain in enumerate(gains)] + [
        a_row("fedadagrad", n, (0.8,)) for n in range(len(gains) + 1)
    ]
    asked = Comparison("har", "mm50-mc50", "mmic", "fedadagrad", "accuracy", margin, lower, effect=8.0)
    found = judged(asked, table(*rows))
    assert found.verdict == verdict_
    without = judged(asked._replace(effect=None), table(*rows)).verdict
    assert without == ("undecided" if verdict_ == SMALLER else verdict_)
    assert found.gain.seeds == len(gains)


def test_what_is_lost_between_conditions_is_compared():
    rows = [a_row("mmic", n, (0.9,), "mm20-mc50") for n in (1, 2)] + [a_row("mmic", n, (0.88,)) for n in (1, 2)]
    rows += [a_row("fedavg", n, (0.9,), "mm20-mc50") for n in (1, 2)]
    rows += [a_row("fedavg", n, (v,)) for n, v in ((1, 0.8), (2, 0.801))]
    asked = Comparison("har", "mm50-mc50", "mmic", "fedavg", "accuracy", lower=True, falling="mm20-mc50")
    found = judged(asked, table(*rows))
    assert (round(found.left.mean, 2), round(found.right.mean, 2)) == (2.0, 9.95)
    assert found.verdict == "yes"


def test_a_claim_is_yes_when_all_are_and_no_when_one_is():
    rows = [a_row("mmic", n, (0.9 + n / 1e4,)) for n in (1, 2, 3)] + [a_row("fedavg", n, (0.8,)) for n in (1, 2, 3)]
    yes = judged(Comparison("har", "mm50-mc50", "mmic", "fedavg", "accuracy"), table(*rows))
    no = judged(Comparison("har", "mm50-mc50", "fedavg", "mmic", "accuracy"), table(*rows))
    none = judged(Comparison("har", "mm50-mc50", "mmic", "fedadagrad", "accuracy"), table(*rows))
    assert (yes.verdict, no.verdict, none) == ("yes", "no", None)
    assert verdict([yes, yes]) == "yes"
    assert verdict([yes, none]) == "yes so far"
    assert verdict([yes, no]) == "no"
    assert verdict([none]) == "not run"


def test_costs_of_a_curve_are_those_until_the_evaluation():
    report = run_report()
    done = [row for row in report.assignments if row.status == "done"]
    curve = curve_of(report, done)
    assert curve
    assert [point.round for point in curve] == sorted({point.round for point in curve})
    flops = [point.flops for point in curve]
    assert flops == sorted(flops)
    counted = sum(f.value for row in done if (f := row.measured.get("flops")) is not None and f.value is not None)
    assert flops[-1] == pytest.approx(counted)
    trial = Trial(Cell("mmic", "har", "mm50-mc50", "mmic", 1), {"lr": 1e-3}, short=False)
    assert outcome_of(trial, "file", report).curve == curve


def test_the_best_setting_of_those_with_all_rounds_is_chosen(monkeypatch, tmp_path):
    mmic, tried = Study("mmic"), Results(tmp_path / "tuning.jsonl")
    monkeypatch.setattr(tuning, "load", lambda source: share(8, {"a": 1.0}, seed=1))
    monkeypatch.chdir(tmp_path)
    cell = next(cell for cell in mmic.cells() if cell.method == "mmic")
    assert tuning.chosen(mmic, cell, tried) == mmic.trials(mmic.tuned_as(cell))[3].settings
    ran: list[Trial] = []

    def carry_out(jobs, results, limits, what):
        for job in jobs:
            ran.append(job.trial)
            at = ran.index(job.trial)
            value = 0.5 + at / 100 if job.trial.short else 0.9 - at / 100
            points = (Point(1, {"acc+gyro|none|accuracy": value}),)
            about = {**job.trial.cell._asdict(), "settings": job.trial.settings, "short": job.trial.short}
            results.add(Outcome(**about, file=digest(job.values), curve=points))
        return True

    monkeypatch.setattr(tuning, "carry_out", carry_out)
    assert tuning.tune(mmic, [cell], tried, carry.Limits())
    assert [one.short for one in ran] == [True] * 6 + [False] * 2
    assert [one.settings for one in ran[6:]] == [ran[5].settings, ran[4].settings]
    assert tuning.chosen(mmic, cell, tried) == ran[5].settings
    assert tuning.tune(mmic, [cell], Results(tmp_path / "tuning.jsonl"), carry.Limits())
    assert len(ran) == 8  # nothing is tried twice
    assert tuning.training_data(mmic, "har").is_file()


@pytest.mark.parametrize("reserve", [0.0, 0.3])
def test_trials_are_tested_on_emoji_that_nobody_trained_on(reserve):
    needed("emoji_pairs")
    source = {"emoji_pairs": {"mini": True, "reserve": reserve}}
    trained, held = tuning.apart(source, 0.2)
    whole = load(source)
    assert sorted([*trained.ids, *held.ids]) == sorted(whole.ids)
    texts = [{tuple(row) for row in one.modalities["text"].tolist()} for one in (trained, held)]
    assert min(map(len, texts)) > 5
    assert not texts[0] & texts[1]
    assert len(held) == pytest.approx(0.2 * len(whole), rel=0.35)  # whole families, of few


def test_a_task_that_holds_out_itself_gives_trials_their_test(monkeypatch, tmp_path):
    frontier = Study("frontier", FOLDER.parents[1] / "cost" / "frontier")
    asked = []

    def apart(source, portion):
        asked.append((source, portion))
        return share(8, {"a": 1.0}, seed=1), share(4, {"a": 1.0}, seed=2)

    monkeypatch.setattr(tuning, "apart", apart)
    monkeypatch.setattr(tuning, "load", lambda source: share(6, {"a": 1.0}, seed=1))
    monkeypatch.chdir(tmp_path)
    for task, sizes in (("emoji-scratch", [8, 4]), ("har-scratch", [6])):
        cell = next(cell for cell in frontier.cells() if cell.task == task)
        trial = frontier.trials(frontier.tuned_as(cell))[0]
        (job,) = tuning.due(frontier, [trial], Results(tmp_path / "tuning.jsonl"))
        data = job.values["data"]
        files = [data[name] for name in ("source", "test") if name in data]
        assert [len(Dataset.load_npz(file)) for file in files] == sizes
    assert asked == [(frontier.tasks["emoji-scratch"]["run"]["data"]["source"], 0.2)]


def test_tuning_of_which_no_trial_ended_well_stops_the_study(monkeypatch, tmp_path):
    mmic, tried = Study("mmic"), Results(tmp_path / "tuning.jsonl")
    monkeypatch.setattr(tuning, "load", lambda source: share(8, {"a": 1.0}, seed=1))
    monkeypatch.chdir(tmp_path)
    cell = next(cell for cell in mmic.cells() if cell.method == "mmic")

    def carry_out(jobs, results, limits, what):
        for job in jobs:
            about = {**job.trial.cell._asdict(), "settings": job.trial.settings, "short": job.trial.short}
            results.add(Outcome(**about, file=digest(job.values), error="15 devices cannot be shared evenly"))
        return True

    monkeypatch.setattr(tuning, "carry_out", carry_out)
    with pytest.raises(SystemExit, match="no trial ended well of mmic/har/mm50-mc50/mmic/100"):
        tuning.tune(mmic, [cell], tried, carry.Limits())


def test_the_page_tells_verdicts_first_and_what_is_not_run(tmp_path):
    mmic = Study("mmic")
    rows = [a_row("mmic", n, (0.9 + n / 1e4,)) for n in (1, 2, 3)]
    rows += [a_row("fedadagrad", n, (0.8 + n / 1e3,), settings={"lr": 1e-3}) for n in (1, 2, 3)]
    write([(mmic, rows, rows[:1])], tmp_path / "systems.md")
    text = (tmp_path / "systems.md").read_text()
    assert "Of 5 claims: 1 yes so far, 4 not run." in text
    assert "| MMiC | and than FedAvg's |" in text
    assert "**not run**" in text
    assert "Not run yet: fedavg, centralised, mmic-random, mmic-unrepaired, mmic-static, " in text
    assert text.index("| paper | claim |") < text.index("## MMiC")
    assert (tmp_path / "systems" / "claims.svg").read_text().startswith("<?xml")


def test_the_page_gives_of_a_cost_how_many_times_less_it_is(tmp_path):
    study = Study("layerwise")

    def run(method: str, seed: int, flops: float) -> Outcome:
        point = Point(30, {"acc+gyro|none|macro_f1": 0.9}, 1.0, flops)
        return Outcome("layerwise", "har", "complete", method, seed, "", curve=(point,))

    rows = [run(method, n, flops + n) for n in (1, 2, 3) for method, flops in (("lw-fedmml", 1e9), ("fedavg", 4e9))]
    write([(study, rows, [])], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| fewer FLOPs | ÷ 2.4 (COCO) | har to fedavg ÷ 4.0 | – | **yes so far**, 3 of 5 seeds |" in text
    assert "| lw-fedmml 1.0 ± 0.0 | fedavg 4.0 ± 0.0 | ÷ 4.0 | – | – | 3 | yes |" in text


def test_settings_are_told_in_words():
    slots = {"slots.objective": {"cross_entropy": {}, "prototype_contrast": {"weight": 0.1, "temperature": 0.07}}}
    told = "lr 0.001, objective cross_entropy, prototype_contrast (weight 0.1, temperature 0.07)"
    assert page._settings({"lr": 1e-3, **slots}, {}) == told
    assert page._settings({"encoder rates by stage": [0.1, 1.0]}, {}) == "encoder rates by stage [0.1, 1.0]"


def test_a_variant_is_told_with_its_own_settings():
    tuned = {"lr": 1e-3, "slots.objective": {"cross_entropy": {}, "mcm": {"weight": 0.01}}}
    variant = {"tuned_as": "whole", "set": {"slots.objective": "cross_entropy", "slots.weight": "samples"}}
    assert page._settings(tuned, variant) == "lr 0.001, objective cross_entropy"


def test_two_of_these_do_not_write_the_same_file(tmp_path):
    path = tmp_path / ".lock"
    with claimed(path), pytest.raises(SystemExit, match="another run of"), claimed(path):
        pass
    with claimed(path):
        pass


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_are_carried_out_once_and_a_failed_one_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    mmic = Study("mmic")
    cell = Cell("mmic", "har", "mm50-mc50", "fedavg", 1)
    values = mmic.run_file(cell, {"lr": 2e-3})
    values["data"] |= {"source": {"basic_motions": {}}, "partition": {"uniform": None}}
    values["data"]["missing"] = {}
    values["fleet"] = values["fleet"][:2]
    values["training"] |= {"rounds": [1, 0, 0], "batch_size": 32}
    results = Results(tmp_path / "runs.jsonl")
    trial = Trial(cell, {"lr": 2e-3}, short=False)
    broken = {**values, "data": {**values["data"], "source": "none.npz"}}
    assert carry.carry_out([carry.Job(trial, values), carry.Job(trial, broken)], results, carry.Limits(1), "run")
    good, bad = sorted(results.rows, key=lambda row: row.error)
    assert good.curve[-1].metrics["acc+gyro|none|accuracy"] > 0
    assert good.curve[-1].flops > 0
    assert "none.npz" in bad.error
    assert results.of(cell, digest(values)) == good
    assert not list((Path("build") / "claims").glob("mmic-*"))
    assert "run 2/2" in capsys.readouterr().err


def test_the_command_writes_the_page_of_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["claims", "--page", "--results", str(tmp_path / "systems")])
    program.main()
    assert "not run" in (tmp_path / "systems.md").read_text()


def test_a_preview_tunes_nothing_and_lies_apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["claims", "--quick", "--paper", "mmic", "--only", "fedavg"])
    monkeypatch.setattr(program, "tune", lambda *_: pytest.fail("a preview tunes nothing"))
    asked: list[carry.Job] = []
    monkeypatch.setattr(program, "carry_out", lambda jobs, *_: asked.extend(jobs) or True)
    program.main()
    assert {job.trial.cell.seed for job in asked} == {1}
    assert {tuple(job.values["training"]["rounds"]) for job in asked} == {(5, 0, 0)}
    text = (tmp_path / program.QUICK).with_suffix(".md").read_text()
    assert "A preview: one seed" in text
    assert "`python -m benchmarks.accuracy.claims --quick`" in text
    assert not (tmp_path / program.RESULTS).exists()


def test_a_device_is_tested_by_what_it_has_on_the_whole_test_set(tmp_path):
    whole = share(40, {"a": 1.0, "b": 1.0}, seed=1)
    whole.save_npz(tmp_path / "test.npz")
    one = test_set_worker.test_set(tmp_path / "test.npz", ("a",), labelled=True)
    assert (len(one), set(one.modalities)) == (40, {"a"})
    assert one.labels.tolist() == whole.labels.tolist()
    pairs = test_set_worker.test_set(tmp_path / "test.npz", ("a", "b"), labelled=False)
    assert set(pairs.modalities) == {"a", "b"}
    assert set(pairs.labels.tolist()) == {-1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_devices_own_models_are_judged_on_the_test_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[2]))
    apromfl = Study("apromfl")
    cell = Cell("apromfl", "av", "alpha01", "apromfl", 1)
    values = apromfl.run_file(cell, {"lr": 2e-3})
    values["data"] |= {"source": {"basic_motions": {}}, "partition": {"uniform": None}}
    values["data"]["missing"] = {"devices": {"a": ["gyro"], "b": ["acc"]}, "unlabelled": ["c"]}
    values["fleet"] = [{"name": name} for name in "abc"]
    encoder = {"kind": "sensor", "width": 8, "depth": 3, "heads": 2, "patch": 10}
    values["model"]["encoders"] = {"acc": encoder, "gyro": encoder}
    values["training"] |= {"rounds": [2, 0, 0], "batch_size": 16, "epochs": 1}
    results, trial = Results(tmp_path / "runs.jsonl"), Trial(cell, {"lr": 2e-3}, short=False)
    limits = carry.Limits(1, worker=apromfl.values["worker"])
    assert carry.carry_out([carry.Job(trial, values)], results, limits, "run")
    (row,) = results.rows
    assert row.error == ""
    assert MEASURES["devices' accuracy"](row) > 0
    assert MEASURES["devices' recall at 1"](row) > 0
    assert "received|accuracy" in row.own


def test_own_figures_are_each_devices_last_and_by_its_task():
    rows = [
        AssignmentRow(device="a", metrics={"trained_accuracy": 0.1}),
        AssignmentRow(device="a", metrics={"trained_accuracy": 0.5, "received_accuracy": 0.4}),
        AssignmentRow(device="b", metrics={"trained_accuracy": 0.7}),
        AssignmentRow(device="c", metrics={"trained_x_to_y_recall_at_1": 0.2, "trained_y_to_x_recall_at_1": 0.4}),
    ]
    assert own(rows) == pytest.approx({"trained|accuracy": 0.6, "received|accuracy": 0.4, "trained|recall": 0.3})

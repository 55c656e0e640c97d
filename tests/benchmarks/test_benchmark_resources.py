"""The benchmarks of budgets: what they compare is what they say, and their pages hold the figures."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest
from report_fixture import run_report
from training_fixture import model_spec

from benchmarks.common.result_lines import rows_in
from benchmarks.cost import budget_run, codecs, predictions, resources, savings
from benchmarks.cost.device_pages import UNTESTED
from benchmarks.cost.resource_table import write_page
from benchmarks.cost.resources import SETTINGS, Row, job_of, payload, stages_of
from benchmarks.cost.savings_runs import Outcome, done, figures_of, made
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.plan.training_samples import prefixes
from edgefl.records import PACKINGS, Figure

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def row(index: int, batch: int, memory: float, flops: float, seconds: float, payload_bytes: float) -> Row:
    figures = Figure(memory * MIB), Figure((memory + 300) * MIB)
    predicted = memory * MIB * 1.1
    return Row(SETTINGS[index], batch, *figures, flops, 1e9, seconds, predicted, flops, payload_bytes, 90 * flops)


def test_rows_of_the_table_and_their_ratios(tmp_path: Path) -> None:
    rows = [row(0, 64, 1000, 16e9, 8.0, 400 * MIB), row(6, 64, 100, 4e9, 2.0, 20 * MIB)]
    text = write_page(rows, "cpu", "2", tmp_path)
    assert (
        "| end-to-end | 1,000 | +10% | 1,300 | 16.00 | +0.0% | 1,440 | 400 | 8.00 | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 |"
        in text
    )
    assert (
        "| + Adafactor = smallest | 100 | +10% | 400 | 4.00 | +0.0% | 360 | 20 | 2.00 | 10.0 | 4.0 | 4.0 | 20.0 | 4.0 |"
        in text
    )
    assert "[what was measured on a GPU](gpu.md)" in text
    assert (tmp_path / "resources.svg").read_text().startswith("<?xml")
    assert text == (tmp_path / "resources.md").read_text()


def test_figures_of_a_gpu_stand_beside_those_of_a_processor(tmp_path: Path) -> None:
    text = write_page([row(0, 64, 1000, 16e9, 0.0312, 400 * MIB)], "cuda", "2", tmp_path)
    assert {place.name for place in tmp_path.iterdir()} == {"resources_cuda.md", "resources_cuda.svg"}
    assert "| 0.031 |" in text
    assert "[the same on a processor](resources.md)" in text
    assert "](resources_cuda.svg)" in text


def test_each_row_adds_to_the_one_before() -> None:
    names = [setting.name for setting in SETTINGS]
    assert names[0] == "end-to-end"
    assert [setting.savings for setting in SETTINGS] == [False] * 3 + [True] * 8
    by_name = {setting.name: job_of(setting, 64) for setting in SETTINGS}
    assert len(by_name) == len(SETTINGS)
    assert prefixes(by_name[names[4]])["image"].depth == 5
    assert not prefixes(by_name[names[2]])
    assert by_name[names[6]].hyper.optimizer == "adafactor"


def test_bytes_of_ninety_rounds_by_hand() -> None:
    """Whole parts: each trained one down and up in each of its rounds, and once more when it is frozen."""
    encoders = model_spec().encoders
    model = ModelSpec(dict.fromkeys("ab", encoders["a"]), 6, HeadSpec(12, 6), 10, 0)
    model = msgspec.structs.replace(
        model, encoders={m: msgspec.structs.replace(e, depth=6) for m, e in encoders.items()}
    )
    from edgefl.models.parts import part_tensors
    from edgefl.models.staged import build
    from edgefl.protocol.tensors import encode_part

    built = build(model)
    sizes = {part: len(encode_part(part_tensors(built, part))) for part in built.parts_present}
    layerwise = payload(SETTINGS[2], model)
    expected = 0.0
    for stage in stages_of(model, "layerwise"):
        own = [part for part in stage.trained if "stage" in part]
        expected += 2 * stage.rounds * sum(sizes[part] for part in stage.trained)
        expected += sum(sizes[part] for part in own) if stage.rounds else 0
    heads = sum(sizes[part] for part in stages_of(model, "layerwise")[-1].trained if "stage" not in part)
    assert layerwise == expected + heads  # heads are final after the last stage
    assert payload(SETTINGS[0], model) == 181 * sum(sizes.values())


def test_predictions_cover_every_stage_of_three_pairs() -> None:
    assert len(predictions.PAIRS) == 3
    for pair in predictions.PAIRS:
        found = predictions.jobs(pair)
        assert [job.stage.index for what, job in found if what == "layer-wise"] == [1, 2, 3, 4, 5, 6]
        in_pieces = [job for what, job in found if "pieces" in what]
        whole = {what for what, job in found if job not in in_pieces}
        assert whole == {"end to end", "layer-wise", "layer-wise, stored prefix"}
        assert len(in_pieces) == 6
        assert all(0 < job.hyper.micro_batch < job.hyper.batch_size for job in in_pieces)
    told = predictions.Compared("p", "layer-wise", 2, 110.0 * MIB, 100.0 * MIB, 5e9, 5e9)
    assert "| p | layer-wise | 2 | 110 | 100 | +10.0% | 5.0 | 5.0 | +0.00% |" in predictions.page([told], "cpu")


def test_savings_are_compared_with_none_seed_by_seed() -> None:
    runs = savings.plan([1, 2])
    files = {(run.task, run.saving, run.seed): run.values for run in runs}
    assert files["har", "none", 1]["training"]["cache"] == "none"
    assert files["har", "stored prefix, f16", 1]["training"]["cache"] == "f16"
    assert files["har", "f16 both ways", 1]["training"]["cache"] == "none"
    assert len({run.about["file"] for run in runs}) == len(files)  # nothing is compared with itself
    rows = []
    for run in runs:
        if run.task == "har" and run.saving in {"none", "int8 both ways"}:
            share = (0.9 if run.seed == 1 else 0.8) - (0.01 * run.seed if run.saving != "none" else 0.0)
            rows.append(Outcome(**run.about, metrics={"acc+gyro|none|accuracy": share}))
    others = [msgspec.structs.replace(row, file="of another run file", metrics={}) for row in rows]
    text = savings.page(runs, [*rows, *others])
    assert "| none | 85.00 ± 7.07 |  |" in text
    assert "| int8 both ways | 83.50 ± 7.78 | -1.50 ± 0.71 |" in text


def test_runs_of_savings_are_chosen_by_task_and_by_how_their_names_begin() -> None:
    runs = savings.plan([1])
    assert savings.chosen(runs, [], []) == runs
    some = savings.chosen(runs, ["har"], ["none", "smallest"])
    assert [(run.task, run.saving) for run in some] == [
        ("har", "none"),
        ("har", "smallest: the same with Adafactor"),
    ]


def test_savings_on_a_gpu_are_other_runs_and_tell_the_allocator() -> None:
    own, theirs = (savings.plan([1], device) for device in ("cuda", "cpu"))
    assert {device["profile"] for run in own for device in run.values["fleet"]} == {"cuda"}
    assert not {run.about["file"] for run in own} & {run.about["file"] for run in theirs}
    run = next(run for run in own if (run.task, run.saving) == ("har", "none"))
    peaks = {"step_peak_bytes": 3.0 * MIB, "reserved_peak_bytes": 22.0 * MIB}
    row = Outcome(**run.about, metrics={"acc|none|accuracy": 0.5}, **peaks)
    text = savings.page(own, [row], "cuda")
    assert "step memory, MiB | allocator, MiB | seeds |" in text
    assert "| 3.0 | 22.0 | 1 |" in text
    assert UNTESTED not in text
    assert UNTESTED in savings.page(theirs, [row])


def test_packings_are_compared_by_figures_and_by_runs() -> None:
    runs = codecs.plan([1, 2])
    assert len({run.about["file"] for run in runs}) == len(runs) == 2 * len(codecs.EXCHANGES)
    closing = {run.saving for run in runs if run.values.get("transfer", {}).get("closing") == "packed"}
    assert closing == {name for name in codecs.EXCHANGES if name.endswith("last rounds too")}
    shares = {"none": (0.9, 0.8), "eden4 both": (0.91, 0.80)}
    rows = [
        Outcome(**run.about, metrics={"a|none|accuracy": shares[run.saving][run.seed - 1]}, payload_bytes=MIB)
        for run in runs
        if run.saving in shares
    ]
    forms = codecs.measured({"Gaussian": [codecs.drawn("Gaussian")]})
    assert {form.packing for form in forms} == {one for one in PACKINGS if one.startswith("delta+")}
    by_name = {form.packing: form for form in forms}
    assert by_name["delta+eden2"].errors["Gaussian"] == pytest.approx(0.133, rel=0.02)
    assert by_name["delta+eden3"].bits["Gaussian"] == pytest.approx(3.006, abs=0.005)
    text = codecs.page(forms, runs, rows)
    assert "| none | 85.00 ± 7.07 |  | 1.0 | 2 |" in text
    assert "| eden4 both | 85.50 ± 7.78 | +0.50 ± 0.71 | 1.0 | 2 |" in text
    kept = rows_in(ROOT / "docs/results/codecs/runs.jsonl", Outcome)
    assert len(done(codecs.plan(range(1, 6)), kept)) == len(kept) > 0


def test_the_kept_runs_of_savings_are_those_of_the_run_files() -> None:
    kept = rows_in(ROOT / "docs/results/savings/runs.jsonl", Outcome)
    assert len(done(savings.plan(range(1, 16)), kept)) == len(kept) > 90


def test_a_report_becomes_a_saving_s_figures() -> None:
    report = run_report()
    found = figures_of(report)
    rows = [row for row in report.assignments if row.status == "done"]
    assert found["flops"] == pytest.approx(sum(row.measured["flops"].value or 0 for row in rows))
    peaks = {stage: [r.measured["step_peak_bytes"].value for r in rows if r.stage == stage] for stage in range(1, 7)}
    assert found["step_peak_bytes"] == max(statistics.median(values) for values in peaks.values() if values)
    payload = [row.measured[f"payload_{way}_bytes"].value for row in rows for way in ("up", "down")]
    assert found["payload_bytes"] == pytest.approx(sum(payload))
    last = max((row.stage, row.round) for row in report.evaluations)
    of_last = {(r.available, r.missing, r.metric) for r in report.evaluations if (r.stage, r.round) == last}
    assert len(found["metrics"]) == len(of_last)


def test_a_saving_s_run_that_fails_says_why() -> None:
    run = savings.plan([1])[0]
    told = made(run._replace(values={**run.values, "recipe": "nothing"}))
    assert "nothing" in told.error


def test_a_budget_run_is_held_to_the_memory_where_its_tensors_are() -> None:
    found = [budget_run.limited(*at) for at in (("cpu", False), ("cuda", False), ("cuda", True))]
    assert found == ["step_memory_bytes", "gpu_memory_bytes", "memory_bytes"]
    peaks = budget_run.Peaks(900_000_000, 500_000_000, 700_000_000)
    plain, card, pool = (
        budget_run.page(1_500_000_000, peaks, "report", device, shared=shared)
        for device, shared in (("cpu", False), ("cuda", False), ("cuda", True))
    )
    assert "the step took 500 MB above the idle trainer (its process 900 MB): within." in plain
    assert "[what was measured on a GPU](gpu.md)" in plain
    assert "held 700 MB for 500 MB of tensors; beside it 900 MB of the process: within." in card
    assert "tensors, together with 900 MB of the process: BEYOND." in pool
    assert "[the same on a processor](budget_run.md)" in card
    assert "gpu.md" not in card + pool


@pytest.mark.slow
def test_a_row_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resources.measured(SETTINGS[6], 2, "cpu")
    assert (found.step_peak.value or 0) > 100 * MIB
    assert found.predicted_flops == pytest.approx(found.flops_per_sample, rel=0.03)

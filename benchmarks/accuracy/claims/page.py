"""The page of the claims: one table of verdicts, a plot of every difference, then the evidence paper by paper."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.claims.as_fleet import FILE, Compared
from benchmarks.accuracy.claims.baseline import Baseline, key
from benchmarks.accuracy.claims.judge import MEASURES, Rows, claims_of, judged
from benchmarks.accuracy.claims.outcome import Outcome
from benchmarks.accuracy.claims.plots import differences
from benchmarks.accuracy.claims.study import Study, Values
from benchmarks.accuracy.claims.taking_part import told
from benchmarks.accuracy.claims.verdicts import COSTS, Judged, claim_verdict, evidence, sentence, verdicts
from benchmarks.common.result_lines import rows_in
from benchmarks.common.spread import over

COMMAND = "python -m benchmarks.accuracy.claims"
_INTRODUCTION = """# What the papers claim, and what holds here

{sentence}{quick}

![Differences of every comparison with their intervals, by paper]({folder}/claims.svg)

Each line is one comparison: the mean difference over paired seeds and its interval of 95 % (Student's t); the tick is
the bound that is claimed. A comparison is *yes* or *no* where the interval leaves out the bound; *smaller than the
paper's* where it does not, and ends below the paper's own effect; else *undecided*. *Headroom* is what the rival leaves
to be had: up to the same model trained in one place on complete data, or to the bound that the claim's note tells.
Where it is less than the paper's effect, the effect cannot show: such a comparison (a hollow mark) does not count, and
a claim of no other is *not tested* (in brackets what its comparisons say all the same). A claim is *yes* when all
comparisons that count are, *no* when one of them is, *smaller than the paper's* when the others are.

{table}

`{command}` on {machine}, {date}: {runs} runs with {hours:.1f} hours of training steps, and {tried} trials
of tuning with {trial_hours:.1f}; two run at a time, and steps are some 70 % of the time. Every run is the product's own
fleet in one process (`edgefl run --in-process`, [decision 52](../decisions/0052-one-process-is-another-transport.md)).
Tuning gives every method the same number of settings, by successive halving: all for a third of the rounds, the best
two for all rounds, by the measure of the claim, on training samples that are held out: a whole speaker or person where
the data have them, even where the test has the same ones. The test set is not seen. Accuracies are means over the
evaluations in the last third of the rounds. A variant has the settings of the method that it varies. Step memory is
predicted, tensors of a step (one process cannot measure a device's). Encoders are small (three blocks, 32 wide), so
that all of it can be run again on a small machine: accuracies are not those of the papers.
"""


_QUICK = (
    " A preview: one seed, a sixth of the rounds, the settings that tuning chose for the whole, else the middle ones. "
    "It decides nothing: MMiC's warm-up of ten rounds, which draws devices at random, is not over by its end."
)


def write(
    found: Sequence[tuple[Study, Sequence[Outcome], Sequence[Outcome]]],
    path: Path,
    baselines: Mapping[str, Baseline] | None = None,
    devices: Mapping[str, int] | None = None,
) -> None:
    """The page at ``path`` and its plot beside it. ``found``: a study, its runs that stand, its trials.

    ``baselines``, ``devices``: of the tasks, by the keys of their files.
    """
    quick = any(study.quick for study, _, _ in found)
    folder = path.parent / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    papers = [(study, rows, _findings(study, rows, baselines or {})) for study, rows, _ in found]
    drawn = [
        (study.values["title"], one)
        for study, _, claims in papers
        for _, findings in claims
        for one in findings
        if one is not None and one.asked.measure not in COSTS
    ]
    differences(drawn, folder / "claims.svg")
    runs = [row for _, rows, _ in papers for row in rows]
    trials = [row for _, _, tried in found for row in tried]
    lines = [
        _INTRODUCTION.format(
            sentence=sentence(papers),
            quick=_QUICK if quick else "",
            folder=path.stem,
            table="\n".join(verdicts(papers)),
            command=COMMAND + (" --quick" if quick else ""),
            machine=f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()})",
            date=time.strftime("%Y-%m"),
            runs=len(runs),
            tried=len(trials),
            hours=sum(row.cpu_s for row in runs) / 3600,
            trial_hours=sum(row.cpu_s for row in trials) / 3600,
        )
    ]
    for study, rows, claims in papers:
        lines += _paper(study, rows, claims, baselines or {}, devices or {})
    lines += _as_fleets(folder / FILE)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _as_fleets(path: Path) -> list[str]:
    """Cells that were run as real fleets as well; nothing where none was."""
    rows = [
        f"* {one.task}, {one.method}, {one.condition}, seed {one.seed}"
        f"{', a third of the rounds' if one.short else ''}: {one.equal} of {one.states} states are the same"
        f" to the last bit; fleet {one.fleet_s:.0f} s, one process {one.one_s:.0f} s"
        for one in rows_in(path, Compared)
    ]
    return ["## As a fleet over MQTT", "", *rows, ""] if rows else []


def _findings(study: Study, rows: Sequence[Outcome], baselines: Mapping[str, Baseline]) -> Judged:
    by_cell: dict[tuple[str, str, str], dict[int, Outcome]] = {}
    for row in rows:
        by_cell.setdefault((row.task, row.condition, row.method), {})[row.seed] = row
    table: Rows = by_cell
    bounds = {task: one.bounds for task in study.tasks if (one := baselines.get(key(study, task)))}
    return [
        (claim, [judged(one, table, bounds.get(one.task)) for one in claim.comparisons])
        for claim in claims_of(study.values)
    ]


def _paper(
    study: Study,
    rows: Sequence[Outcome],
    claims: Judged,
    baselines: Mapping[str, Baseline],
    devices: Mapping[str, int],
) -> list[str]:
    values = study.values
    lines = [f"## {values['title']}", "", values["says"].strip(), ""]
    for claim, findings in claims:
        lines += [
            f"**{claim.text[0].upper()}{claim.text[1:]}: {claim_verdict(findings)}.** {claim.note.strip()}".rstrip(),
            "",
        ]
        lines += evidence(findings)
    for task, asked in study.tasks.items():
        own = [row for row in rows if row.task == task]
        lines += [f"### {asked['title']}", "", f"{asked['says'].strip()}{_fewer(study, task, devices)}", ""]
        if bar := baselines.get(key(study, task)):
            lines += [f"Simple baseline, logistic regression on all training samples, complete: {bar.text}.", ""]
        lines += [*_rows(study, task, own), ""] if own else ["Not run yet.", ""]
    return lines


def _fewer(study: Study, task: str, devices: Mapping[str, int]) -> str:
    """How many devices take part, where they are fewer than the fleet: a device needs samples for one batch."""
    fleet, counts = len(study.devices(task)), told(study, task, devices)
    if not counts or min(counts) == fleet:
        return ""
    each = ", ".join(map(str, counts))
    return (
        f" **Of the {fleet} devices, {min(counts)} to {max(counts)} take part** ({each} in seeds "
        f"{study.seeds[0]} to {study.seeds[-1]}): the planner refuses those with fewer samples than one batch."
    )


def _rows(study: Study, task: str, rows: Sequence[Outcome]) -> list[str]:
    shown = [name for name in study.tasks[task].get("shown", ["accuracy"]) if any(MEASURES[name](r) for r in rows)]
    conditions = list(study.tasks[task]["conditions"])
    costs = () if "worker" in study.values else COSTS  # a worker of its own computes more than the method
    heads = ["method", *(f"{name}, {condition}" for condition in conditions for name in shown), *costs]
    lines = ["| " + " | ".join([*heads, "settings", "seeds"]) + " |", "|---" * (len(heads) + 2) + "|"]
    for method, values in study.methods.items():
        own = [row for row in rows if row.method == method]
        if not own:
            continue
        cells = [f"{method} ({values['says']})" if "says" in values else method]
        for condition in conditions:
            at = [row for row in own if row.condition == condition]
            cells += [_text([v for row in at if (v := MEASURES[name](row)) is not None]) for name in shown]
        cells += [_text([v for row in own if (v := MEASURES[name](row)) is not None], spread=False) for name in costs]
        cells += [_settings(own[-1].settings, values), str(len({row.seed for row in own}))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [*_acted(study, rows), *_refused(study, rows)]
    run = {row.method for row in rows}
    asked = {cell.method for cell in study.cells() if cell.task == task}
    if due := [method for method in study.methods if method in asked - run]:
        lines += ["", f"Not run yet: {', '.join(due)}."]
    return lines


def _acted(study: Study, rows: Sequence[Outcome]) -> list[str]:
    lines = []
    for method in study.methods:
        own = [row for row in rows if row.method == method and row.acted]
        if own:
            names = list(dict.fromkeys(name for row in own for name in row.acted))
            told = ", ".join(f"{name} {_text([row.acted[name] for row in own if name in row.acted])}" for name in names)
            lines.append(f"* {method}, a run: {told}")
    return ["", *lines] if lines else []


def _refused(study: Study, rows: Sequence[Outcome]) -> list[str]:
    """Devices that memory budgets exclude, by method."""
    lines = []
    for method in study.methods:
        own = [row for row in rows if row.method == method and row.refused]
        if own:
            needed, allowed = (max(pair[i] for row in own for pair in row.refused.values()) / 2**20 for i in range(2))
            most = max(row.devices for row in own)
            lines.append(
                f"* {method}: {most} devices train; the planner refuses {len(own[0].refused)}, whose step needs "
                f"{needed:.2f} MiB at least and may use {allowed:.2f}"
            )
    return ["", *lines] if lines else []


def _text(values: Sequence[float], *, spread: bool = True) -> str:
    found = over(values)
    if found is None:
        return "–"
    return found.text() if spread else f"{found.mean:.1f}"


def _settings(settings: Mapping[str, object], method: Values) -> str:
    """What was tuned; of a variant, its own where it sets the same."""
    own = method.get("set", {}) if "tuned_as" in method else {}
    every = {name: own.get(name, value) for name, value in settings.items()}
    return ", ".join(f"{name.removeprefix('slots.')} {_told(value)}" for name, value in every.items())


def _told(value: object) -> str:
    """A setting in words: prototype_contrast (weight 0.1, temperature 0.07) of a mapping, else the value."""
    if not isinstance(value, Mapping):
        return str(value).replace("|", "/")
    each = (
        f"{name} ({_inner(inner)})" if isinstance(inner, Mapping) and inner else str(name)
        for name, inner in value.items()
    )
    return ", ".join(each)


def _inner(value: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items())

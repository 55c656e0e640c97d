"""The verdicts' part of the page: the sentence on top, the table of the claims, and each claim's evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.accuracy.claims.judge import SMALLER, VERDICTS, Claim, Finding, is_tested, verdict
from benchmarks.accuracy.claims.outcome import Outcome
from benchmarks.accuracy.claims.study import Study

#: Measures that are no accuracies: columns of every table, and not of the plot.
COSTS = ("payload, MiB", "GFLOP", "step memory, MiB")
#: The claims of a paper, each with its comparisons' figures.
Judged = list[tuple[Claim, list[Finding | None]]]
#: A study, its runs that stand, and its claims.
Paper = tuple[Study, Sequence[Outcome], Judged]


def sentence(papers: Sequence[Paper]) -> str:
    """Claims by verdict, and comparisons that exclude the paper's effect."""
    every = [findings for _, _, claims in papers for _, findings in claims]
    told = [claim_verdict(findings) for findings in every]
    counts = [f"{told.count(one)} {one}" for one in _VERDICTS if told.count(one)]
    untested = sum(one.startswith(_UNTESTED) for one in told)
    if untested:
        counts.append(f"{untested} {_UNTESTED}, where rivals leave no room for the paper's effect")
    short = sum(bool(_seeds(study, findings)) for study, _, claims in papers for _, findings in claims)
    fewer = f" {short} of them have fewer seeds than planned." if short else ""
    known = [
        one
        for findings in every
        for one in findings
        if one is not None and one.verdict not in {"yes", "no"} and one.asked.effect is not None
    ]
    below = sum(one.verdict == SMALLER for one in known)
    which = "comparisons that are neither yes nor no, and of which the paper gives an effect in the same unit"
    excluded = f" Of {len(known)} {which}, {below} exclude it." if known else ""
    return f"Of {len(told)} claims: {', '.join(counts)}.{fewer}{excluded}"


_VERDICTS = ("yes", "yes so far", *VERDICTS[1:], "not run")
_UNTESTED = "not tested"


def claim_verdict(findings: Sequence[Finding | None]) -> str:
    """The claim's verdict; "not tested" with it in brackets where no comparison counts."""
    found = verdict(findings)
    return found if found == "not run" or is_tested(findings) else f"{_UNTESTED} ({found})"


def verdicts(papers: Sequence[Paper]) -> list[str]:
    """The table of all claims."""
    lines = ["| paper | claim | the paper | here | headroom | verdict |", "|---" * 6 + "|"]
    every = [(study, *one) for study, _, claims in papers for one in claims]
    for study, claim, findings in sorted(every, key=lambda one: verdict(one[2]) == "not run"):
        known = [one for one in findings if one is not None]
        here = "; ".join(_short(study, one) for one in known) or "–"
        lines.append(
            f"| {study.values['title']} | {claim.text} | {claim.effect or '–'} | {here} | {_headrooms(known)} | "
            f"**{claim_verdict(findings)}**{_counting(known)}{_seeds(study, findings)} |"
        )
    return lines


def _headrooms(findings: Sequence[Finding]) -> str:
    """Such as 2.4 or 0.7 to 5.6; a dash where no bound is told."""
    rooms = [f"{one.headroom:.1f}" for one in findings if one.headroom is not None]
    ends = sorted(set(rooms), key=float)
    return f"{ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0] if ends else "–"


def _counting(findings: Sequence[Finding]) -> str:
    """Such as ", 1 of 4 comparisons count"; "" where all do, or none."""
    count = sum(one.tested for one in findings)
    return f", {count} of {len(findings)} comparisons count" if 0 < count < len(findings) else ""


def _seeds(study: Study, findings: Sequence[Finding | None]) -> str:
    """Such as ", 3 of 5 seeds", of the comparison that has the fewest; "" where every one has all."""
    fewest = min((one.gain.seeds for one in findings if one is not None), default=len(study.seeds))
    return f", {fewest} of {len(study.seeds)} seeds" if fewest < len(study.seeds) else ""


def _short(study: Study, one: Finding) -> str:
    """Such as har mm50-mc50 to fedavg +1.3 [+0.4, +2.2]; a task's only condition is not named."""
    asked = one.asked
    several = len(study.tasks[asked.task]["conditions"]) > 1
    return f"{asked.task}{f' {asked.condition}' if several else ''} to {asked.against} {_difference(one)}"


def _difference(one: Finding) -> str:
    """Such as +1.3 [+0.4, +2.2]; of a cost how many times less it is, ÷ 2.2."""
    if one.asked.measure in COSTS:
        return f"÷ {one.right.mean / one.left.mean:.1f}"
    mean, low, high = one.difference
    return f"{mean:+.1f} [{'one seed' if math.isinf(low) else f'{low:+.1f}, {high:+.1f}'}]"


def evidence(findings: Sequence[Finding | None]) -> list[str]:
    """The table of a claim's comparisons; nothing where none was run."""
    known = [one for one in findings if one is not None]
    if not known:
        return []
    heads = (
        "task",
        "condition",
        "measure",
        "",
        "against",
        "difference [95 %]",
        "the paper",
        "headroom",
        "seeds",
        "verdict",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in known:
        asked = one.asked
        measure = asked.measure + (f", lost since {asked.falling}" if asked.falling else "")
        bound = f" (claimed: more than {asked.margin:+g})" if asked.margin else ""
        lines.append(
            f"| {asked.task} | {asked.condition} | {measure}{bound} | {asked.left} {one.left.text()} | "
            f"{asked.against} {one.right.text()} | {_difference(one)} | "
            f"{'–' if asked.effect is None else f'{asked.effect:+.1f}'} | {_headrooms([one])} | {one.gain.seeds} | "
            f"{one.verdict}{'' if one.tested else ' (no room)'} |"
        )
    return [*lines, ""]

"""A run file for a data set of the user's own: encoders by what the files are like, devices, rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from edgefl.own_data import checkpoints
from edgefl.own_data.facts import Facts, most
from edgefl.plan.preparation import column_field

#: Modality -> its encoder's fields.
Encoders = Mapping[str, Mapping[str, Any]]

#: Image sides to choose from.
_SIDES = (32, 48, 64)
#: Lengths of texts to choose from, in words and their n-grams, and how many of these a word has, about.
_LENGTHS = (64, 128, 256, 512, 1024)
_GRAMS = 10
#: Rows of the table of n-grams: 60 % right on ten topics of 150 texts each, where tf-idf has 54 (own_data).
_NGRAMS = 16_384
_STAGES = 3
#: Channels of a user's own sensors differ in scale; one that counts hundreds would drown the others.
_FLEET = {"standardize": "fleet"}
#: Time steps of a window: a power of two around 2.5 s, in which people's movements repeat.
_WINDOWS = (16, 32, 64, 128, 256)
_WINDOW_S = 2.5
#: Recordings of one length up to this many steps are samples as they are.
_LONGEST_SAMPLE = 256
#: Of a sound.
_MOST_SECONDS = 10.0
#: Encoders from the richest on: the first whose stages fit every device is taken.
SIZES = ("small", "tiny")
#: Steps of a round and of a stage, which a device with few samples gets by more epochs, then by more rounds.
_ROUND_STEPS, _STAGE_STEPS = 30, 240
_MOST_EPOCHS, _LEAST_ROUNDS, _MOST_ROUNDS = 8, 4, 10
#: Of a table's first stage, its later ones get half: with three times as many in all, 100 R2 of the progression of
#: diabetes is 33 in place of 42, and other tables are as good.
_TABLE_STEPS = 120
#: Where devices hold out enough rows of a table, its stages end by these, at the latest after so many rounds.
_HOLDOUT, _JUDGES, _MOST_ROUNDS_JUDGED = 0.1, 30, 40
#: The same of a number to be predicted, whose loss a few rows tell: noisy ones take a quarter of the steps of others.
_HOLDOUT_OF_NUMBERS, _JUDGES_OF_NUMBERS, _ROUND_STEPS_OF_NUMBERS = 0.2, 8, 15
#: Rows whose mean and variance a batch norm can be trained on: with 3 it stays at chance where layer norm is right.
_LEAST_FOR_BATCH_NORM = 8


class Wishes(NamedTuple):
    """Wishes of the user. ``devices``: profiles, one a device; ``size``: of the encoders; ``recipe`` "": chosen.

    ``skip_bad``: samples that cannot be read are left out; ``pretrained``: modality -> the checkpoint it begins with.
    """

    devices: Sequence[str] = ()
    size: str = SIZES[0]
    recipe: str = ""
    skip_bad: bool = False
    pretrained: Mapping[str, str] = {}


class Paths(NamedTuple):
    """The run's name, and its data as in the run file. ``test`` "": held out of the source. ``arrays``: an .npz;
    ``label``: the column that labels came from.
    """

    name: str
    source: str
    test: str = ""
    arrays: bool = False
    label: str = ""


class Outline(NamedTuple):
    """Facts of the samples that a run file is drafted by: how many, labelled or not, in how many groups.

    ``several``: a sample may have several labels, for which prototypes have no meaning; ``numeric``: its label is a
    number to be predicted.
    """

    samples: int
    labelled: bool
    groups: int
    several: bool = False
    numeric: bool = False


def run_values(paths: Paths, facts: Mapping[str, Facts], outline: Outline, wishes: Wishes) -> dict[str, object]:
    """The values of a run file."""
    profiles = list(wishes.devices) or ["cpu"] * _device_count(outline)
    given = encoders(facts, wishes.size, raw=not paths.arrays, pretrained=wishes.pretrained)
    share = max(2, int(outline.samples * _windows_each(facts, given) * 0.8 / len(profiles)))
    batch = max(2, min(16, share // 4))
    steps = max(1, share // batch)
    head = {"width": 128, "out": 64, **({"norm": "layer"} if batch < _LEAST_FOR_BATCH_NORM else {})}
    tables = all(each.kind == "table" for each in facts.values())
    holdout = (
        _holdout(share, numeric=outline.numeric) if tables and not wishes.pretrained and not wishes.recipe else 0.0
    )
    round_steps = _ROUND_STEPS_OF_NUMBERS if holdout and outline.numeric else _ROUND_STEPS
    epochs = min(_MOST_EPOCHS, max(1, round(round_steps / steps)))
    wanted = (_TABLE_STEPS if tables else _STAGE_STEPS) / (steps * epochs)
    rounds = _MOST_ROUNDS_JUDGED if holdout else min(_MOST_ROUNDS, max(_LEAST_ROUNDS, round(wanted)))
    later = rounds // 2 if tables else rounds
    stages = _stages(facts, wishes.pretrained)
    return {
        "name": paths.name,
        "seed": 1,
        "recipe": wishes.recipe or recipe_for(outline, len(facts)),
        "data": _data(paths, facts, given, natural=outline.groups > len(profiles), skip_bad=wishes.skip_bad),
        **_slots(facts, wishes.pretrained, judged=holdout > 0),
        "model": {"stages": stages, "encoders": given, "head": head, "fusion_width": 64},
        "training": {
            "rounds": _rounds(rounds, later, stages, facts, wishes.pretrained),
            "epochs": epochs,
            "batch_size": batch,
            **({"holdout": holdout} if holdout else {}),
            "lr": {"encoder": 1.0e-3, "head": 1.0e-3},
        },
        "round": {"join_s": 120, "quorum": 0.5, "deadline_s": 600},
        "evaluate": "stage",
        "fleet": [{"name": f"device-{i}", "profile": profile} for i, profile in enumerate(profiles, start=1)],
    }


def _holdout(share: int, *, numeric: bool) -> float:
    """The part of a device's ``share`` of a table by which its stages end; 0.0: they end as planned."""
    if share * _HOLDOUT >= _JUDGES:
        return _HOLDOUT
    return _HOLDOUT_OF_NUMBERS if numeric and share * _HOLDOUT_OF_NUMBERS >= _JUDGES_OF_NUMBERS else 0.0


def _slots(facts: Mapping[str, Facts], pretrained: Mapping[str, str], *, judged: bool) -> dict[str, object]:
    """The slots of a run file: over checkpoints, what follows them and the encoders that have none are trained.

    ``judged``: stages end by the devices' hold-outs.
    """
    if not pretrained:
        return {"slots": {"pace": "early_stopping"}} if judged else {}
    whole = set(pretrained) == set(facts)
    return {"slots": {"schedule": "heads" if whole else {"heads": {"frozen": "pretrained"}}}}


def _rounds(each: int, later: int, stages: int, facts: Mapping[str, Facts], pretrained: Mapping[str, str]) -> list[int]:
    """Rounds of each stage; over checkpoints all of them are of whole encoders: half as many where none is trained."""
    if not pretrained:
        return [each] + [later] * (stages - 1)
    total = each * _STAGES
    return [0] * (stages - 1) + [total // 2 if set(pretrained) == set(facts) else total]


def _stages(facts: Mapping[str, Facts], pretrained: Mapping[str, str]) -> int:
    """Stages of the model: those that divide every checkpoint's blocks, and one where all of them stay frozen."""
    if set(pretrained) == set(facts):
        return 1
    depths = [checkpoints.depth_of(facts[m].kind, name) for m, name in pretrained.items()]
    return next(stages for stages in range(_STAGES, 0, -1) if all(depth % stages == 0 for depth in depths))


def _data(
    paths: Paths, facts: Mapping[str, Facts], given: Encoders, *, natural: bool, skip_bad: bool
) -> dict[str, object]:
    short = any(min(facts[m].steps) < encoder["window"] for m, encoder in given.items() if "window" in encoder)
    return {
        "source": paths.source,
        "partition": "natural" if natural else "uniform",
        **({"test": paths.test} if paths.test else {}),
        **({"label": paths.label} if paths.label else {}),
        **({"bad_samples": "skip"} if short or skip_bad else {}),
    }


def recipe_for(outline: Outline, modalities: int) -> str:
    """The recipe for data with labels, or without; "": nothing can be learnt of one modality without labels."""
    if outline.labelled:
        return "lw-zeros" if modalities > 1 and not outline.several else "lw-fedmml"
    return "lw-fedmml-clip" if modalities > 1 else ""


def _device_count(outline: Outline) -> int:
    if outline.groups > 2:
        return min(4, outline.groups - 1)
    return 2 if outline.samples < 100 else 3


def encoders(
    facts: Mapping[str, Facts], size: str, *, raw: bool, pretrained: Mapping[str, str] = MappingProxyType({})
) -> Encoders:
    """Every encoder's fields in the run file. ``raw``: of files, which are prepared; arrays are taken as they are.

    ``pretrained``: modality -> its checkpoint.
    """
    begun = {m: {"kind": facts[m].kind, **checkpoints.fields_of(facts[m], name)} for m, name in pretrained.items()}
    fresh = {m: {"kind": each.kind, "size": size} for m, each in facts.items() if m not in begun}
    if not raw:
        return {m: fields | _of_arrays(facts[m]) for m, fields in fresh.items()}
    windows = _windows({m: each for m, each in facts.items() if each.kind == "sensor"})
    prepared = {"vision": _vision, "audio": _audio, "text": _text, "table": _table}
    for m, fields in fresh.items():
        fields.update(windows[m] if m in windows else prepared[facts[m].kind](facts[m]))
    return {m: (begun.get(m) or fresh[m]) | _columns(each) for m, each in facts.items()}


def _of_arrays(facts: Facts) -> dict[str, Any]:
    if facts.kind == "vision":
        return _patches(facts.sides[0])
    if facts.kind == "table":
        return _table(facts)
    return {"patch": _patch(facts.steps[0]), **_FLEET} if facts.kind == "sensor" else {}


def _table(facts: Facts) -> dict[str, Any]:
    return {"depth": _STAGES}


def _columns(facts: Facts) -> dict[str, Any]:
    """The columns of the user's table that a modality is read from, by which `edgefl predict` knows them."""
    columns = {column.name: column_field(column) for column in facts.columns}
    return {"columns": columns} if columns else {}


def _patch(steps: int) -> int:
    """Time steps of a patch: some sixteen patches a sample, of at most eight steps."""
    return max(1, min(8, steps // 16))


def _vision(facts: Facts) -> dict[str, Any]:
    side = statistics.median(facts.sides)
    chosen = max((one for one in _SIDES if one <= side), default=_SIDES[0])
    return {"image_size": chosen, **_patches(chosen)} | ({} if facts.alike else {"crop": "center"})


def _patches(side: int) -> dict[str, Any]:
    """Convolutions that leave four to seven patches a side; ViT's patches where halving does not come out even."""
    patch = 2 ** max(0, side.bit_length() - 3)
    if patch > 1 and side % patch == 0:
        return {"arch": "conv", "patch": patch}
    return {"patch": max(p for p in range(1, max(2, side // 7) + 1) if side % p == 0)}


def _audio(facts: Facts) -> dict[str, Any]:
    return {
        "arch": "bands",
        "patch": 4,
        **_FLEET,
        "seconds": round(min(max(most(facts.seconds), 0.3), _MOST_SECONDS), 1),
    }


def _text(facts: Facts) -> dict[str, Any]:
    grams = _GRAMS * most(facts.words)
    length = next((length for length in _LENGTHS if length >= grams), _LENGTHS[-1])
    return {"arch": "bag", "length": length, "vocabulary": _NGRAMS}


def _windows(facts: Mapping[str, Facts]) -> Encoders:
    """Windows of all sensors, which last as long where their rates are known; none where all recordings are short.

    A tenth of the recordings may be shorter than a window. Between gaps there is room for a window and a step.
    """
    if all(each.alike and each.steps[0] <= _LONGEST_SAMPLE and not each.gaps for each in facts.values()):
        return {m: {"patch": _patch(each.steps[0]), **_FLEET} for m, each in facts.items()}
    usable = {m: sorted(each.steps)[len(each.steps) // 10] * (2 if each.gaps else 3) // 3 for m, each in facts.items()}
    fastest = max(facts, key=lambda m: facts[m].rate)
    rate = facts[fastest].rate if all(each.rate for each in facts.values()) else 0.0
    longest = min(usable[m] * (rate / facts[m].rate if rate else 1.0) for m in facts)
    wanted = min(1.5 * _WINDOW_S * rate, longest) if rate else min(_WINDOWS[-2], longest)
    window = max((one for one in _WINDOWS if one <= wanted), default=max(2, int(longest) // 2 * 2))
    if not rate:
        return {m: {"patch": _patch(window), "window": window, "step": window // 2, **_FLEET} for m in facts}
    found = {}
    for m, each in facts.items():
        own = max(2, round(window * each.rate / rate / 2) * 2)
        found[m] = {
            "patch": _patch(own),
            "window": own,
            "step": own // 2,
            "rate": float(f"{own * rate / window:.6g}"),
            **_FLEET,
        }
    return found


def _windows_each(facts: Mapping[str, Facts], given: Encoders) -> float:
    """Samples that a recording gives, in the mean; 1 where nothing is cut."""
    cut = [(facts[m].steps, encoder["window"], encoder["step"]) for m, encoder in given.items() if "window" in encoder]
    return min(
        (statistics.mean(max(0, (n - window) // step + 1) for n in steps) for steps, window, step in cut), default=1.0
    )

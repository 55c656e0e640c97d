"""Tasks with two tests: groups that devices hold, and groups that no device holds (people, a speaker, a vendor).

har_hapt: the 21 people of the authors' training part are devices, the 9 of their test part are held by none. av_digits:
one of the six speakers is left out, emoji_pairs: one of the five vendors, another one with each seed; the test concepts
are new in either test. Every third device lacks the second modality; the others' samples lose each modality by 30 %,
and keep one. Encoders, heads and batches as in one_regime.yaml; 12 rounds, four for each of three stages, of a
share of the devices drawn each time: 20 % (har), 40 % (av), 50 % (emoji).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.accuracy.pretrain import How, encoder, first_share, model_of, pretrain
from benchmarks.accuracy.table.grid import EPOCHS, SHARE, Grid
from edgefl.data.dataset import Dataset
from edgefl.data.named import named
from edgefl.models.own_checkpoint import save_encoders

Values = dict[str, Any]
#: Of each speaker, so that a run takes half a minute.
AV_ROWS = 1000


class Task(NamedTuple):
    """``share`` of the devices in each round; ``lr``: what tuning chose for plain layer-wise training there.

    ``held``: what no device holds, a group with each seed; of har_hapt always its authors' test people.
    """

    share: float
    lr: float
    held: tuple[str, ...] = ()


TASKS = {
    "har": Task(0.2, 4e-3),
    "av": Task(0.4, 1e-3, ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")),
    "emoji": Task(0.5, 4e-3, ("fxemoji", "noto", "twemoji", "openmoji", "openmoji_black")),
}
#: Given alone: (first, second).
MODALITIES = {"har": ("acc", "gyro"), "av": ("image", "audio"), "emoji": ("image", "text")}
GRID = Grid()


class Split(NamedTuple):
    """The devices' samples, the test of their groups, the test of groups that no device holds."""

    train: Dataset
    known: Dataset
    unseen: Dataset


def split(task: str, seed: int) -> Split:
    """The data of one task and seed."""
    ((name, options),) = GRID.tasks[task]["run"]["data"]["source"].items()
    found = named(name, options)
    train, test = found.train, found.test
    held = TASKS[task].held
    groups = [held[(seed - 1) % len(held)]] if held else np.unique(groups_of(named(name, {}).test))
    own = train.subset(~np.isin(groups_of(train), groups))
    apart = np.isin(groups_of(test), groups)
    if task == "av":
        rng = np.random.default_rng(seed)
        each = [np.flatnonzero(groups_of(own) == group) for group in np.unique(groups_of(own))]
        own = own.subset(np.sort(np.concatenate([rng.permutation(rows)[:AV_ROWS] for rows in each])))
    return Split(own, test.subset(~apart), test.subset(apart))


def groups_of(data: Dataset) -> np.ndarray[Any, Any]:
    """Who or what each sample is from [N]."""
    if data.groups is None:
        raise RuntimeError("the data set has no groups")
    return data.groups


def run_file(task: str, slots: Mapping[str, Any], seed: int, given: Split, folder: Path) -> Values:
    """The run file of one cell; ``folder`` is to hold train.npz and known.npz."""
    values: Values = copy.deepcopy(GRID.tasks[task]["run"])
    devices = sorted(str(group) for group in np.unique(groups_of(given.train)))
    lacking = {device: [MODALITIES[task][1]] for device in devices[2::3]}
    values["data"] = {
        "source": str(folder / "train.npz"),
        "test": str(folder / "known.npz"),
        "partition": "natural",
        "missing": {"rate": 0.3, "keep": "one", "devices": lacking},
    }
    rate = TASKS[task].lr
    values["training"]["lr"] = {"encoder": rate, "head": rate}
    return {
        "name": task,
        "seed": seed,
        "recipe": "lw-fedmml",
        "slots": {"select": {"random": {"share": TASKS[task].share}}, **slots},
        **values,
        "round": {"join_s": 600, "quorum": 0.5, "deadline_s": 1800},
        "evaluate": "stage",
        "fleet": [{"name": device} for device in devices],
    }


def pretrained(task: str, seed: int, train: Dataset, folder: Path) -> dict[str, Path]:
    """Encoders pretrained one by one on a tenth of the devices' samples, made where ``folder`` lacks them.

    By modality. Nothing of a group that no device holds is in them.
    """
    found = {}
    for m, fields in GRID.tasks[task]["run"]["model"]["encoders"].items():
        path = found[m] = folder / f"{task}-{m}-{seed if TASKS[task].held else 0}.safetensors"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            model = model_of({m: encoder(fields, train.signature()[m])}, multiway=False, seed=0)
            pretrain(model, first_share(train, SHARE), How(epochs=EPOCHS))
            save_encoders(path, model)
    return found

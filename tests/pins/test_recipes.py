"""Every recipe, mixes that use every choice of every slot, and each schedule with packed parts: results of seeded runs.

A run is a whole fleet in this process, seeded, of two or three rounds. Held of it: the object of each part of its last
state (an object's id is the sha256 of its bytes), the plan, what each round's record says, and the figures that are no
measurements. ``step_peak_bytes`` is left out: after the first round it follows what the devices measured.

Floats depend on the libraries' builds and on the processor. Where these are as when a run was written, it is
held to the bit; elsewhere its decisions are held, and of every part the norm and a projection, within ``CLOSE``. Write
the file again there, from a commit known to be right, to compare bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from memory_fleet import plan_of, run_fleet, share, state_of

from edgefl.aggregation.noise import Entropy
from edgefl.config.profiles import shipped
from edgefl.records import Budget
from edgefl.registry import methods
from edgefl.roles import ROLES
from edgefl.run_records import RoundRow, RunReport
from pins.golden import WRITING, check, check_keys, differing, pinned

FILE = "recipes.json"
#: Device -> samples and shares of them that have each modality: sizes differ, so that weights by samples show.
SHARES = {
    "whole": (24, {"a": 1.0, "b": 1.0}),
    "patchy": (18, {"a": 1.0, "b": 0.5}),
    "only-a": (30, {"a": 1.0}),
    "only-b": (12, {"b": 1.0}),
}
#: Large enough for packed parts: a tensor below 1,024 values travels whole.
WIDE = ("model.head.width=64", "model.head.out=32")
THREE = "training.rounds=[2, 1]"
_MMIC = (
    "slots.cluster={lsh: {clusters: 2}}",
    "slots.select={banzhaf: {warmup_rounds: 1, share: 0.7}}",
    THREE,
)

#: What lets a tiny fleet show a recipe's slots in two or three rounds.
OF_RECIPES: dict[str, tuple[str, ...]] = {
    "apromfl": ("slots.prototypes={adaptive: {local_clusters: 4, clusters: 4, neighbours: 2}}", THREE),
    "fedmvp": ("slots.fusion={joint: {width: 8, heads: 2, layers: 1}}",),
    "lw-prototypes": (THREE,),
    "mmic": _MMIC,
    "mmic-gmc": _MMIC,
    "mmic-reconstruction": _MMIC,
}
_ALIGNED = "cross_entropy: {}, prototype_contrast: {negatives: classes}, modality_contrast: {}, prototype_alignment: {}"
#: What no recipe has: name -> (recipe, what differs).
MIXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": (
        "end_to_end",
        (
            "slots.optimise={momentum: {lr: 0.9, beta: 0.5}}",
            "slots.missing={random: {drop: 0.3}}",
            "slots.select={random: {share: 0.7}}",
            "slots.objective={cross_entropy: {}, clip: {weight: 0.5}, margin: {weight: 0.5}, proximal: {weight: 0.1}}",
        ),
    ),
    "prototypes of own models": (
        "end_to_end",
        (
            "slots.cluster={lsh: {clusters: 2, models: own}}",
            "slots.prototypes={class_mean: {match: l1, weighting: class, k: 2, start: gaussian}}",
            "slots.missing={prototype: {by: match, drop: 0.3}}",
            f"slots.objective={{{_ALIGNED}}}",
        ),
    ),
    "lsh of own models": (
        "end_to_end",
        (
            "slots.cluster={lsh: {clusters: 2, models: own}}",
            "slots.missing={reconstruction: {drop: 0.2}}",
            "slots.objective={cross_entropy: {}, reconstruction: {weight: 0.5}}",
            "slots.weight={fediot: {factor: 3}}",
            THREE,
        ),
    ),
    "coalitions of one cluster": (
        "mmic",
        (
            "slots.cluster={lsh: {clusters: 1}}",
            "slots.select={banzhaf: {warmup_rounds: 1, share: 0.7, temperature: 500}}",
            "slots.repair={poverty: {form: exact, donors: complete}}",
            "slots.optimise={fedadagrad_mpo: {temperature: 2, beta: 0.5, risk: 0.9}}",
            "training.rounds=[3, 1]",
        ),
    ),
    "mmic as its authors' code": (
        "mmic",
        (
            "slots.cluster={lsh_joining: {clusters: 2}}",
            "slots.select={banzhaf: {warmup_rounds: 1, share: 0.7, warmup: all}}",
            "slots.missing=zero_input",
            "slots.repair={poverty: {donors: cluster}}",
            "slots.optimise={fedadagrad_mpo: {unit: percent}}",
            "training.rounds=[3, 1]",
        ),
    ),
    "one network of the largest": (
        "pmcmfl",
        (
            "slots.prototypes={class_mean: {match: prior, combine: largest, min_count: 1}}",
            "slots.missing={prototype: {by: match}}",
            "slots.select=all",
        ),
    ),
    "averaged networks": (
        "pmcmfl",
        (
            "slots.prototypes={class_mean: {match: classifier, combine: average, temperature: 0.5}}",
            "slots.fusion=concat",
            "slots.sharing=separate",
            "slots.select=all",
        ),
    ),
    "stages that hold-outs end": (
        "lw-fedmml",
        (
            "slots.pace={early_stopping: {patience: 1}}",
            "training.holdout=0.3",
            "training.lr={encoder: 0.1, head: 0.1}",
            THREE,
        ),
    ),
    "nearest by l2": ("lw-prototypes", ("slots.prototypes={class_mean: {match: l2, min_count: 5}}", THREE)),
    "shared attention": (
        "end_to_end",
        ("slots.sharing=multiway", "slots.fusion=mean", "slots.objective={cross_entropy: {}, gmc: {}}"),
    ),
    "progressive with a joint fusion": (
        "fedmvp",
        (
            "slots.schedule=progressive",
            "slots.fusion={joint: {width: 8, heads: 2, layers: 1}}",
            "slots.objective={cross_entropy: {}, mcm: {form: ntxent}, ram: {weight: 0.5}}",
            "slots.select=all",
        ),
    ),
    "personal without labels": (
        "apromfl",
        (
            "slots.prototypes={adaptive: {local_clusters: 4, clusters: 3, neighbours: 2, min_count: 1}}",
            "slots.objective={clip: {}, model_transfer: {temperature: 0.5}}",
        ),
    ),
    "depths left out": ("end_to_end", ("slots.schedule=mixed", "slots.combine={mean: {absent: leave_out}}")),
    "trimmed": ("end_to_end", ("slots.combine={trimmed_mean: {share: 0.3}}",)),
    "norms clipped": ("end_to_end", ("slots.combine=norm_clipping",)),
    "clipped and noisy": (
        "end_to_end",
        ("slots.combine={gaussian_noise: {clip: 3.0, epsilon: 100, denominator: 3}}", THREE),
    ),
    "noise of devices": (
        "end_to_end",
        ("slots.combine={gaussian_noise: {clip: 3.0, epsilon: 100, at: devices, dishonest: 0}}", THREE),
    ),
    "sgd": (
        "end_to_end",
        (
            "training.optimizer=sgd",
            "training.clip_norm=0.5",
            "training.epochs=2",
            "training.lr.encoder=[0.01, 0.02]",
            "model.head.dropout=0.1",
            "model.head.norm=layer",
            "training.holdout=0",
        ),
    ),
    "adafactor": ("prog-fedmml", ("training.optimizer=adafactor", "model.head.kind=none", "round.largest_share=0.4")),
}
#: Each schedule with parts packed both ways, and with what a frozen prefix gives stored.
PACKED: dict[str, tuple[str, ...]] = {
    "end_to_end": ("transfer.up=delta+top", "transfer.down=f16", "transfer.top=0.05"),
    "progressive": ("transfer.up=delta+int4", "transfer.down=delta+int8", THREE),
    "layerwise": ("transfer.up=delta+bf16", "transfer.down=int8", "training.cache=f16", "training.rounds=[1, 2]"),
    "freeze": (
        "transfer.up=delta+int8",
        "transfer.down=delta+bf16",
        "training.lr_fall=cosine",
        "training.rounds=[2, 2]",
    ),
    "heads": ("transfer.up={head/*: int8, '*': delta+f16}", "transfer.down=bf16", "training.cache=f32", THREE),
    "sampled": ("transfer.up=delta+int8", "transfer.down=delta+f16", "training.rounds=[2, 2]"),
    "mixed": ("transfer.up=delta+int8", "transfer.down=delta+f16", "training.rounds=[1, 2]"),
}
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, OF_RECIPES.get(name, ())) for name in shipped("recipes")},
    **{f"mix: {name}": mix for name, mix in MIXES.items()},
    **{f"packed: {s}": ("end_to_end", (f"slots.schedule={s}", *WIDE, *changes)) for s, changes in PACKED.items()},
}
#: FLOPs of a round that each leave a device less than the whole model.
BUDGETS = {
    "packed: mixed": {"whole": Budget(flops=2.7e6), "patchy": Budget(flops=1.3e6)},
    "mix: depths left out": {"whole": Budget(flops=1.1e6), "only-a": Budget(flops=0.65e6)},
}
#: Runs in which "whole" has no labels: AproMFL's devices without them cluster their pairs.
UNLABELLED = {"apromfl", "mix: personal without labels"}
PREDICTED = ("flops", "payload_down_bytes", "payload_up_bytes")


#: Share of a part's norm by which norm and projection may be off on another machine: three times what was seen with
#: other vector instructions. Moments of gradients, and matchers trained from nothing, differ ten times as much.
CLOSE, CLOSE_UNSTABLE = 0.02, 0.25
#: Of a round, what follows from the last bits of floats.
OF_BITS = ("record", "metrics", "evaluations")


#: With every change the five systems' recipes, a baseline and packed parts; all of them nightly.
OFTEN = {
    "lw-fedmml",
    "prog-fedmml",
    "pmcmfl",
    "apromfl",
    "fedmvp",
    "mmic",
    "mmic-layer",
    "fedavg-ignore",
    "packed: layerwise",
}


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_seeded_run_gives_the_same_results(ram_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    noise = np.random.default_rng(1)

    def gaussians(count: int, entropy: Entropy) -> np.ndarray:
        """Of devices, which come in any order, the same of each count."""
        return (noise if entropy is os.urandom else np.random.default_rng(count)).normal(size=count)

    monkeypatch.setattr("edgefl.aggregation.noise.gaussians", gaussians)
    monkeypatch.setattr("edgefl.methods.privacy.noised_share.entropy", bytes)
    recipe, changes = RUNS[name]
    plan = plan_of(ram_path, recipe, "ab", len(SHARES), ["training.batch_size=6", *changes])
    own = {
        device: share(rows, present, seed, labelled=device != "whole" or name not in UNLABELLED)
        for seed, (device, (rows, present)) in enumerate(SHARES.items())
    }
    report = run_fleet(ram_path, plan, own, budgets=BUDGETS.get(name))
    assert report.status == "done"
    store, state = state_of(ram_path)
    found = {
        "slots": {role: list(chosen) for role, chosen in report.config["recipe"].items() if role in ROLES}
        | {"upload": list(plan.slots.upload)},
        "plan": digest(json.loads(json.dumps(msgspec.to_builtins(plan)).replace(str(ram_path), ""))),
        "state": {part: ref.id for part, ref in state.items()},
        "figures": {part: figures(store.read(ref.id)) for part, ref in state.items()},
        "rounds": {f"{row.stage}/{row.round}": of_round(report, row) for row in report.rounds},
    }
    here = machine()
    if WRITING or pinned(FILE)[name]["written_with"] == here:
        check(FILE, name, {"written_with": here, **found})
    else:
        check_close(name, json.loads(json.dumps(found)), pinned(FILE)[name])


def check_close(name: str, found: dict[str, Any], held: dict[str, Any]) -> None:
    """The two runs, of two machines, decided the same and their parts are close."""
    changed = differing(decisions(found), decisions(held))
    assert not changed, f"{name!r} of tests/pins/{FILE} has changed: {', '.join(changed[:20])}"
    for part, (norm, projection) in held["figures"].items():
        close = CLOSE_UNSTABLE if part.startswith("server/") or "match/" in part else CLOSE
        there = pytest.approx([norm, projection], rel=0, abs=close * norm)
        assert found["figures"][part] == there, f"{part} of {name!r} is not what tests/pins/{FILE} has"


def decisions(run: dict[str, Any]) -> dict[str, Any]:
    """What does not follow from the last bits of floats."""
    rounds = {number: {k: v for k, v in row.items() if k not in OF_BITS} for number, row in run["rounds"].items()}
    return {"slots": run["slots"], "plan": run["plan"], "parts": sorted(run["state"]), "rounds": rounds}


def figures(content: bytes) -> tuple[float, float]:
    """Norm of a part's values and their projection on a fixed vector of signs; of another object (0, 0)."""
    try:
        tensors = safetensors.numpy.load(content)
    except safetensors.SafetensorError:
        return 0.0, 0.0
    values = np.concatenate([tensors[key].astype(np.float64).ravel() for key in sorted(tensors)] or [np.zeros(0)])
    signs = np.random.default_rng(0).choice((-1.0, 1.0), values.size)
    return float(np.linalg.norm(values)), float(values @ signs)


def machine() -> dict[str, str]:
    """What floats depend on to the bit: the libraries' builds, the processor's model and its instructions.

    A virtual machine may hide some instructions of its processor, by which numpy adds in another order.
    """
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()]
    of = {key.strip(): value.strip() for key, _, value in lines}
    kind = " ".join(of.get(key, "") for key in ("vendor_id", "cpu family", "model"))
    flags = hashlib.sha256(of.get("flags", of.get("Features", "")).encode()).hexdigest()[:8]
    return {"torch": torch.__version__, "numpy": np.__version__, "processor": f"{kind} {flags}"}


def test_no_run_is_left_out():
    check_keys(FILE, set(RUNS))


def test_the_runs_use_every_choice_of_every_role():
    used: dict[str, set[str]] = {role: set() for role in ROLES}
    for name in RUNS:
        for role, chosen in pinned(FILE)[name]["slots"].items():
            used[role] |= set(chosen)
    assert used == {role: set(methods(role)) for role in ROLES}


def digest(value: Any) -> str:
    """sha256 of the value as JSON."""
    return hashlib.sha256(json.dumps(msgspec.to_builtins(value), sort_keys=True).encode()).hexdigest()


def of_round(report: RunReport, made: RoundRow) -> dict[str, Any]:
    """What the ledger says of a round, but for times and measurements; devices answer in any order."""
    number = (made.stage, made.round)
    rows = {row.device: row for row in report.assignments if (row.stage, row.round) == number}
    return {
        "participants": sorted(made.participants),
        "status": {device: row.status for device, row in rows.items()},
        "record": digest(made.record),
        "trained": digest({device: [row.trained, row.samples] for device, row in rows.items()}),
        "metrics": digest({device: row.metrics for device, row in rows.items()}),
        "predicted": digest({d: {n: row.predicted.get(n) for n in PREDICTED} for d, row in rows.items()}),
        "evaluations": digest([row for row in report.evaluations if (row.stage, row.round) == number]),
    }

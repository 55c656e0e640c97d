"""Random valid run files by seed: models, methods, local training, packing, data, and budgets near their own prices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from msgspec.structs import replace

from edgefl.aggregation.weights import wanted
from edgefl.api.run_inputs import shares_of
from edgefl.budget.fit import place
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import set_names
from edgefl.data.levels import as_labels
from edgefl.errors import EdgeFLError
from edgefl.models.parts import part_layout
from edgefl.models.staged import build
from edgefl.plan.compile import compile_run
from edgefl.plan.job import Candidate, Job, Placement, RunPlan
from edgefl.plan.packed_sizes import object_bytes
from edgefl.plan.periods import exchangeable, period_length
from edgefl.pricing.round_price import process_pricer
from edgefl.records import PACKINGS, Budget, Capabilities

#: Recipes of the folder profiles/recipes.
RECIPES = (
    *("apromfl", "end_to_end", "fedadam", "fedavg-ignore", "fedmvp", "fedprox", "lw-fedmml", "lw-fedmml-clip"),
    *("lw-prototypes", "lw-zeros", "mmic", "mmic-gmc", "mmic-layer", "mmic-reconstruction", "pmcmfl", "prog-fedmml"),
)
SCHEDULES = ("end_to_end", "freeze", "heads", "layerwise", "mixed", "progressive")
#: Idle trainer that process budgets are drawn around. Bytes.
BASE_BYTES = 254 * 2**20
#: Draws until one is a run that EdgeFL takes and ``Size`` admits.
DRAWS = 60


class Size(NamedTuple):
    """Limits of a run: highest width and samples, step memory and FLOPs of a round."""

    width: int = 160
    samples: int = 2000
    step_bytes: float = 300 * 2**20
    flops: float = 6e9
    devices: int = 2


WHOLE = Size()
#: For tests: a run takes a second.
SMALL = Size(32, 120, 40 * 2**20, 0.6e9, 2)


class RandomRun(NamedTuple):
    """A run of a seed, ready in a folder: its plan, each device's share and budget.

    ``traits``: what a page says of it.
    """

    seed: int
    plan: RunPlan
    shares: Mapping[str, Path]
    budgets: Mapping[str, Budget]
    traits: Mapping[str, Any]


def random_run(seed: int, folder: Path, size: Size = WHOLE) -> RandomRun:
    """The run of ``seed``; its data and run file go to ``folder``. Raises NoRunError if no draw is a valid run."""
    for draw in range(DRAWS):
        rng = np.random.default_rng((seed, draw))
        values, data = run_values(rng, seed, size)
        here = folder / str(draw)
        here.mkdir(parents=True)
        try:
            return _ready(seed, values, data, here, rng, size)
        except EdgeFLError:
            continue
    raise NoRunError(f"no valid run among {DRAWS} draws of seed {seed}")


class NoRunError(EdgeFLError):
    """A seed without a valid run."""


class _TooLargeError(EdgeFLError):
    """A run beyond the limits of its size."""


def run_values(rng: np.random.Generator, seed: int, size: Size) -> tuple[dict[str, Any], tuple[Dataset, Dataset]]:
    """A run file that may be valid, and its samples and test set."""
    stages = int(rng.integers(1, 4))
    kinds = rng.choice(["sensor", "table", "vision", "text", "audio"], int(rng.choice([1, 2, 2, 2, 3])))
    encoders, shapes = {}, {}
    for i, kind in enumerate(kinds):
        encoders[f"m{i}"], shapes[f"m{i}"] = _encoder(rng, str(kind), stages, size)
    recipe = str(rng.choice(RECIPES))
    slots: dict[str, Any] = {}
    if rng.random() < 0.35:
        slots["schedule"] = str(rng.choice(SCHEDULES))
    if rng.random() < 0.2:
        slots["missing"] = str(rng.choice(["zero", "random", "ignore", "zero_input"]))
    if rng.random() < 0.15:
        slots["fusion"] = str(rng.choice(["concat", "mean", "joint"]))
    batch = int(2 ** rng.uniform(1, 8)) if rng.random() < 0.8 else int(rng.integers(2, 257))
    optimizer = str(rng.choice(["adamw", "sgd", "adafactor"]))
    rates = {"encoder": 1e-3, "head": 1e-3}
    training: dict[str, Any] = {
        "rounds": [int(n) for n in rng.choice([0, 1, 1, 2], stages)],
        "epochs": int(rng.choice([1, 1, 2])),
        "batch_size": min(batch, size.samples // 2),
        "optimizer": optimizer,
        "lr": rates,
        "momentum": float(rng.choice([0.0, 0.9])),
        "clip_norm": float(rng.choice([0.0, 0.0, 1.0])),
        "cache": str(rng.choice(["none", "f16", "f16", "f32"])),
    }
    training["rounds"][-1] = max(1, training["rounds"][-1])
    if rng.random() < 0.3:
        training["holdout"] = float(rng.choice([0.1, 0.2, 0.5]))
    if optimizer != "adafactor" and rng.random() < 0.3:
        training["lean"] = {"optimizer": "adafactor", "lr": rates}
    devices = size.devices
    head: dict[str, Any] = {"width": int(2 ** rng.uniform(4, 10)), "out": int(rng.choice([8, 16, 64]))}
    if size.width < WHOLE.width:
        head["width"] = int(rng.choice([16, 64, 256]))
    if rng.random() < 0.3:
        head["norm"] = str(rng.choice(["batch", "layer", "none"]))
    if rng.random() < 0.08:
        head = {"kind": "none"}
    model: dict[str, Any] = {"stages": stages, "encoders": encoders, "head": head}
    model["fusion_width"] = int(rng.choice([16, 64, 128]))
    if rng.random() < 0.2:
        model["lora"] = {"rank": int(rng.choice([1, 4, 8]))}
    values: dict[str, Any] = {
        "name": "fuzz",
        "seed": seed,
        "recipe": recipe,
        "slots": slots,
        "model": model,
        "training": training,
        "transfer": _transfer(rng),
        "round": {"devices": devices, "join_s": 60, "deadline_s": 240, "quorum": 0.1},
        "evaluate": "stage",
        "fleet": [{"name": f"d{i}"} for i in range(devices)],
        "data": {"source": "data.npz", "test": "test.npz", "missing": _missing(rng, devices)},
    }
    rows = int(max(16, 2 ** rng.uniform(4, np.log2(size.samples)), training["batch_size"] * 1.3)) * devices
    form = str(rng.choice(["classes", "classes", "classes", "sets", "numbers", "none"]))
    if recipe == "lw-fedmml-clip" and rng.random() < 0.5:
        form = "none"
    kind_of = {m: str(kind) for m, kind in zip(encoders, kinds, strict=True)}
    vocabulary = {m: one.get("vocabulary", 2) for m, one in encoders.items()}
    data = (samples(rng, rows, shapes, kind_of, vocabulary, form), samples(rng, 12, shapes, kind_of, vocabulary, form))
    return values, data


def _transfer(rng: np.random.Generator) -> dict[str, str]:
    """Packings both ways, of half the runs none."""
    ways = {way: str(rng.choice(["f32", *PACKINGS])) for way in ("up", "down")}
    return ways if rng.random() < 0.5 else dict.fromkeys(ways, "f32")


def _missing(rng: np.random.Generator, devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["rate"] = float(rng.choice([0.1, 0.3, 0.5]))
        found["lose"] = str(rng.choice(["each", "one"]))
    if devices > 1 and rng.random() < 0.25:
        found["devices"] = {"d1": ["m0"]}
    if devices > 1 and rng.random() < 0.1:
        found["unlabelled"] = ["d1"]
    return found


def _encoder(rng: np.random.Generator, kind: str, stages: int, size: Size) -> tuple[dict[str, Any], tuple[int, ...]]:
    """(Fields of an encoder, the shape of its samples.)"""
    heads = int(rng.choice([1, 2, 4]))
    width = max(8, int(2 ** rng.uniform(4, np.log2(size.width))) // 8 * 8)
    found: dict[str, Any] = {
        "kind": kind,
        "width": width,
        "depth": stages * int(rng.choice([1, 1, 2])),
        "heads": heads,
        "dropout": float(rng.choice([0.0, 0.0, 0.1])),
        "mlp_ratio": float(rng.choice([2, 4])),
    }
    few = size.width < WHOLE.width
    if kind == "sensor":
        found["patch"] = int(rng.choice([2, 4, 8]))
        return found, (int(rng.integers(16, 32 if few else 257)), int(rng.integers(1, 10)))
    if kind == "table":
        return found, (int(rng.integers(2, 12 if few else 60)), 2)
    if kind == "vision":
        found["patch"] = patch = int(rng.choice([4, 8]))
        if rng.random() < 0.3:
            found["arch"] = "conv"
        side = patch * int(rng.integers(2, 4 if few else 9))
        return found, (side, side, int(rng.choice([1, 3])))
    if kind == "audio":
        found["patch"] = int(rng.choice([4, 8]))
        if rng.random() < 0.3:
            found["arch"] = "bands"
        return found, (int(rng.integers(16, 32 if few else 129)), int(rng.choice([16, 40])))
    found["vocabulary"] = int(2 ** rng.uniform(6, 10 if few else 14))
    found["arch"] = str(rng.choice(["distilbert", "bert", "bag"]))
    if found["arch"] != "bag" and rng.random() < 0.3:
        found["pool"] = "mean"
    return found, (int(rng.integers(4, 16 if few else 65)),)


def samples(
    rng: np.random.Generator,
    rows: int,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    vocabulary: Mapping[str, int],
    form: str,
) -> Dataset:
    """Noise of these shapes; ``form`` of the labels: classes, sets of them, numbers, or none."""
    values = {
        m: rng.integers(1, vocabulary[m], (rows, *shape))
        if kinds[m] == "text"
        else rng.normal(size=(rows, *shape)).astype(np.float32)
        for m, shape in shapes.items()
    }
    for m in (m for m, kind in kinds.items() if kind == "table"):
        values[m][..., 1] = 1.0
    labels, targets, sets = None, None, None
    names: tuple[str, ...] = ()
    if form == "classes":
        labels, names = np.arange(rows) % 5, tuple("abcde")
    elif form == "sets":
        sets, names = rng.random((rows, 4)) < 0.4, set_names("abcd")
        labels = sets.argmax(axis=1)
    elif form == "numbers":
        targets = np.linspace(0, 1, rows)
        labels, names = as_labels(targets, tuple(f"~{i / 8:.9g}" for i in range(9)))
    present = {m: np.ones(rows, np.bool_) for m in shapes}
    return Dataset(values, present, labels, names, [str(i) for i in range(rows)], targets=targets, sets=sets)


def _ready(
    seed: int,
    values: dict[str, Any],
    data: tuple[Dataset, Dataset],
    folder: Path,
    rng: np.random.Generator,
    size: Size,
) -> RandomRun:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    config, recipe = load_run(str(file))
    compile_run(config, recipe, run="fuzz", shapes=data[0].signature(), label_names=data[0].label_names)
    for one, name in zip(data, ("data", "test"), strict=True):
        one.save_npz(folder / f"{name}.npz")
    prepared = shares_of(config, [device.name for device in config.fleet], folder / "shares")
    plan = compile_run(
        config, recipe, run="fuzz", shapes=prepared.signature, label_names=prepared.label_names, test=prepared.test
    )
    budgets, peak = {}, 0
    for share in prepared.shares:
        placed = placements(plan, Candidate(
            device=share.device, samples=share.samples, class_counts=share.class_counts,
            capabilities=Capabilities(torch_device="cpu"),
        ))  # fmt: skip
        fits = [one.cost for one in placed if one.refusal is None]
        if not fits or max(cost.step_peak_bytes for cost in fits) > size.step_bytes:
            raise _TooLargeError("too large")
        if max(cost.flops for cost in fits) > size.flops:
            raise _TooLargeError("too large")
        peak = max(peak, *(cost.step_peak_bytes for cost in fits))
        budgets[share.device] = _budget(rng, fits) if share.device != "d0" and rng.random() < 0.7 else Budget()
    shares = {share.device: Path(share.path) for share in prepared.shares}
    return RandomRun(seed, plan, shares, budgets, _traits(values, prepared.shares[0].samples))


def placements(plan: RunPlan, candidate: Candidate) -> list[Placement]:
    """A device's placement in each stage with rounds."""
    model = build(plan.model, device="meta")
    layouts = {part: part_layout(model, part) for part in model.parts_present}
    sizes = {part: object_bytes(layout) for part, layout in layouts.items()}
    found = []
    for stage, hyper in zip(plan.stages, plan.hypers, strict=True):
        if stage.rounds:
            layers = {}
            if period_length(plan, stage) > 1:
                trained = {p: {name: shape for name, (_, shape) in layouts[p].items()} for p in stage.trained}
                layers = exchangeable(trained, sum(sizes[p] for p in trained))
            job = Job(plan.model, stage, hyper, plan.slots, transfer=plan.transfer)
            signed = wanted(plan.server)
            found.append(place(job, candidate, sizes, process_pricer(), signature=signed, layers=layers))
    return found


def _budget(rng: np.random.Generator, costs: list[Any]) -> Budget:
    """Limits at 0.7 to 1.3 of what the dearest stage is predicted to take; of memory from 0.5 on."""
    found = Budget()
    step = max(cost.step_peak_bytes for cost in costs)
    payload = max(cost.joining_down_bytes + cost.signature_bytes + cost.whole_up_bytes for cost in costs)
    flops = max(cost.flops + cost.filling_flops for cost in costs)
    for field in rng.choice(["step_memory_bytes", "memory_bytes", "flops", "payload_bytes"], 2):
        factor = float(rng.uniform(0.5 if "memory" in field else 0.7, 1.3))
        value = {"step_memory_bytes": step, "memory_bytes": step, "flops": flops, "payload_bytes": payload}[field]
        base = BASE_BYTES if field == "memory_bytes" else 0
        found = replace(found, **{str(field): round(base + factor * value)})
    return found


def _traits(values: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    model, training = values["model"], values["training"]
    encoders = ", ".join(
        f"{one['kind']} {one.get('arch', '')}{one['width']}x{one['depth']}" for one in model["encoders"].values()
    )
    return {
        "recipe": values["recipe"],
        "slots": values["slots"],
        "encoders": encoders,
        "head": model["head"],
        "lora": model.get("lora", {}).get("rank", 0),
        "stages": model["stages"],
        **{name: training[name] for name in ("rounds", "epochs", "batch_size", "optimizer", "clip_norm", "cache")},
        "holdout": training.get("holdout"),
        "transfer": values["transfer"],
        "missing": values["data"]["missing"],
        "samples": dict(counts),
    }

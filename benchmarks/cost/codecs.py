"""Packings beside each other: bits a parameter as sent, squared error, accuracy of a run, milliseconds a MB.

Error: |q - x|^2 / |x|^2 of what is reconstructed, one round, without the residual. *Real* updates are those of one
device of har_hapt (person-01, layer-wise, width 32, as in savings.yaml), round by round; Gaussian and heavy-tailed
(Student's t, 3 degrees of freedom) ones are 512 x 1024 values. Bits are of whole objects, headers and the tensors that
travel whole included: in the small model these are most of the fewest bits. Milliseconds are of processor time, for 16
MiB in f32.

Accuracy: har_hapt by the run files of savings.yaml, with these packings up and down, stages' last rounds whole or
packed; the difference to no packing, seed by seed. One line of JSON a run is kept, and the same command goes on where
it stopped. A fifth of the devices is in a round: most hold an older base, and fetch parts whole.

    python -m benchmarks.cost.codecs [--seeds 5] [--only "eden1 up"] [--write docs/results/codecs.md]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

from benchmarks.common.exclusive import claimed
from benchmarks.common.result_lines import add_row, rows_in, show
from benchmarks.common.spread import spread
from benchmarks.cost.savings import GIVEN, headline, merged, pretrain_missing
from benchmarks.cost.savings_runs import Outcome, Run, done, made
from edgefl.protocol.packing import Compressed, compress, decompress
from edgefl.protocol.rotated_parts import travels_whole
from edgefl.records import PACKINGS

Tensors = Mapping[str, np.ndarray]
#: (packing, share of the largest) of the tables.
FORMS = [(packing, 0.1) for packing in PACKINGS if packing.startswith("delta+")]
#: Name of a row -> its transfer settings.
EXCHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "eden1 up, eden2 down": {"up": "delta+eden1", "down": "delta+eden2"},
    "eden2 up, eden4 down": {"up": "delta+eden2", "down": "delta+eden4"},
    "eden3 up, eden4 down": {"up": "delta+eden3", "down": "delta+eden4"},
    "eden4 both": {"up": "delta+eden4", "down": "delta+eden4"},
    "int4 both": {"up": "delta+int4", "down": "delta+int4"},
    "top 10 % up, eden4 down": {"up": "delta+top", "down": "delta+eden4"},
    "eden1 up, eden2 down, last rounds too": {"up": "delta+eden1", "down": "delta+eden2", "closing": "packed"},
    "eden2 up, eden4 down, last rounds too": {"up": "delta+eden2", "down": "delta+eden4", "closing": "packed"},
}
#: Values that are timed: 16 MiB.
TIMED = (2048, 2048)


class Form(msgspec.Struct, frozen=True):
    """Figures of a packing. ``bits``, ``errors``: by the kind of update; ``encode_ms``, ``decode_ms``: a MB of f32."""

    packing: str
    bits: dict[str, float]
    errors: dict[str, float]
    encode_ms: float
    decode_ms: float


class Update(NamedTuple):
    """A part before and after a round."""

    before: Tensors
    after: Tensors


def plan(seeds: Sequence[int]) -> list[Run]:
    """Every run of every exchange, run files as in savings.yaml."""
    given, runs = GIVEN["har"], []
    for name, transfer in EXCHANGES.items():
        values = merged(merged(given["run"], given["layerwise"]), {"transfer": transfer} if transfer else {})
        for encoder in values["model"]["encoders"].values():
            encoder["pretrained"] = str(Path(encoder["pretrained"]).resolve())
        runs += [Run("har", name, seed, {**values, "seed": seed}) for seed in seeds]
    return runs


def real_updates() -> list[Update]:
    """Every part that one device alone has trained, in every round but the stages' last, and what it was offered."""
    from benchmarks.common.inprocess import run_values
    from device_agent.trainer import exchanged_parts

    given, found = GIVEN["har"], []
    values = {**merged(given["run"], given["layerwise"]), "slots": {"select": {"all": {}}}, "seed": 1}
    values |= {"fleet": values["fleet"][:1], "data": {**values["data"], "missing": {}}}
    values |= {"transfer": {"up": "delta+bf16"}}  # nearly nothing is lost

    def noted(target: Tensors, base: Tensors, *how: Any, **more: Any) -> Compressed:
        found.append(Update(*({name: value.copy() for name, value in side.items()} for side in (base, target))))
        return compress(target, base, *how, **more)

    with (
        tempfile.TemporaryDirectory(prefix="edgefl-codecs-") as folder,
        mock.patch.object(exchanged_parts, "compress", noted),
    ):
        run_values(Path(folder), values)
    return found


def drawn(kind: str) -> Update:
    """A change of one tensor of made-up values."""
    rng, shape = np.random.default_rng(7), (512, 1024)
    change = rng.standard_normal(shape) if kind == "Gaussian" else rng.standard_t(3, shape)
    return Update({"w": np.zeros(shape, np.float32)}, {"w": change.astype(np.float32)})


def measured(updates: Mapping[str, Sequence[Update]]) -> list[Form]:
    """Figures of every packing on every kind of update."""
    rows = []
    for packing, top in FORMS:
        bits, errors = {}, {}
        for kind, some in updates.items():
            sent = values = 0
            lost = change = 0.0
            for before, after in some:
                made_ = compress(after, before, packing, top)
                sent += len(made_.data)
                values += sum(tensor.size for tensor in after.values())
                for name in (name for name, tensor in after.items() if not travels_whole(tensor)):
                    lost += float(np.square(made_.reconstructed[name] - after[name], dtype=np.float64).sum())
                    change += float(np.square(after[name] - before[name], dtype=np.float64).sum())
            bits[kind], errors[kind] = 8 * sent / values, lost / change
        rows.append(Form(packing, bits, errors, *_times(packing, top)))
    return rows


def _times(packing: str, top: float) -> tuple[float, float]:
    """(encode, decode) in ms a MB, the best of three."""
    target = {"w": np.random.default_rng(0).standard_normal(TIMED).astype(np.float32)}
    base, mib = {"w": np.zeros(TIMED, np.float32)}, 4 * TIMED[0] * TIMED[1] / 2**20
    encode, decode = [], []
    for _ in range(3):
        copy = {"w": target["w"].copy()}
        started = time.process_time()
        data = compress(copy, base, packing, top, reconstruct=False).data
        encode.append(time.process_time() - started)
        started = time.process_time()
        decompress(data, base, packing)
        decode.append(time.process_time() - started)
    return 1e3 * min(encode) / mib, 1e3 * min(decode) / mib


def page(forms: Sequence[Form], runs: Sequence[Run], results: Sequence[Outcome]) -> str:
    """Markdown: the packings, then the runs."""
    about = (__doc__ or "").split("\n\n")
    kinds = list(forms[0].errors) if forms else []
    lines = ["# Packings of exchanged parts", "", *about[1].splitlines(), ""]
    columns = ["packing", *(f"bits, {kind}" for kind in kinds), *(f"error, {kind}" for kind in kinds)]
    columns += ["ms a MB, encode", "decode"]
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for form in forms:
        cells = [form.packing, *(f"{form.bits[kind]:.2f}" for kind in kinds)]
        cells += [f"{form.errors[kind]:.2g}" for kind in kinds]
        lines.append("| " + " | ".join([*cells, f"{form.encode_ms:.1f}", f"{form.decode_ms:.1f}"]) + " |")
    lines += ["", "## Accuracy", "", *about[2].splitlines(), ""]
    rows = done(runs, results)
    plain = {row.seed: headline(row) for row in rows if row.method == "none"}
    lines += ["| exchange | accuracy, % | against none, seed by seed | payload, MiB | seeds |", "|---|---|---|---|---|"]
    for name in EXCHANGES:
        own = [row for row in rows if row.method == name]
        if own:
            apart = [headline(row) - plain[row.seed] for row in own if row.seed in plain]
            told = "" if name == "none" else spread(apart, signed=True, digits=2) if apart else "–"
            payload = statistics.mean(row.payload_bytes for row in own) / 2**20
            accuracy = spread([headline(row) for row in own], digits=2)
            lines.append(f"| {name} | {accuracy} | {told} | {payload:,.1f} | {len(own)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="exchanges whose names begin so only")
    parser.add_argument("--no-runs", action="store_true", help="the packings alone, and runs that are kept")
    parser.add_argument("--results", type=Path, default=Path("docs/results/codecs"))
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runs, file = plan(range(1, options.seeds + 1)), options.results / "runs.jsonl"
    with claimed(file):
        pretrain_missing()
        kept = rows_in(file, Outcome)
        wanted = [run for run in runs if not options.only or run.saving.startswith(tuple(options.only))]
        for run in wanted if not options.no_runs else ():
            if not done([run], kept):
                row = made(run)
                add_row(file, row)
                sys.stderr.write(
                    f"{run.saving}, {run.seed}: {row.error or f'{headline(row):.2f}'} ({row.wall_s:.0f} s)\n"
                )
    updates = {"real": real_updates(), **{kind: [drawn(kind)] for kind in ("Gaussian", "heavy tails")}}
    show(page(measured(updates), runs, rows_in(file, Outcome)), options.write)


if __name__ == "__main__":
    main()

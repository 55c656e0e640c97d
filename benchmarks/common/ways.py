"""The command line of a benchmark that compares ways to train over seeds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.common.result_lines import Row, add_row, rows_in, show


def compare_ways(
    about: str | None,
    run: Callable[[str, int], Row],
    page: Callable[[Sequence[Row]], str],
    *,
    ways: Iterable[str],
    seeds: int,
    kind: type[Row],
    file: str,
) -> None:
    """Run what the rows' file lacks of every way and seed, and show or write the page of all rows.

    ``run``: (way, seed) -> its row, of ``kind`` with fields ``way`` and ``seed``; ``seeds``: default of the option;
    ``file``: the page's name below the folder of ``--write``.
    """
    names = list(ways)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--write", type=Path, help=f"folder of {file}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_in(options.jsonl, kind)
    done = {(known["way"], known["seed"]) for known in map(msgspec.structs.asdict, rows)}
    for seed in range(1, options.seeds + 1):
        for way in options.ways:
            if (way, seed) not in done:
                rows.append(run(way, seed))
                add_row(options.jsonl, rows[-1])
    show(page(rows), options.write and options.write / file)

"""Agents some of whose updates cannot be used, each round in another way; for ``benchmarks.crash.broken_devices``.

    python -m benchmarks.crash.broken_agents OPTIONS.json BROKEN …

The agents of a list of ``device_agent.runtime.connect.Options`` in one process, with trainers that echo; the devices
named BROKEN spoil what they send in the rounds that ``way_of`` says.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.agents import options_in, run_agents
from benchmarks.network.echo_agents import InlineEcho
from device_agent.core.state import Train
from device_agent.runtime.trainer_process import Ended, OnProgress, TrainerSettings
from edgefl.console import guarded
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore

Tensors = dict[str, np.ndarray[Any, Any]]
Samples = dict[str, int]
Update = tuple[Manifest, Samples]
#: (manifest, samples, store) of a good update -> those of one that cannot be used.
Way = Callable[[Manifest, Samples, ObjectStore], Update]


def _tensors(change: Callable[[Tensors], Tensors]) -> Way:
    """One part, the last by name, with other tensors."""

    def way(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
        part = max(manifest)
        tensors = decode_part(store.read(manifest[part].id))
        return {**manifest, part: store.put(encode_part(change(tensors)))}, samples

    return way


def _one(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Way:
    """The first tensor of the part, changed."""
    return _tensors(lambda tensors: {**tensors, min(tensors): change(tensors[min(tensors)])})


def _turned(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In as many bytes, so that its size does not give it away."""
    return tensor.reshape(tensor.shape[::-1] if tensor.ndim > 1 else (1, -1))


def _holding(value: float) -> Way:
    def change(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        tensor.reshape(-1)[0] = value
        return tensor

    return _one(change)


def _renamed(tensors: Tensors) -> Tensors:
    name = min(tensors)
    return {(name[:-1] + "_" if key == name else key): value for key, value in tensors.items()}


def _missing_part(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
    part = max(manifest)
    return {name: ref for name, ref in manifest.items() if name != part}, samples


def _strange_part(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
    return {**manifest, "../../etc/passwd": manifest[max(manifest)]}, samples


def _counting(value: int) -> Way:
    return lambda manifest, samples, store: (manifest, {**samples, max(manifest): value})


def _oversized(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
    part = max(manifest)
    return {**manifest, part: store.put(store.read(manifest[part].id) + bytes(2**20))}, samples


def _no_part(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
    part = max(manifest)
    return {**manifest, part: store.put(bytes(manifest[part].size))}, samples


def _damaged(manifest: Manifest, samples: Samples, store: ObjectStore) -> Update:
    """Other bytes than those the object is named by: as by a failing flash memory."""
    part = max(manifest)
    path = store.path(manifest[part].id)
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    return manifest, samples


#: Way of being broken -> (how, reason it is refused with).
WAYS: dict[str, tuple[Way, str]] = {
    "NaN": (_holding(float("nan")), "not_finite"),
    "infinity": (_holding(float("-inf")), "not_finite"),
    "a tensor of another shape": (_one(_turned), "shape"),
    "a tensor cut short": (_one(lambda tensor: tensor.reshape(-1)[:-1]), "size"),
    "a tensor of another name": (_tensors(_renamed), "names"),
    "integers for floats": (_one(lambda tensor: tensor.view(np.int32)), "dtype"),
    "no safetensors": (_no_part, "malformed"),
    "bytes that are not its hash's": (_damaged, "hash"),
    "a part is missing": (_missing_part, "parts"),
    "a part nobody asked for": (_strange_part, "parts"),
    "10^15 samples": (_counting(10**15), "samples"),
    "−1 samples": (_counting(-1), "samples"),
    "1 MiB too large": (_oversized, "size"),
}
#: Rounds before the first way, in which all is well.
WARM = 4


def way_of(number: int) -> str:
    """How devices are broken in this round: "" in every other one, and NaN in each once every way had its turn."""
    turn = number - WARM - 1
    if turn < 0 or (turn % 2 and turn < 2 * len(WAYS)):
        return ""
    return list(WAYS)[turn // 2] if turn < 2 * len(WAYS) else next(iter(WAYS))


class BreakingEcho(InlineEcho):
    """An echo that spoils its answers."""

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """As the echo does, then broken."""
        ended = await super().train(work, on_progress)
        if name := way_of(work.offer.attempt.round):
            store = self._store or ObjectStore(Path(self._settings.store))
            manifest, samples = WAYS[name][0](ended.result.manifest, ended.result.samples, store)
            return ended._replace(result=msgspec.structs.replace(ended.result, manifest=manifest, samples=samples))
        return ended


def _trainer(broken: frozenset[str], settings: TrainerSettings, memory_total_bytes: int) -> InlineEcho:
    return (BreakingEcho if settings.device in broken else InlineEcho)(settings, memory_total_bytes)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=Path)
    parser.add_argument("broken", nargs="*")
    chosen = parser.parse_args()
    with guarded():
        asyncio.run(run_agents(options_in(chosen.options), partial(_trainer, frozenset(chosen.broken))))


if __name__ == "__main__":
    main()

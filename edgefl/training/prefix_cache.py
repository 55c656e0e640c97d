"""A cache on disk of what the frozen prefix makes of every sample: what is trained reads it in place of raw samples.

Exact when stored as f32; as f16 every value is rounded to 11 bits. Computed part by part, so that no more than one
frozen part is in memory, and from where the stage before left off. The files have no name: they go with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from edgefl.data.arrays import FileRows, RowFile
from edgefl.data.dataset import Dataset, Encoded
from edgefl.errors import PrecisionError, StoreError
from edgefl.models.check import state_shape
from edgefl.models.encoder import Input, TokenState
from edgefl.models.parts import load_part
from edgefl.models.spec import with_lora
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job
from edgefl.plan.training_samples import Prefix, prefixes, together_in
from edgefl.training.batches import input_of
from edgefl.training.flop_cache import counted
from edgefl.training.weights_on_disk import on_disk

Tensors = Mapping[str, np.ndarray]
_DTYPES = {"f16": np.float16, "f32": np.float32}


@dataclass
class _Kept:
    dataset: Dataset
    modality: str
    stored: str  # f16 or f32
    names: tuple[object, ...]  # what identifies each part of the prefix
    encoded: Encoded

    def goes_on_to(
        self, names: tuple[object, ...], stored: str, tokens: int, shapes: Sequence[tuple[int, int]]
    ) -> bool:
        """Whether this is what ``names`` ask for, or the first part of the way there.

        Of a whole encoder only the pooled ``tokens`` are stored: nothing can go on from these.
        """
        if self.stored != stored or self.names != names[: len(self.names)]:
            return False
        wanted = tokens if len(self.names) == len(names) else shapes[len(self.names) - 1][0]
        return self.encoded.tokens.shape[1] == wanted


@dataclass
class PrefixCache:
    """Computed prefix outputs, in files of ``folder``, by data set and modality. Keep it between rounds.

    ``limit_bytes``: of all files together; None: no limit. ``check`` is called now and then, and may raise.
    ``identify``: what identifies the tensors of a part as received, such as their hash.
    """

    folder: Path
    limit_bytes: int | None = None
    check: Callable[[], None] = lambda: None
    identify: Callable[[str], object] = str
    _kept: list[_Kept] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if nothing is kept for the next round."""
        return not self._kept

    def encoded(self, job: Job, dataset: Dataset, parts: Mapping[str, Tensors], device: str) -> Dataset:
        """``dataset`` with the prefixes' outcome in place of its values, computed where it is not there yet.

        Raises PrecisionError for values that f16 cannot hold, StoreError when the disk is full.
        """
        wanted = prefixes(job)
        self._kept = [one for one in self._kept if one.dataset is not dataset or one.modality in wanted]
        here = {m: prefix for m, prefix in wanted.items() if dataset.has(m).any()}
        found = {m: self._of(job, dataset, m, prefix, parts, device) for m, prefix in here.items()}
        return replace(dataset, encoded={**dataset.encoded, **found})

    def keep_only(self, datasets: list[Dataset]) -> None:
        """Forget what belongs to other data sets."""
        self._kept = [one for one in self._kept if any(one.dataset is d for d in datasets)]

    def _of(
        self, job: Job, dataset: Dataset, m: str, prefix: Prefix, parts: Mapping[str, Tensors], device: str
    ) -> Encoded:
        # The same tensors compute something else in another encoder, such as one with more heads.
        names = tuple(
            (job.model.encoders[m], job.model.lora, *map(self.identify, with_lora(job.model, part)))
            for part in prefix.steps
        )
        kept = next((k for k in self._kept if k.dataset is dataset and k.modality == m), None)
        if kept is not None:
            self._kept.remove(kept)
        shapes = [state_shape(job.model, m, depth) for depth in range(len(names))]
        encoded, done = None, 0
        if kept is not None and kept.goes_on_to(names, job.hyper.cache, prefix.tokens, shapes):
            encoded, done = kept.encoded, len(kept.names)
        del kept
        for depth in range(done, len(names)):
            together = with_lora(job.model, prefix.steps[depth])
            settle = on_disk(job, self.folder) if device == "cpu" else None
            model = build(job.model, together, device=device, settle=settle)
            for part in together:
                load_part(model, part, parts[part])
            shown = dataset if encoded is None else replace(dataset, encoded={m: encoded})
            tokens, width = shapes[depth]
            wanted = (prefix.tokens if depth + 1 == len(names) else tokens), width
            encoded = self._through(model.eval(), job, shown, m, depth, wanted, torch.device(device))
            del model  # before the next part's comes
        if encoded is None:
            raise AssertionError(f"a prefix of {m} without parts")
        self._kept.append(_Kept(dataset, m, job.hyper.cache, names, encoded))
        return encoded

    def _through(
        self,
        model: StagedModel,
        job: Job,
        shown: Dataset,
        m: str,
        depth: int,
        wanted: tuple[int, int],
        device: torch.device,
    ) -> Encoded:
        """Every sample that has ``m`` through the one part of ``model``, with its low-rank terms if it has some.

        ``depth``: stages it is through afterwards; ``wanted``: (tokens, width) of a sample that are stored.
        """
        tokens, width = wanted
        part = model.parts_present[0]
        rows, dtype = np.flatnonzero(shown.has(m)), _DTYPES[job.hyper.cache]
        shape = (len(rows), tokens, width)
        self._admit(int(np.prod(shape)) * np.dtype(dtype).itemsize, shown.encoded.get(m))
        file = RowFile(self.folder, shape, dtype)
        masks: list[np.ndarray] = []
        kind = b"prefix" + msgspec.msgpack.encode((part, job.model))
        together = together_in(job)
        for start in range(0, len(rows), together):
            self.check()
            some = rows[start : start + together]
            inputs = input_of(shown, m, some, device)
            state = counted(kind, ((m, len(some)),), partial(through_part, model, m, depth, inputs), linear="rows")
            del inputs
            file.write(np.arange(start, start + len(some)), _stored(state, tokens, file.dtype, part))
            if state.mask is not None:
                masks.append(state.mask[:, :tokens].cpu().numpy())
        places = np.zeros(len(shown), np.int64)
        places[rows] = np.arange(len(rows))
        mask = np.concatenate(masks)[places] if masks else None
        return Encoded(FileRows(file, places), mask, depth)

    def used_bytes(self) -> int:
        """Bytes of all files that are kept."""
        return sum(one.encoded.tokens.file_bytes for one in self._kept if isinstance(one.encoded.tokens, FileRows))

    def _admit(self, size: int, source: Encoded | None) -> None:
        used = self.used_bytes()
        if source is not None and isinstance(source.tokens, FileRows):
            used += source.tokens.file_bytes
        if self.limit_bytes is not None and used + size > self.limit_bytes:
            raise StoreError(
                f"rows of frozen parts: {used + size} bytes needed, {self.limit_bytes} allowed beside the objects",
                remedy="Raise the device's disk budget, or set training.cache: none.",
            )


@torch.no_grad()
def through_part(model: StagedModel, m: str, depth: int, shown: Input) -> TokenState:
    """Samples through one part of m's encoder; ``depth``: stages they are through afterwards, 0: only embedded."""
    state = model.embed(m, shown)
    return model.stage(m, depth, state) if depth else state


def _stored(state: TokenState, tokens: int, dtype: np.dtype[np.generic], part: str) -> np.ndarray:
    values = state.tokens[:, :tokens].cpu().numpy()
    if dtype == np.float16 and not float(np.abs(values).max(initial=0.0)) <= float(np.finfo(np.float16).max):
        raise PrecisionError(
            f"after '{part}' values reach {float(np.abs(values).max()):.3g}, more than f16 holds",
            remedy="Set training.cache: f32, or none.",
        )
    return np.asarray(values.astype(dtype))

"""The frozen prefix of each encoder: what its samples go through before anything that is trained, the same every round.

Its outcome can be computed once and stored. Not of multiway encoders, where it depends on what else a row has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from edgefl.encoder_kinds import encoder_kind
from edgefl.models.sizes import token_count
from edgefl.models.spec import EncoderSpec, ModelSpec, fuses_tokens, shares_attention
from edgefl.plan.job import Cache, Job

#: Bytes of one stored value.
VALUE_BYTES = {"f16": 2, "f32": 4}
#: Most samples that go through a frozen part at a time.
TOGETHER = 32


class Prefix(NamedTuple):
    """The parts of one encoder that stand before anything trained, in order: ``<m>/embed``, then ``depth`` stages.

    ``tokens``: how many of a sample's tokens are stored; fewer than there are where only the pooled ones are read.
    """

    parts: tuple[str, ...]
    depth: int
    tokens: int


def prefixes(job: Job) -> dict[str, Prefix]:
    """Modality -> its prefix, of the modalities this stage has; none without ``hyper.cache``."""
    if not job.hyper.cache:
        return {}
    present, trained = set(job.stage.present), set(job.stage.trained)
    found = {}
    for m, encoder in job.model.encoders.items():
        parts = [f"{m}/embed", *(f"{m}/stage{k}" for k in range(1, job.stage.depth + 1))]
        frozen = []
        for part in parts:
            if part not in present or part in trained:
                break
            frozen.append(part)
        if frozen and not shares_attention(job.model):
            depth = len(frozen) - 1
            found[m] = Prefix(tuple(frozen), depth, _tokens(job.model, encoder, last=depth == job.stage.depth))
    return found


def can_cache(job: Job) -> bool:
    """Whether the job has a frozen prefix."""
    return bool(prefixes(with_cache(job, "f16")))


def with_cache(job: Job, cache: Cache) -> Job:
    """The job with its prefixes stored as ``cache`` says: "f16", "f32", or "" for not."""
    return msgspec.structs.replace(job, hyper=msgspec.structs.replace(job.hyper, cache=cache))


def built_parts(job: Job) -> tuple[str, ...]:
    """The parts that training holds in memory: those present without the stored prefixes."""
    gone = {part for prefix in prefixes(job).values() for part in prefix.parts}
    return tuple(part for part in job.stage.present if part not in gone)


def together_in(job: Job) -> int:
    """How many samples go through a frozen part at a time: no more than go through the trained ones."""
    return min(TOGETHER, job.hyper.micro_batch or job.hyper.batch_size)


def stored_bytes(job: Job, samples: Mapping[str, int]) -> int:
    """Most bytes on disk for the prefixes of ``samples`` (modality -> how many have it).

    While they grow by a stage every modality's rows of before may be there, with all their tokens, and of the one that
    grows two kinds at once.
    """
    if not job.hyper.cache:
        return 0
    sizes = []
    for m, prefix in prefixes(job).items():
        encoder = job.model.encoders[m]
        tokens = token_count(encoder) if prefix.depth else prefix.tokens
        sizes.append(samples.get(m, 0) * tokens * encoder.width * VALUE_BYTES[job.hyper.cache])
    return sum(sizes) + max(sizes, default=0)


def _tokens(model: ModelSpec, encoder: EncoderSpec, *, last: bool) -> int:
    if not last or encoder.pool == "mean" or fuses_tokens(model):
        return token_count(encoder)
    return encoder_kind(encoder.kind).pooled

"""Low-rank terms cut into slices of their rank: names, first weights, and the whole term as what they come to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from test_models_leading import SPECS, samples

from edgefl.models.check import spec_problems
from edgefl.models.low_rank import merged
from edgefl.models.parts import loaded, part_tensors
from edgefl.models.spec import (
    HeadSpec,
    LoraSpec,
    ModelSpec,
    adaptable_parts,
    adapted_part,
    is_encoder,
    is_lora,
    modality_of,
    part_names,
    rank_start,
)
from edgefl.models.staged import StagedModel, build
from edgefl.plan.stages import encoder_stage

torch.set_num_threads(1)
Parts = dict[str, dict[str, np.ndarray]]


def adapted(kind: str = "sensor", ranks: tuple[int, ...] = (2, 3), **more: object) -> ModelSpec:
    """A model with terms of rank 6 in everything that can have some, cut after ``ranks``."""
    names = more.pop("names", "m")
    spec = ModelSpec(dict.fromkeys(names, SPECS[kind]), 2, HeadSpec(width=8, out=4), **more)
    lora = LoraSpec(6, 9.0, tuple(adaptable_parts(spec)), fallback_ranks=ranks or msgspec.UNSET)
    return msgspec.structs.replace(spec, lora=lora)


def learned(spec: ModelSpec) -> tuple[Parts, Parts]:
    """The parts of a model with whole terms, B as if trained, and the same cut as ``spec`` says."""
    uncut = msgspec.structs.replace(spec, lora=msgspec.structs.replace(spec.lora, fallback_ranks=msgspec.UNSET))
    model, rng = build(uncut, seed=3), np.random.default_rng(4)
    whole = {part: part_tensors(model, part) for part in part_names(uncut)}
    for part in filter(is_lora, whole):
        for name in [name for name in whole[part] if name.endswith(".B")]:
            whole[part][name] = rng.normal(0, 0.1, whole[part][name].shape).astype(np.float32)
    ends = (*spec.lora.fallback_ranks, spec.lora.rank)
    cut = {part: tensors for part, tensors in whole.items() if not is_lora(part)}
    for part in filter(is_lora, whole):
        for start, end in zip((0, *ends), ends, strict=False):
            name = f"lora/{start}/{adapted_part(part)}" if start else part
            cut[name] = {n: v[start:end] if n.endswith(".A") else v[:, start:end] for n, v in whole[part].items()}
    return whole, cut


def model_of(spec: ModelSpec, parts: Parts) -> StagedModel:
    return loaded(spec, list(parts), parts).eval()


def test_names_say_what_is_adapted_and_where_a_slice_begins() -> None:
    spec = adapted(names=("a", "lora4"))
    slices = [part for part in part_names(spec) if is_lora(part)]
    assert slices[:6] == [
        *("lora/a/stage1", "lora/2/a/stage1", "lora/3/a/stage1"),
        *("lora/a/stage2", "lora/2/a/stage2", "lora/3/a/stage2"),
    ]
    assert "lora/3/head/lora4" in slices
    assert len(slices) == 18
    assert [rank_start(part) for part in slices] == [0, 2, 3] * 6
    for part in slices:
        whole = adapted_part(part)
        assert (modality_of(part), is_encoder(part), encoder_stage(part)) == (
            *(modality_of(whole), is_encoder(whole), encoder_stage(whole)),
        )
    assert (rank_start("2/stage1"), adapted_part("2/stage1")) == (0, "2/stage1")  # of a declared model


def test_first_weights_of_the_slices_are_those_of_the_whole_term() -> None:
    spec = adapted()
    uncut = adapted(ranks=())
    alone, whole = build(spec, ["lora/3/m/stage2"], seed=5), part_tensors(build(uncut, seed=5), "lora/m/stage2")
    (last,) = (part_tensors(alone, "lora/3/m/stage2"),)
    assert last.keys() == whole.keys()
    for name, value in last.items():
        assert np.array_equal(value, whole[name][3:] if name.endswith(".A") else whole[name][:, 3:])
    assert last["blocks.0.out.A"].shape == (3, 16)
    assert np.abs(last["blocks.0.out.A"]).max() > 0


@pytest.mark.parametrize("kind", ["sensor", "distilbert"])
def test_the_slices_come_to_the_whole_term_to_the_last_bit(kind: str) -> None:
    spec, x = adapted(kind), samples(SPECS[kind])
    whole, cut = learned(spec)
    uncut = adapted(kind, ranks=())
    first, second = (model_of(s, parts).encode("m", x) for s, parts in ((uncut, whole), (spec, cut)))
    assert torch.equal(first, second)
    merged_whole, merged_cut = merged(whole, uncut.lora), merged(cut, spec.lora)
    assert merged_whole.keys() == merged_cut.keys() == {part for part in whole if not is_lora(part)}
    for part, tensors in merged_whole.items():
        assert all(np.array_equal(tensors[name], merged_cut[part][name]) for name in tensors), part
    plain = msgspec.structs.replace(spec, lora=msgspec.UNSET)
    torch.testing.assert_close(model_of(plain, dict(merged_cut)).encode("m", x), first, rtol=1e-5, atol=2e-6)


def test_a_device_of_a_smaller_rank_runs_what_it_has() -> None:
    """Of rank 3: with the scale of the whole rank, the terms of A's first three rows and B's first three columns."""
    spec, x = adapted(), samples(SPECS["sensor"])
    whole, cut = learned(spec)
    held = {part: tensors for part, tensors in cut.items() if rank_start(part) < 3}
    zeroed = {
        part: {n: v * (np.arange(6) < 3) if n.endswith(".B") else v for n, v in tensors.items()}
        if is_lora(part)
        else tensors
        for part, tensors in whole.items()
    }
    small, expected = model_of(spec, held), model_of(adapted(ranks=()), zeroed)
    torch.testing.assert_close(small.encode("m", x), expected.encode("m", x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(small.encode("m", x), model_of(spec, cut).encode("m", x), atol=1e-3)


@pytest.mark.parametrize("ranks", [(3, 2), (2, 2), (0, 2), (2, 6), (8,)])
def test_ranks_that_do_not_ascend_below_the_whole_one_are_faults(ranks: tuple[int, ...]) -> None:
    found = f"lora.fallback_ranks: are {list(ranks)}; they ascend from 1, below the rank 6"
    assert [str(problem) for problem in spec_problems(adapted(ranks=ranks))] == [found]

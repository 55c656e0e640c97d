"""A device's class means: over which samples, of which tables, and of the same representations as one sample alone."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from training_fixture import dataset, job, model_spec, stages_of

from edgefl.methods.pmcmfl.class_mean import local, local_rows, rows
from edgefl.models.spec import JointSpec, fused_width
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Candidate, Job
from edgefl.prototypes.table import FUSED
from edgefl.training.forward import Auxiliary

#: Sample 0 lacks b, 5 has no label, and no sample is of class 2.
DATA = dataset(7, {"b": [0]}, labels=[0, 0, 1, 1, 1, -1, 0])
MODELS = {
    "concat": model_spec(),
    "joint": msgspec.structs.replace(model_spec(), fusion="joint", joint=JointSpec(8, 2, 1, shared=True)),
}


def means(made: Job, model: StagedModel, data=DATA, source: str = "all"):
    return local(made, model, Auxiliary(), data, np.random.default_rng(0), **{"from": source})


@torch.no_grad()
def alone(model: StagedModel, sample: int, depth: int) -> dict[str, np.ndarray]:
    """The representations of one sample, without the others of its batch."""
    inputs = {m: torch.from_numpy(DATA.modalities[m][[sample]]) for m in "ab" if DATA.has(m)[sample]}
    tokens = {m: model.encode_tokens(m, x, depth) for m, x in inputs.items()}
    found = {m: model.project(m, model.pool_tokens(m, state)) for m, state in tokens.items()}
    if len(found) == 2:
        found[FUSED] = model.fuse(found, None, tokens if model.spec.fusion == "joint" else None)
    return {name: value[0].numpy() for name, value in found.items()}


@pytest.mark.parametrize("fusion", MODELS)
@pytest.mark.parametrize(("source", "of_a"), [("all", [0, 1, 6]), ("pairs", [1, 6])])
def test_class_means_are_of_the_labelled_samples_that_the_option_names(fusion: str, source: str, of_a: list[int]):
    made = job(MODELS[fusion], stages_of(MODELS[fusion])[1], batch_size=3)  # two stages of three
    model = build(made.model, made.stage.present)
    tables = means(made, model, source=source)
    assert not model.training
    members = {"a": {0: of_a, 1: [2, 3, 4]}, "b": {0: [1, 6], 1: [2, 3, 4]}, FUSED: {0: [1, 6], 1: [2, 3, 4]}}
    assert tables.keys() == members.keys()
    for name, classes in members.items():
        assert tables[name].counts.tolist() == [len(classes[0]), 3, 0]
        for c, samples in classes.items():
            expected = np.mean([alone(model, sample, 2)[name] for sample in samples], axis=0)
            np.testing.assert_allclose(tables[name].means[c], expected, atol=1e-5)
        assert (tables[name].means[2] == 0).all()
        assert {tables[name].means.dtype, tables[name].counts.dtype} == {np.dtype(np.float32)}


def test_the_size_of_a_batch_does_not_change_a_mean():
    made = job(batch_size=6)
    model = build(made.model, made.stage.present)
    whole = means(made, model)
    for hyper in (
        msgspec.structs.replace(made.hyper, micro_batch=2),
        msgspec.structs.replace(made.hyper, batch_size=2),
    ):
        split = means(msgspec.structs.replace(made, hyper=hyper), model)
        for name, table in whole.items():
            np.testing.assert_allclose(split[name].means, table.means, atol=1e-5)


def test_without_a_modality_there_is_no_table_of_it_nor_of_what_is_fused():
    made = job()
    model = build(made.model, made.stage.present)
    one = dataset(6, {"b": list(range(6))})
    assert means(made, model, one).keys() == {"a"}
    unlabelled = type(one)(one.modalities, one.present, None, (), one.ids)
    assert [table.counts.sum() for table in means(made, model, unlabelled).values()] == [0]


def test_the_rows_that_are_priced_are_those_that_are_sent():
    made = job()
    size, fused = (3, made.model.head.out), (3, fused_width(made.model))
    assert rows(made.model) == {"a": size, "b": size, FUSED: fused}

    def priced(own: str, source: str, *counts: int):
        return local_rows(made, Candidate("d", class_counts=counts), list(own), **{"from": source})

    for source in ("all", "pairs"):
        assert priced("ab", source, 1, 0, 0) == rows(made.model)
        assert priced("ab", source) == rows(made.model), "nothing is known of its labels"
        assert priced("ab", source, 0, 0, 0) == {}
    assert priced("b", "all", 1, 1, 1) == {"b": size}
    assert priced("b", "pairs", 1, 1, 1) == {}

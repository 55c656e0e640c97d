"""Random mixes of slots train like the published systems do; illegal ones are refused when they are loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from memory_fleet import check_trained, plan_of, run_fleet, share, state_of

from edgefl.config.slots import conflicts, parse_slot
from edgefl.errors import ConfigError
from edgefl.protocol.tensors import decode_part
from edgefl.registry import methods
from edgefl.roles import ROLES

#: What fits a fleet of three and two rounds.
FITTING = {
    "cluster": {"lsh": {"clusters": 2}},
    "select": {"banzhaf": {"warmup_rounds": 1, "share": 0.7}},
    "prototypes": {"adaptive": {"local_clusters": 4, "clusters": 4, "neighbours": 2}},
    "missing": {"prototype": {"by": "match", "drop": 0.3}},
    "fusion": {"joint": {"width": 8, "heads": 2, "layers": 1}},
}


def mix(seed: int) -> dict:
    """A legal recipe: every role filled at random, drawn again until nothing contradicts."""
    draw = random.Random(seed)
    for _ in range(10_000):
        chosen = {}
        for role in ROLES:
            choices = methods(role)
            if ROLES[role].plural:
                terms = [
                    *draw.sample(sorted(choices), draw.randint(1, 4)),
                    draw.choice(("cross_entropy", "clip", "margin")),
                ]
                chosen[role] = parse_slot(role, {term: {} for term in terms})
            else:
                name = draw.choice(sorted(choices))
                chosen[role] = parse_slot(role, {name: FITTING.get(role, {}).get(name, {})})
        generated = "nearest" if "completion" in chosen["missing"] else ""
        if generated:
            chosen["missing"] = parse_slot("missing", {"completion": {"generator": generated}})
        if not conflicts(chosen):
            return chosen
    raise AssertionError("no legal mix was drawn")


MIXES = [mix(seed) for seed in range(20)]


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i < 1 else pytest.mark.slow) for i in range(len(MIXES))])
def test_a_mix_trains(ram_path: Path, seed: int):
    overrides = [f"slots.{role}={json.dumps(choice)}" for role, choice in MIXES[seed].items()]
    plan = plan_of(ram_path, "end_to_end", "ab", 3, overrides)
    own = {
        "whole": share(24, {"a": 1.0, "b": 1.0}, seed=1),
        "patchy": share(24, {"a": 1.0, "b": 0.6}, seed=2),
        "only-b": share(24, {"b": 1.0}, seed=3),
    }
    report = run_fleet(ram_path, plan, own)
    assert report.status == "done"
    assert len([row for row in report.rounds if row.status == "done"]) == 2
    told = {row.metric for row in report.evaluations} | {name for row in report.assignments for name in row.metrics}
    assert told > {"loss"}
    sent = next(iter(MIXES[seed]["weight"])) not in {"own", "relationship"}
    assert sent <= bool(report.evaluations)  # of what stays on the devices there is no global model to judge
    assert all(np.isfinite(row.value) for row in report.evaluations)
    store, state = state_of(ram_path)
    for name, ref in state.items():
        if name != "server/memory":
            for tensor in decode_part(store.read(ref.id)).values():
                assert np.isfinite(tensor).all(), name
    check_trained(ram_path, plan)


def test_the_mixes_use_every_choice_of_every_role():
    for role in ROLES:
        choices = methods(role)
        unused = set(choices) - {name for one in MIXES for name in one[role]}
        assert len(unused) <= len(choices) // 2, (role, unused)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "gmc"}, "no term gives the model a task; add one of cross_entropy, clip, margin"),
        ({"missing": "prototype"}, "prototype needs class prototypes"),
        ({"objective": ["cross_entropy", "modality_contrast"]}, "modality_contrast needs class prototypes"),
        ({"objective": ["cross_entropy", "prototype_contrast"]}, "prototype_contrast needs class prototypes"),
        ({"objective": ["cross_entropy", "prototype_transfer"]}, "prototype_transfer needs adaptive prototypes"),
        ({"objective": ["margin", "cluster_contrast"]}, "cluster_contrast needs adaptive prototypes"),
        ({"objective": ["cross_entropy", "cluster_contrast"]}, "devices without labels, whose task is of pairs"),
        ({"objective": ["cross_entropy", "model_transfer"]}, "model_transfer needs a mapping of the device's own"),
        ({"objective": ["cross_entropy", "regulariser"]}, "regulariser needs the private copy"),
        ({"objective": ["clip", "ram"]}, "ram needs the joint representation"),
        ({"objective": ["clip", "gmc"]}, "gmc needs the joint representation"),
        ({"objective": "clip", "prototypes": "class_mean"}, "class_mean needs labels"),
        ({"missing": "reconstruction"}, "reconstruction needs the term of the same name"),
        ({"missing": {"completion": {"generator": "transformers"}}}, "completion by transformers needs a checkpoint"),
        ({"weight": "own", "cluster": "lsh"}, "weight: own exchanges nothing; set cluster: none"),
        ({"weight": "own", "optimise": "fedadam"}, "weight: own exchanges nothing; set optimise: plain"),
        ({"weight": "own", "schedule": "layerwise"}, "with weight: own nothing trains the global model"),
        ({"weight": "own", "schedule": "freeze"}, "with weight: own nothing trains the global model"),
        ({"weight": "own", "schedule": "mixed"}, "with weight: own nothing trains the global model"),
        ({"weight": "own", "schedule": "sampled"}, "with weight: own nothing trains the global model"),
        ({"repair": "poverty", "schedule": "sampled"}, "goes by how a layer changed in the round before"),
        ({"weight": "relationship", "cluster": {"lsh": {"models": "own"}}}, "gives each device a model already"),
        ({"weight": "relationship", "repair": "poverty"}, "poverty mends one model for all"),
        ({"repair": "poverty", "missing": "ignore"}, "poverty needs samples that lack a modality"),
        ({"weight": "cka", "schedule": "mixed"}, "cka compares models at the whole depth"),
        ({"optimise": {"fedadagrad_mpo": {"temperature": 2}}}, "exceeds 1; raise temperature"),
    ],
)
def test_a_mix_that_can_not_be_is_refused_with_the_reason(ram_path: Path, changes: dict, said: str):
    overrides = [f"slots.{role}={json.dumps(choice)}" for role, choice in changes.items()]
    with pytest.raises(ConfigError, match=said):
        plan_of(ram_path, "end_to_end", "ab", 1, overrides)

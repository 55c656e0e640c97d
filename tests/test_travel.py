"""What a round moves is predicted: every recipe's bytes down and up beside what the coordinator counted."""

from __future__ import annotations

import numpy as np
from training_fixture import model_spec

from edgefl.data.signature import bases, signature_layout, sketch
from edgefl.models.build import build
from edgefl.models.state import part_layout, part_tensors
from edgefl.plan.travel import object_bytes
from edgefl.protocol.parts import encode_part


def test_the_size_of_an_object_follows_from_its_layout():
    model = build(model_spec(stages=2), seed=1)
    for part in model.parts_present:
        assert object_bytes(part_layout(model, part)) == len(encode_part(part_tensors(model, part))), part
    features = np.random.default_rng(1).normal(size=(20, 256)).astype(np.float32)
    labels = np.arange(20) % 3
    labels[labels == 2] = 0
    assert object_bytes(signature_layout("sketch", ())) == len(encode_part(sketch(features)))
    assert object_bytes(signature_layout("bases", (13, 7, 0))) == len(encode_part(bases(features, labels, 3)))

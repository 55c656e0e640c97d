"""Trial export of encoders from users' own modules, before training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.encoder_kinds import kind_of
from edgefl.errors import EdgeFLError, ExportError, ModelError
from edgefl.export.bundle_format import TOLERANCE
from edgefl.export.opset import LEAST
from edgefl.export.session import open_session, run
from edgefl.export.tracing import EXAMPLE_ROWS, exported
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.models.staged import StagedModel, build


class _Alone(nn.Module):
    def __init__(self, model: StagedModel) -> None:
        super().__init__()
        self.model = model
        (self.modality,) = model.spec.encoders

    def forward(self, inputs: tuple[Tensor]) -> Tensor:
        return self.model.encode(self.modality, inputs[0])


def rehearse(encoders: Mapping[str, EncoderSpec]) -> None:
    """Raise ModelError for a module that mixes samples of a batch, ExportError for one without ONNX form."""
    for modality, encoder in encoders.items():
        if kind_of(encoder).states:
            try:
                _rehearsed(modality, encoder)
            except EdgeFLError as error:
                raise type(error)(
                    f"modality '{modality}', encoder {encoder.kind}: {error.message}", remedy=error.remedy
                ) from error


@cache
def _rehearsed(modality: str, encoder: EncoderSpec) -> None:
    parts = [f"{modality}/{part}" for part in ("embed", "stage1", "norm")]
    alone = _Alone(build(ModelSpec({modality: encoder}, stages=1), parts)).eval()
    x = torch.randn((EXAMPLE_ROWS, *encoder.input_shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, again, first = alone((x,)), alone((x,)), alone((x[:1],))
    if not torch.equal(whole, again):
        raise ModelError(
            "the same samples give another answer the second time, in evaluation mode",
            remedy="Let it draw at random while self.training is set alone, as nn.Dropout does.",
        )
    if not torch.allclose(whole[:1], first, atol=TOLERANCE):
        raise ModelError(
            "a sample's answer depends on the others of its batch",
            remedy="Take no mean over the batch axis, which is the first.",
        )
    try:
        proto = exported(alone, [x], [{0: torch.export.Dim("rows")}], (["x"], ["h"]), LEAST)
    except Exception as error:  # torch, onnxscript and protobuf each raise kinds of their own
        raise ExportError(
            f"it cannot be exported to ONNX: {str(error).strip().splitlines()[0][:300]}",
            remedy="Write it with operators that ONNX has, or run it without an export (--no-export, export=False).",
        ) from error
    answer = run(open_session(proto.SerializeToString()), {"x": x.numpy()})["h"]
    if (far := float(np.abs(answer - whole.numpy()).max())) > TOLERANCE:
        raise ExportError(
            f"its ONNX form answers otherwise than torch, by {far:.2g}",
            remedy="Take out layers until it does not; or run it without an export (--no-export, export=False).",
        )

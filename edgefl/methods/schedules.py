"""Schedules: which parts exist and are trained in each stage (LW-FedMML, Prog-FedMML; arXiv 2407.15426)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.registry import Options, Schedule, register


class Layerwise(Options, frozen=True):
    """Options of layer-wise training."""

    embed: Annotated[
        Literal["auto", "first_stage", "frozen"],
        Meta(description="whether the embeddings are trained in the first stage; auto: yes unless they are pretrained"),
    ] = "auto"


register(
    Schedule("end_to_end", "every stage exists and is trained from the first round", default=True),
    Schedule("progressive", "stage s adds encoder stage s; everything present is trained"),
    Schedule(
        "layerwise", "stage s adds encoder stage s; only it, the heads and the final norms are trained", Layerwise
    ),
    Schedule("heads", "whole, frozen encoders; only heads, fusion and task are trained"),
    Schedule(
        "mixed",
        "each device the most its budget allows: end to end, or in stage s as in progressive, down to layerwise",
    ),
)

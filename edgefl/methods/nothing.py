"""Slots left empty: no clusters, no prototypes, no repair."""

from __future__ import annotations

from edgefl.registry import Cluster, Prototypes, Repair, register

register(
    Cluster("none", "all devices form one group", default=True),
    Prototypes("none", "none", default=True),
    Repair("none", "nothing", default=True),
)

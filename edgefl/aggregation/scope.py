"""For whom a part of the server's state is: everyone, one cluster, one device, or the server alone.

A state is one flat manifest: "head/image" is everyone's, "@left/head/image" that of device left, "#2/head/image" that
of cluster 2, "server/…" is never sent. A device sees everyone's parts, then its cluster's over them, then its own.
"""

from __future__ import annotations

from edgefl.records import Manifest

#: The prefix of what is for everyone.
EVERYONE = ""
#: The prefix of what only the server reads: optimiser states, what is remembered of the devices.
SERVER = "server/"


def of_device(device: str) -> str:
    """The prefix of one device's own parts."""
    return f"@{device}/"


def of_cluster(cluster: int) -> str:
    """The prefix of one cluster's parts."""
    return f"#{cluster}/"


def is_shared(part: str) -> bool:
    """Whether a part is for everyone."""
    return not part.startswith(("@", "#", SERVER))


def shared(state: Manifest) -> Manifest:
    """Everyone's parts: the global model."""
    return {part: ref for part, ref in state.items() if is_shared(part)}


def view(state: Manifest, device: str, cluster: int = -1) -> Manifest:
    """The parts as ``device`` is to see them; ``cluster`` -1: it belongs to none."""
    seen = shared(state)
    for prefix in ([of_cluster(cluster)] if cluster >= 0 else []) + [of_device(device)]:
        seen |= {part.removeprefix(prefix): ref for part, ref in state.items() if part.startswith(prefix)}
    return seen

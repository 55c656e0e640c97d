"""Can an announced update be one? By its message alone, before a byte of it is fetched. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.core.state import Assignment, Claim, State
from edgefl.aggregation.server_state import is_shared
from edgefl.models.spec import PROTOTYPES, is_scheduled, modality_of
from edgefl.plan.stages import exchange_of, sent
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Refusal
from edgefl.registry import choose

#: Parts named in a refusal.
MOST_NAMED = 5
#: A device with more than this share of a part that three or more trained decides alone what it becomes.
MUCH, OF = 0.5, 3


def unfit(state: State, assignment: Assignment, update: Update) -> Refusal | None:
    """Why an update to this assignment is unusable: other parts than were asked for, or more samples than it has.

    A device that had no sample of a modality leaves out all that modality's parts.
    """
    wanted = sent(assignment.placement.stage, exchange_of(state.recipe.get("weight", {})))
    unasked = sorted(part for part in update.manifest if part not in wanted and is_scheduled(part))
    if PROTOTYPES in update.manifest and choose("prototypes", state.recipe).method.local is None:
        unasked.append(PROTOTYPES)  # they would be merged, and sent to everyone
    if unasked:
        return Refusal("parts", detail=f"the update holds parts it was not asked to train: {_names(unasked)}")
    brought = {modality_of(part) for part in update.manifest if part in wanted}
    missing = [part for part in wanted if part not in update.manifest and modality_of(part) in {None, *brought}]
    if missing:
        return Refusal("parts", detail=f"the update lacks parts it was asked to train: {_names(missing)}")
    device = state.devices[update.device]
    owned = max(device.hello.samples.get("", 0), device.claim.samples.get("", 0))
    for part, claimed in sorted(update.samples.items(), key=lambda item: (-abs(item[1]), item[0])):
        if not 0 <= claimed <= owned:  # it would outweigh the others in the mean
            text = f"part {part[:80]}: {claimed} samples claimed, the device introduced itself with {owned}"
            return Refusal("samples", float(claimed), float(owned), "samples", text)
    return None


def bounded(update: Update, claim: Claim) -> Update:
    """The update with no more samples than the device had when it first introduced itself."""
    most = max(0, claim.samples.get("", 0))
    return msgspec.structs.replace(update, samples={part: min(n, most) for part, n in update.samples.items()})


def exceeds(hello: Hello, claim: Claim) -> bool:
    """Whether a device now says it has more data than at first."""
    return any(n > claim.samples.get(name, 0) for name, n in hello.samples.items())


def overweights(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(device, text of the warning) for devices that had most of the weight of a part in this round's record."""
    found: dict[str, list[tuple[float, str]]] = {}
    for part, weights in record.get("parts", {}).items():
        shares = weights.get("devices", {})
        if is_shared(part) and len(shares) >= OF and max(shares.values()) > MUCH:
            device = max(shares, key=lambda name: shares[name])
            found.setdefault(device, []).append((shares[device], part))
    return [(device, _weight(*max(parts), len(parts))) for device, parts in sorted(found.items())]


def _weight(share: float, part: str, parts: int) -> str:
    more = f" and more than half of {parts - 1} more" if parts > 1 else ""
    return f"it has {100 * share:.4g} % of the weight of part {part}{more}; round.largest_share caps it"


def _names(parts: list[str]) -> str:
    more = f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else ""
    return ", ".join(part[:80] for part in parts[:MOST_NAMED]) + more

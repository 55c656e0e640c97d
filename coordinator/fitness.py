"""Can an announced update be one? By its message alone, before a byte of it is fetched. Pure."""

from __future__ import annotations

from coordinator.values import Assignment, State
from edgefl.models.spec import PROTOTYPES, is_scheduled, modality_of
from edgefl.plan.exchange import exchange_of, sent
from edgefl.protocol.messages import Update
from edgefl.records import Refusal

#: Parts named in a refusal.
MOST_NAMED = 5


def unfit(state: State, assignment: Assignment, update: Update) -> Refusal | None:
    """Why an update to this assignment can not be used: other parts than were asked for, or more samples than it has.

    A device that had no sample of a modality leaves out all that modality's parts.
    """
    wanted = sent(assignment.placement.stage, exchange_of(state.recipe.get("weight", {})))
    strange = sorted(part for part in update.manifest if part not in wanted and is_scheduled(part))
    if PROTOTYPES in update.manifest and "none" in state.recipe.get("prototypes", {}):
        strange.append(PROTOTYPES)  # they would be merged, and sent to everyone
    if strange:
        return Refusal("parts", detail=f"the update holds parts it was not asked to train: {_names(strange)}")
    brought = {modality_of(part) for part in update.manifest if part in wanted}
    missing = [part for part in wanted if part not in update.manifest and modality_of(part) in {None, *brought}]
    if missing:
        return Refusal("parts", detail=f"the update lacks parts it was asked to train: {_names(missing)}")
    owned = state.devices[update.device].hello.samples.get("", 0)
    for part, claimed in sorted(update.samples.items(), key=lambda item: (-abs(item[1]), item[0])):
        if not 0 <= claimed <= owned:  # it would outweigh the others in the mean
            text = f"part {part[:80]}: {claimed} samples claimed, the device introduced itself with {owned}"
            return Refusal("samples", float(claimed), float(owned), "samples", text)
    return None


def _names(parts: list[str]) -> str:
    more = f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else ""
    return ", ".join(part[:80] for part in parts[:MOST_NAMED]) + more

"""Checks of devices' claims: announced updates and reported figures. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from coordinator.core.state import Assignment, Claim, State
from edgefl.aggregation.mean import OF
from edgefl.aggregation.server_state import is_shared
from edgefl.label_spaces import samples_key
from edgefl.models.spec import LAYERS, PROTOTYPES, is_scheduled, modality_of, space_of_part
from edgefl.plan.choice_of_k import candidates, doubt, most_judged
from edgefl.plan.job import WHOLE_ROUND, Placement
from edgefl.plan.stages import may_omit, sent
from edgefl.protocol.messages import Update
from edgefl.records import FIGURES, Figure, Figures, Refusal
from edgefl.registry import choose
from edgefl.report.units import quantity

#: Form of a digest (``edgefl.records.digest_of``).
DIGEST = re.compile("[0-9a-f]{64}")

#: Parts named in a refusal.
MOST_NAMED = 5
#: A device with more than this share of a part that three or more trained decides alone what it becomes.
MUCH = 0.5
#: Predicted from the model alone, and right within a factor of two where they were measured: beyond this they are not
#: of this round. Seconds and joules are predicted for the device's kind, which may be another machine.
PREDICTED = ("step_peak_bytes", "flops")
FACTOR = 1000.0
#: Beyond this many times the prediction, and within FACTOR, a figure is doubtful: it stays, marked.
DOUBTFUL = 10.0
#: Figure -> what it may be above that: bytes of libraries' code and buffers, more than a small model's.
ALLOWANCE = {"step_peak_bytes": 16 * 2.0**20}
#: A device's seconds from offer to update are no more than the coordinator's own; clocks run apart, and are read late.
LONGER, LATER_S = 1.1, 1.0
#: No device here takes more, servers with several cards among them.
MOST_POWER_W = 2000.0
#: °C of silicon that computes.
COLDEST_C, HOTTEST_C = -60.0, 150.0
#: No trainer is below: an interpreter takes more memory, a message more seconds.
LEAST_FIGURES = {"process_peak_bytes": 2.0**20, "wall_s": 1e-5, "compute_s": 1e-6}
#: Above which no loss of a model that trains is; figures in f32 go on to 3e38, and would be the round's mean.
LARGEST_METRIC = 1e9
#: The figures whose predictions are corrected: what the budget is checked by, and what time and energy follow from.
LEARNED = ("step_peak_bytes", "flops", "compute_s", "energy_j")
#: How much the newest round counts (as an exponent): after four rounds what was thought before counts a sixteenth.
NEWEST = 0.5
#: A ratio beyond these says more of a disturbed measurement than of the device.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


def unfit(state: State, assignment: Assignment, update: Update) -> Refusal | None:
    """Reason to refuse an update: unexpected parts, or more samples than claimed; None for a usable one.

    A device that had no sample of a modality leaves out all that modality's parts, and one without a label of a set its
    classifier; an upload that omits leaves others out, but not all.
    """
    period = assignment.period or WHOLE_ROUND
    inside = not period.whole
    wanted = () if inside else sent(assignment.placement.stage, state.plan.slots.exchange)
    unasked = sorted(part for part in update.manifest if part not in wanted and is_scheduled(part))
    if PROTOTYPES in update.manifest and (inside or choose("prototypes", state.plan.server).method.local is None):
        unasked.append(PROTOTYPES)  # they would be merged, and sent to everyone
    if LAYERS in update.manifest and not period.layers:
        unasked.append(LAYERS)
    if unasked:
        return Refusal("parts", detail=f"the update holds parts it was not asked to train: {_names(unasked)}")
    brought = {modality_of(part) for part in update.manifest if part in wanted}
    given = [part for part in wanted if modality_of(part) in {None, *brought} and not space_of_part(part)]
    missing = [part for part in given if part not in update.manifest]
    shared = any(modality_of(part) is None for part in wanted)  # what every device can bring
    if (shared and not brought) or may_omit(assignment.placement.stage, state.plan.slots):
        missing = [] if brought else list(wanted)
    if missing:
        return Refusal("parts", detail=f"the update lacks parts it was asked to train: {_names(missing)}")
    device = state.devices[update.device]
    for part, claimed in sorted(update.samples.items(), key=lambda item: (-abs(item[1]), item[0])):
        owned = max(_samples_for(part, device.hello.samples), _samples_for(part, device.claim.samples))
        more = claimed > owned and not makes_claim(state, update.device)
        if more or claimed < 0:  # it would outweigh the others in the mean
            said = "its first update had" if state.plan.model.declared else "the device introduced itself with"
            text = f"part {part[:80]}: {claimed} samples claimed, {said} {owned}"
            return Refusal("samples", float(claimed), float(owned), "samples", text)
    return None


def makes_claim(state: State, device: str) -> bool:
    """True if the device's next update is its claim of samples; its hello is none where its own code reads them."""
    return bool(state.plan.model.declared) and not state.devices[device].claim.samples


def _samples_for(part: str, samples: Mapping[str, int]) -> int:
    """Number of a device's samples for training a part; for a label set's classifier, its labelled ones."""
    space = space_of_part(part)
    return samples.get(samples_key(space) if space else "", 0)


def _names(parts: list[str]) -> str:
    more = f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else ""
    return ", ".join(part[:80] for part in parts[:MOST_NAMED]) + more


def bounded(update: Update, claim: Claim) -> Update:
    """The update limited to plausible values: samples at most as claimed, a valid base and change.

    The base comes back in offers and is kept with the model: unless a digest, it is "", which ends the device's period.
    """
    samples = {part: min(n, max(0, _samples_for(part, claim.samples))) for part, n in update.samples.items()}
    base = update.base if DIGEST.fullmatch(update.base) else ""
    change, layer = update.poverty_change, update.layer
    if not 0 <= change <= LARGEST_METRIC:  # NaN too, which the memory of the run could not be read with
        change, layer = 0.0, ""
    return msgspec.structs.replace(update, samples=samples, base=base, poverty_change=change, layer=layer)


def overweights(parts_weights: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, str]]:
    """(device, text of the warning) for devices with most of a part's weight in the round."""
    found: dict[str, list[tuple[float, str]]] = {}
    for part, weights in parts_weights.items():
        shares = weights.get("devices", {})
        if is_shared(part) and len(shares) >= OF and max(shares.values()) > MUCH:
            device = max(shares, key=lambda name: shares[name])
            found.setdefault(device, []).append((shares[device], part))
    warnings = []
    for device, parts in sorted(found.items()):
        share, part = max(parts)
        more = f" and more than half of {len(parts) - 1} more" if len(parts) > 1 else ""
        text = f"it has {100 * share:.4g} % of the weight of part {part}{more}; round.largest_share caps it"
        warnings.append((device, text))
    return warnings


def plausible(
    figures: Figures, predicted: Figures, elapsed_s: float | None = None, *, partial: bool = False
) -> tuple[Figures, list[str]]:
    """The figures, implausible ones without a value and so in no sum or factor; and a text on each.

    Implausible is what is far from the prediction, below what any trainer takes, or below zero. What is merely
    doubtful keeps its value, says so in its kind, and teaches nothing. ``elapsed_s``: from the first offer to the
    update by the coordinator's own clock, None: not known. ``partial``: of a part of a round, which may be below what
    was predicted.
    """
    found, odd = dict(figures), []
    for name, figure in figures.items():
        if why := _doubtful(name, figures, predicted, elapsed_s, partial=partial):
            origin = " ".join(filter(None, (figure.kind, figure.source)))
            found[name] = msgspec.structs.replace(figure, kind="doubtful", source=f"{origin}: {why}")
    for name, figure in figures.items():
        if figure.value is not None and (why := _doubt(name, figure.value, predicted, partial=partial)):
            found[name] = msgspec.structs.replace(figure, value=None, reason=f"implausible: {why}")
            odd.append(f"{name.removesuffix('_bytes').removesuffix('_s').replace('_', ' ')} {why}")
    return found, odd


def _doubtful(name: str, figures: Figures, predicted: Figures, elapsed_s: float | None, *, partial: bool) -> str:
    """Reason to doubt a possible figure; "": none, or it has no value."""
    value, unit = figures[name].value, FIGURES.get(name, "")
    if value is None:
        return ""
    plan = predicted.get(name, Figure()).value if name in PREDICTED else None
    if plan and not (0 if partial else plan / DOUBTFUL) <= value <= plan * DOUBTFUL + ALLOWANCE.get(name, 0.0):
        return f"{quantity(plan, unit)} predicted"
    if name == "temperature_c" and not COLDEST_C <= value <= HOTTEST_C:
        return f"no processor computes outside {COLDEST_C:g} to {HOTTEST_C:g} °C"
    if name in {"wall_s", "compute_s"} and elapsed_s is not None and value > elapsed_s * LONGER + LATER_S:
        return f"{quantity(max(0.0, elapsed_s), 's')} from offer to update by the coordinator's clock"
    wall, compute = (_value(figures, one) for one in ("wall_s", "compute_s"))
    if name == "wall_s" and compute is not None and value * LONGER < compute:
        return f"{quantity(compute, 's')} of computing within it"
    if name == "energy_j" and value == 0:
        return "no round takes none"
    spent = elapsed_s if elapsed_s is not None and elapsed_s > 0 else wall
    if name == "energy_j" and spent is not None and value > (spent * LONGER + LATER_S) * MOST_POWER_W:
        return f"more than {MOST_POWER_W:g} W for {quantity(spent, 's')}"
    return ""


def _doubt(name: str, value: float, predicted: Figures, *, partial: bool) -> str:
    unit = FIGURES.get(name, "")
    if not math.isfinite(value):
        return f"{value} {unit}"
    if name == "temperature_c":
        return ""
    least, text = LEAST_FIGURES.get(name, 0.0), quantity(value, unit)
    if value < 0:
        return text
    if value < least:
        return f"{text}, no trainer is below {quantity(least, unit)}"
    plan = predicted.get(name, Figure()).value if name in PREDICTED else None
    if plan and not (0 if partial else plan / FACTOR) <= value <= plan * FACTOR:
        return f"{text}, {quantity(plan, unit)} predicted"
    return ""


def likely(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a plausible size; NaN is dropped."""
    return {name: value for name, value in metrics.items() if abs(value) <= LARGEST_METRIC}


def miscounted(state: State, placement: Placement, device: str, metrics: Mapping[str, float]) -> str:
    """Contradiction between a device's counts for the choice of k and its claimed data; "" for none."""
    ks = candidates(state.plan.slots.prototypes, state.plan.model.classes)
    most = most_judged(placement.hyper, state.devices[device].claim.samples, state.plan.model.encoders)
    return doubt(metrics, ks, most)


def learned(factors: Mapping[str, float], placement: Placement, measured: Figures) -> dict[str, float]:
    """Correction factors of a device's cost predictions, updated by a round.

    By figure: measured / predicted, smoothed over rounds. ``factors``: those before; ``measured``: the figures of a
    round with this ``placement``. If the round also filled the prefix cache, the filling's FLOPs are subtracted, and
    its memory and joules are not learned from.
    """
    found = dict(factors)
    filling = _value(measured, "filling_flops") or 0.0
    for name in LEARNED if not filling else ("flops", "compute_s"):
        value, prediction = _value(measured, name), _value(placement.predicted, name)
        if value is not None and name == "flops":
            value -= filling
        if value is None or prediction is None or value <= 0:
            continue
        plain = prediction / placement.factors.get(name, 1.0)
        ratio = min(MOST_RATIO, max(LEAST_RATIO, value / plain))
        before = found.get(name, 1.0)
        found[name] = before * (ratio / before) ** NEWEST
    return found


def _value(figures: Figures, name: str) -> float | None:
    """A figure's value if measured: finite, above zero, not doubtful; else None."""
    figure = figures.get(name, Figure())
    value = figure.value if figure.kind != "doubtful" else None
    return value if value is not None and math.isfinite(value) and value > 0 else None

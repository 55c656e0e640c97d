"""Refusals of devices and updates: from an event's data, and as text."""

from __future__ import annotations

from edgefl.records import GPU, Refusal
from edgefl.report import units
from edgefl.report.grid import Record

#: Reason of a device that its fleet has shut out, of its leaving and of its part; also what it does since.
REVOKED = "revoked"
#: The same of a device whose name another machine has taken over.
REPLACED = "replaced"
#: Machine-readable reason, or an assignment's status -> words.
REASONS: dict[str, str] = {
    "step_memory": "step memory over budget",
    "memory": "process memory over budget",
    "flops": "FLOPs over budget",
    "payload": "bytes over budget",
    "energy": "energy over budget",
    "disk": "disk space over budget",
    "data": "too little data for one batch",
    "labels": "unlabelled data",
    "method": "method not installed",
    "busy": "busy with another round",
    "out_of_step": "other parts retained than the period goes on from",
    "layer": "no layer small enough to be exchanged alone",
    "protocol": "other version of the protocol",
    "replay": "offer older than one taken up before",
    "transfer": "parts could not be fetched",
    "packed": "compressed part does not unpack",
    "damaged": "stored object damaged",
    "cache": "frozen prefix not exact enough to be stored",
    "ceiling": "memory ceiling hit while training",
    "error": "training failed",
    "diverged": "loss or weights are not finite",
    "update": "update could not be used",
    "lost": "lost contact",
    "late": "update came too late",
    "stale": "update of an attempt that is closed",
    "parts": "update of other parts than asked for",
    "samples": "more samples claimed than it has",
    "size": "object of an impossible size",
    "not_finite": "update holds NaN or infinity",
    "range": "values beyond what f32 can calculate with",
    "change": "change out of line with the other devices'",
    "few": "prototype of too few samples",
    "shape": "tensor of another shape",
    "names": "other tensors than the part's",
    "dtype": "tensor of another kind of number",
    "malformed": "update is no safetensors part",
    "hash": "bytes that are not what they are named by",
    "quarantine": "in quarantine",
    "left_out": "left out by the operator",
    "abandoned": "training abandoned",
    "offered": "offer not answered yet",
    "accepted": "training not finished yet",
    "updated": "update not fetched yet",
    "replanning": "waits for a smaller job",
    REVOKED: "revoked",
    REPLACED: "replaced by another machine",
}
_SMALLER = (
    "Choose smaller encoders (model.encoders.NAME.size; `edgefl plan --sizes` lists them) or a layer-wise schedule, or "
    "raise the device's budget"
)
#: Reason of a refusal -> what to do about it.
REMEDIES: dict[str, str] = {
    **dict.fromkeys(("step_memory", "memory", "ceiling"), _SMALLER),
    **dict.fromkeys(
        ("flops", "energy"), "Lower training.epochs, choose smaller encoders, or raise the device's budget"
    ),
    "payload": "Compress by transfer.up and transfer.down, choose smaller encoders, or raise budget.payload_bytes",
    "disk": "Free space on the device, or raise its budget.disk_bytes",
    "damaged": "See to the device's disk: what was damaged is fetched again",
    "data": "Give the device more data of the model's kind, or lower training.batch_size",
    "labels": "Label its samples, or choose a recipe that trains without labels",
    "diverged": "Lower training.lr, or set training.clip_norm: 1.0",
    "method": "Install on the device what the coordinator has",
    "protocol": "Install the same release on both sides",
    "quarantine": "It is asked again by itself; see why its updates could not be used",
}


def reason(refusal: Refusal) -> str:
    """The refusal's reason in words."""
    if refusal.reason == "memory" and refusal.where == GPU:
        return "GPU memory over budget"
    if refusal.reason == "data" and refusal.needed is None:
        return "data does not fit the model"  # its detail says how; without numbers it is not the amount
    return REASONS.get(refusal.reason, refusal.reason.replace("_", " ") or "no reason given")


def refusal_of(data: Record) -> Refusal:
    """The refusal in an event's data."""
    texts = {name: str(data.get(name) or "") for name in ("reason", "unit", "detail", "where")}
    return Refusal(needed=data.get("needed"), allowed=data.get("allowed"), **texts)


def refusal_text(data: Record) -> str:
    """ "step memory over budget: needs 26.4 MiB, allowed 24.0 MiB"."""
    why = refusal_of(data)
    if why.needed is not None and why.allowed is not None:
        needed, allowed = (units.quantity(value, why.unit) for value in (why.needed, why.allowed))
        return f"{reason(why)}: needs {needed}, allowed {allowed}"
    return f"{reason(why)}: {why.detail}" if why.detail else reason(why)

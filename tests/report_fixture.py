"""A run as a ledger would report it: six stages, four devices, nulls with reasons, refusals, two kinds of masks."""

from __future__ import annotations

import math
from typing import Any

from edgefl.records import Budget, Capabilities, Figure, Figures, Refusal
from edgefl.run_records import (
    AssignmentRow,
    BundleRow,
    DeviceRow,
    EvaluationRow,
    EventRow,
    RoundRow,
    RunReport,
)

MIB = 2**20
START = 1_790_000_000.0
STAGES = 6
ROUNDS_PER_STAGE = 2
NO_ENERGY = "no energy sensor: neither INA3221, NVML nor RAPL can be read"
NO_HEAT = "no thermal zone can be read"
SIZES = {"orin-nano": 60, "nano": 44, "gpu-box": 96, "tiny": 20}
#: Step memory each device needs in a stage, relative to the others (its batch size).
SCALE = {"orin-nano": 1.0, "nano": 0.62, "gpu-box": 1.6, "tiny": 0.36}


def part_bytes() -> dict[str, int]:
    sizes = {}
    for modality in ("acc", "gyro"):
        sizes[f"{modality}/embed"] = 14_000
        sizes |= {f"{modality}/stage{k}": 200_192 for k in range(1, STAGES + 1)}
        sizes[f"{modality}/norm"] = 512
        sizes[f"head/{modality}"] = 182_000
    return {**sizes, "fusion": 66_000, "task": 1_040}


def stages() -> tuple[dict[str, Any], ...]:
    rows = []
    for index in range(1, STAGES + 1):
        trained = [f"{m}/{p}" for m in ("acc", "gyro") for p in (f"stage{index}", "norm")]
        trained += ["head/acc", "head/gyro", "fusion", "task"]
        kept = [f"{m}/stage{k}" for m in ("acc", "gyro") for k in range(1, index)]
        present = ["acc/embed", "gyro/embed", *kept, *trained]
        rows.append(
            {"index": index, "depth": index, "rounds": ROUNDS_PER_STAGE, "present": present, "trained": trained}
        )
    return tuple(rows)


def devices() -> tuple[DeviceRow, ...]:
    def one(name: str, profile: str, total: int, budget: Budget, gyro: int, **more: Any) -> DeviceRow:
        capabilities = Capabilities(
            memory_total_bytes=total * MIB,
            memory_free_bytes=total * MIB // 2,
            cores=2,
            disk_free_bytes=21_000 * MIB,
            trainer_base_bytes=231 * MIB,
            machine="x86_64",
            runtime="torch 2.13.0+cpu",
            **more,
        )
        samples = {"": SIZES[name], "acc": SIZES[name], "gyro": gyro}
        return DeviceRow(name, profile, capabilities, budget, samples, (SIZES[name] // 4,) * 4)

    return (
        one("orin-nano", "jetson-orin-nano-8gb", 7_620, Budget(step_memory_bytes=512 * MIB, flops=4e12), 51),
        one("nano", "jetson-nano-4gb", 3_956, Budget(step_memory_bytes=24 * MIB, flops=1e11), 44),
        one("gpu-box", "gpu-box", 64_000, Budget(), 90, gpu="NVIDIA L4", gpu_memory_bytes=23_034 * MIB),
        one("tiny", "single-stage-box", 1_024, Budget(step_memory_bytes=int(4.75 * MIB), payload_bytes=4 * MIB), 0),
    )


def predicted(device: str, stage: int) -> Figures:
    step = (9.5 + 2.1 * stage) * SCALE[device] * MIB
    flops = SIZES[device] * (0.9 + 0.32 * stage) * 1e8
    sizes = part_bytes()
    down = sum(sizes[part] for part in stages()[stage - 1]["present"])
    up = sum(sizes[part] for part in stages()[stage - 1]["trained"])
    values = {"step_peak_bytes": step, "flops": flops, "payload_down_bytes": down, "payload_up_bytes": up}
    return {name: Figure(float(value), "predicted", "meta device") for name, value in values.items()}


def measured(device: str, stage: int, number: int) -> Figures:
    plan = {name: figure.value or 0.0 for name, figure in predicted(device, stage).items()}
    drift = {"orin-nano": 0.91, "nano": 1.28, "gpu-box": 0.87, "tiny": 1.09}[device]
    step = plan["step_peak_bytes"] * drift * (1 + 0.01 * number)
    down = plan["payload_up_bytes"] if number else plan["payload_down_bytes"] * 0.55
    figures = {
        "process_peak_bytes": Figure(231.0 * MIB + step, "measured", "VmHWM"),
        "step_peak_bytes": Figure(step, "measured", "VmHWM above the idle trainer"),
        "flops": Figure(plan["flops"] * 1.002, "counted", "FlopCounterMode"),
        "payload_up_bytes": Figure(plan["payload_up_bytes"], "counted", "objects"),
        "payload_down_bytes": Figure(down, "counted", "objects"),
        "wire_up_bytes": Figure(plan["payload_up_bytes"] * 1.03 + 5_000, "measured", "socket"),
        "wire_down_bytes": Figure(down * 1.02 + 9_000, "measured", "socket"),
        "wall_s": Figure(2.4 + 0.21 * stage + 0.4 * SCALE[device], "measured", "monotonic clock"),
        "compute_s": Figure(0.9 + 0.17 * stage * SCALE[device], "measured", "monotonic clock"),
        "energy_j": Figure(reason=NO_ENERGY),
        "temperature_c": Figure(reason=NO_HEAT),
    }
    if device == "gpu-box":
        figures["temperature_c"] = Figure(48.0 + stage, "measured", "NVML")
        if (stage, number) != (2, 0):
            figures["energy_j"] = Figure(61.0 + 7 * stage, "measured", "NVML")
        else:
            figures["energy_j"] = Figure(reason="NVML did not answer")
    return figures


def assignment(device: str, stage: int, number: int) -> AssignmentRow:
    row = AssignmentRow(
        device=device,
        stage=stage,
        round=number + 1,
        attempt=1,
        status="done",
        batch_size=16,
        micro_batch=8 if device == "nano" and stage >= 4 else 0,
        trained=tuple(stages()[stage - 1]["trained"]),
        samples={"acc/stage1": SIZES[device]},
        metrics={"loss": loss(stage, number) * (1 + 0.12 * math.sin(SIZES[device]))},
        predicted=predicted(device, stage),
        measured=measured(device, stage, number),
    )
    if device == "tiny" and stage >= 2:
        needed = predicted(device, stage)["step_peak_bytes"].value
        why = Refusal("step_memory", needed, 4.75 * MIB, "B", "peak of one step at micro-batch 1")
        return _without(row, "refused", why)
    if device == "nano" and (stage, number) == (4, 0):
        why = Refusal("ceiling", 26.4 * MIB, 24.0 * MIB, "B", "trainer stopped at its memory ceiling")
        return _without(row, "declined", why)
    if device == "orin-nano" and (stage, number) == (5, 1):
        return _without(row, "lost", None)
    return row


def _without(row: AssignmentRow, status: str, refusal: Refusal | None) -> AssignmentRow:
    return AssignmentRow(
        device=row.device,
        stage=row.stage,
        round=row.round,
        attempt=row.attempt,
        status=status,
        refusal=refusal,
        batch_size=row.batch_size,
        trained=row.trained,
        predicted=row.predicted,
    )


def loss(stage: int, number: int) -> float:
    return 1.32 * math.exp(-0.34 * (2 * (stage - 1) + number)) + 0.06


def evaluations(stage: int, number: int) -> list[EvaluationRow]:
    seen = 2 * (stage - 1) + number
    complete = min(0.975, 0.98 - 0.62 * math.exp(-0.42 * seen))
    rows = [EvaluationRow(stage, number + 1, ("acc", "gyro"), "none", "accuracy", complete, 120)]
    for modality, zero, prototype in (("acc", 0.66, 0.88), ("gyro", 0.47, 0.79)):
        for mask, share in (("zero", zero), ("prototype", prototype)):
            value = round(complete * share * 120) / 120
            rows.append(EvaluationRow(stage, number + 1, (modality,), mask, "accuracy", value, 120))
    return rows


def round_row(stage: int, number: int, rows: list[AssignmentRow]) -> RoundRow:
    started = START + 12 + 9.0 * (2 * (stage - 1) + number)
    done = tuple(row.device for row in rows if row.status == "done")
    record = {
        "select": {"choice": "all", "chosen": list(done)},
        "weight": {"choice": "samples", "weights": {name: SIZES[name] for name in done}},
        "combine": {"choice": "mean"},
        "optimise": {"choice": "plain"},
    }
    return RoundRow(stage, number + 1, 1, "done", started, started + 7.4, done, {"loss": loss(stage, number)}, record)


def events() -> tuple[EventRow, ...]:
    joined = [
        EventRow(START + 3 + index, "device_joined", device=row.device, data={"profile": row.profile})
        for index, row in enumerate(devices())
    ]
    again = EventRow(
        START + 70, "replanned", 4, 1, "nano", {"micro_batch": 8, "reason": "memory ceiling hit while training"}
    )
    return (*joined, again)


def run_report() -> RunReport:
    """A finished run."""
    rounds, assignments, scores = [], [], []
    for stage in range(1, STAGES + 1):
        for number in range(ROUNDS_PER_STAGE):
            rows = [assignment(device, stage, number) for device in SIZES]
            assignments += rows
            rounds.append(round_row(stage, number, rows))
            scores += evaluations(stage, number)
    bundles = tuple(
        BundleRow(name, f"bundles/{name}.onnx", modalities, size, difference, 1e-4)
        for name, modalities, size, difference in (
            ("complete", ("acc", "gyro"), 3_210_000, 2.4e-7),
            ("acc", ("acc",), 1_720_000, 1.8e-7),
            ("gyro", ("gyro",), 1_720_000, 2.1e-7),
        )
    )
    config = {
        "name": "basic-motions",
        "recipe": "layerwise",
        "broker": {"url": "mqtt://fleet:s3cret@127.0.0.1:41883"},
        "data": {"source": {"basic_motions": {"window": 50, "step": 25}}, "partition": {"dirichlet": {"alpha": 1.0}}},
        "training": {"epochs": 2, "batch_size": 16, "lr": {"encoder": 0.001, "head": 0.001}},
        "devices": list(SIZES),
    }
    return RunReport(
        run="20260918-141320-basic-motions",
        name="basic-motions",
        recipe="layerwise",
        status="done",
        started_at=START,
        finished_at=START + 131,
        config=config,
        part_bytes=part_bytes(),
        stages=stages(),
        devices=devices(),
        rounds=tuple(rounds),
        assignments=tuple(assignments),
        evaluations=tuple(scores),
        events=events(),
        bundles=bundles,
    )

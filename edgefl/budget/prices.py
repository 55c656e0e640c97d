"""What ``edgefl plan`` finds: prices of the schedules, and what each device would train."""

from __future__ import annotations

import msgspec

from edgefl.plan.job import Placement


class StagePrice(msgspec.Struct, frozen=True):
    """One stage of one schedule on one share. Bytes of a usual round; FLOPs forward + backward."""

    schedule: str = ""
    stage: int = 0
    rounds: int = 0
    step_peak_bytes: int = 0
    flops_per_round: float = 0.0
    flops_per_sample: float = 0.0
    payload_down_bytes: int = 0
    payload_up_bytes: int = 0
    filling_flops: float = 0.0  # once: what no earlier stage has stored of the frozen prefix
    whole_bytes: int = 0  # down and up of the stage's first and last transfers, in which parts come whole
    batch_size: int = 0
    memory: dict[str, int] = {}  # what step_peak_bytes consists of


class DevicePlan(msgspec.Struct, frozen=True):
    """What one device would train in one stage."""

    device: str = ""
    profile: str = ""
    placement: Placement = Placement()
    card: bool = False  # the step is in the GPU's own memory


class Account(msgspec.Struct, frozen=True):
    """A schedule by a paper's accounting: bytes of one client, FLOPs of one sample."""

    schedule: str = ""
    payload_bytes: float = 0.0
    flops: float = 0.0


class RunPrice(msgspec.Struct, frozen=True):
    """The whole answer. ``samples``: size of the share that the schedules are priced on, at least a batch of theirs.

    ``batch_size`` and ``schedule``: the run's, which ``devices`` are planned with.
    """

    name: str = ""
    recipe: str = ""
    model_bytes: int = 0
    samples: int = 0
    batch_size: int = 0
    trainer_base_bytes: int = 0
    schedules: tuple[StagePrice, ...] = ()
    devices: tuple[DevicePlan, ...] = ()
    convention: str = ""
    accounts: tuple[Account, ...] = ()  # by that convention
    schedule: str = ""
    warnings: tuple[str, ...] = ()

"""Trials of joint steps: for which devices they are taken, and how many at once (docs/decisions/0111)."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edgefl.errors import StoreError
from edgefl.models.spec import fuses_tokens, shares_attention, shares_projection, task_parts
from edgefl.plan.job import Hyper, Job
from edgefl.registry import chosen
from edgefl.storage.disk import store_errors, write_new
from edgefl.training.batches import Batch
from edgefl.training.embeddings import device_of, own_modalities
from edgefl.training.flop_cache import FlopCounts, counted, kind_of_step, linear_in, metered
from edgefl.training.joint_steps import Halted, Stack, batches_of, stacked
from edgefl.training.local_round import Training
from edgefl.training.step import make_optimizer, run_backward, run_forward

#: What gradients may differ by, as a share of the largest: some thousand roundings of f32, since batch norm of six rows
#: makes 1e-5 of them. With other random numbers or statistics they differ by a tenth.
ROUNDING = 1e-4
#: Gain from which steps are taken together: a trial's own noise is a tenth.
LEAST_GAIN = 1.2
#: Turns of both ways that a trial times, the fastest of each counting, and of how many devices the steps one by one.
TURNS, ALONE = 3, 5
#: Values of all devices, gradients, the optimiser's state and copies, together.
MOST_BYTES = 512 * 2**20
#: Rows of all devices' batches: their activations are there at once.
MOST_ROWS = 4096
#: Values of an optimiser's state for each trained value; the others are not elementwise, and refused.
_STATE = {"sgd": 1, "adamw": 2}


class Answer(msgspec.Struct, frozen=True):
    """Answer of a trial. ``gain``: processor seconds one by one, by those together; ``why`` not, "": together."""

    devices: int = 0
    gain: float = 0.0
    why: str = ""


class JointSteps:
    """Joint steps of a run. ``file``: where answers of trials are kept for a run that goes on.

    ``tell`` takes a sentence for each kind of step.
    """

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        self._file, self._tell = file, tell
        self._answers = _read(file)
        self._told = set[str]()
        self._counts = FlopCounts()

    def refused(self, training: Training) -> bool:
        """True for a device that cannot take joint steps; says why."""
        if reason := refusal(training):
            self._say(training.job, f"steps are taken one by one: {reason}")
        return bool(reason)

    def agreed(self, devices: Sequence[Halted]) -> bool:
        """Decision of the trial for devices of one kind."""
        if len(devices) < 2:
            return False
        training = devices[0].training
        # A gain depends little on the number of devices, and a trial takes as long as a round.
        decisive = kind_of(training), training.job.hyper.optimizer, len(devices).bit_length()
        key = hashlib.sha256(repr(decisive).encode()).hexdigest()
        if (answer := self._answers.get(key)) is None:
            answer = self._answers[key] = trial(devices)
            with store_errors("write", self._file):
                write_new(self._file, msgspec.json.encode(self._answers))
        if answer.why:
            self._say(training.job, f"steps are taken one by one: {answer.why}")
        else:
            text = f"steps of {answer.devices} devices are taken together, × {answer.gain:.1f} faster here"
            self._say(training.job, text)
        return not answer.why

    def flops(self, device: Halted) -> float:
        """FLOPs of a device's step, as it counts them by itself; its model's modules are used."""
        training = device.training
        kind = kind_of_step(training.job, with_tables=bool(training.auxiliary.tables))
        batch, linear = next(batches_of(training, np.random.default_rng(0))), linear_in(training.job)
        if (known := self._counts.get(kind, batch.shape_key, linear=linear)) is not None:
            return known
        device.resume()
        with metered(self._counts) as bill, torch.random.fork_rng(devices=[]):
            counted(kind, batch.shape_key, lambda: _backward(training, batch), linear=linear)
        return bill.flops

    def _say(self, job: Job, text: str) -> None:
        text = f"stage {job.stage.index}: {text}"
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def _read(file: Path) -> dict[str, Answer]:
    if not file.is_file():
        return {}
    try:
        with store_errors("read", file):
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Answer])
    except msgspec.MsgspecError as error:
        remedy = "Delete it and go on: its trials are made again."
        raise StoreError(f"{file} cannot be read: {error}", remedy=remedy) from error


def kind_of(training: Training) -> tuple[object, ...]:
    """Key of devices whose steps have the same operations and cost."""
    job, data, tables = training.job, training.dataset, training.auxiliary.tables
    prefixes = [(m, encoded.depth, encoded.tokens.dtype.str) for m, encoded in data.encoded.items()]
    return kind_of_step(job, with_tables=bool(tables)), tuple(own_modalities(job, data)), tuple(prefixes)


def together(training: Training) -> object:
    """Key of devices that may take joint steps: their kind, job and prototypes."""
    given = training.auxiliary.tables.items()
    tables = [(m, table.rows.numpy().tobytes(), table.valid.numpy().tobytes()) for m, table in given]
    job = msgspec.structs.replace(training.job, signature="")  # which a device sends once
    return msgspec.msgpack.encode(job), kind_of(training), tuple(tables)


def most(device: Halted, asked: int) -> int:
    """How many such devices go together at most, of ``asked``: as even groups as memory allows."""
    training = device.training
    hyper, stage = training.job.hyper, training.job.stage
    learnt = sum(p.nbytes for part in stage.trained for p in training.model.part(part).parameters())
    each = 2 * sum(value.nbytes for value in device.values) + learnt * (1 + _STATE[hyper.optimizer])
    limit = max(1, min(MOST_BYTES // max(1, each), MOST_ROWS // hyper.batch_size))
    return math.ceil(asked / math.ceil(asked / limit))


def refusal(training: Training) -> str:
    """Why a device takes its steps by itself; "": it need not."""
    return _of_job(training.job) or _of_hyper(training.job.hyper) or _of_device(training) or _of_data(training)


def _of_job(job: Job) -> str:
    model = job.model
    terms = [term.method for term in chosen("objective", job.slots.objective)]
    reasons = {
        "a loss with state of its own": any(term.auxiliaries or term.keep for term in terms),
        "rounds in a period": job.period is not None,
        "low-rank adaptation": model.lora is not msgspec.UNSET,
        "shared attention, a shared projection or a fusion of tokens": shares_attention(model)
        or shares_projection(model)
        or fuses_tokens(model),
        "several label sets": len(task_parts(model)) != 1,
        "a model of the transformers library": any(encoder.config for encoder in model.encoders.values()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _of_hyper(hyper: Hyper) -> str:
    reasons = {
        f"optimiser {hyper.optimizer}, whose update is not elementwise": hyper.optimizer not in _STATE,
        "batches of one sample": hyper.batch_size < 2,
        "micro-batches": 0 < hyper.micro_batch < hyper.batch_size,
        "activation checkpointing": hyper.checkpoint,
        "a limit on the norm of gradients": hyper.clip_norm > 0,
        "mixed precision": hyper.precision != "f32",
        "weights on disk": hyper.weights != "memory",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _of_device(training: Training) -> str:
    model, auxiliary = training.model, training.auxiliary
    private = auxiliary.private_heads or auxiliary.teachers or auxiliary.received or auxiliary.kept
    reasons = {
        "an observer of the steps": training.observer is not None,
        "state beside the model": bool(private or auxiliary.initial),
        "steps on another processor": device_of(model).type != "cpu",
        "a recurrent layer": any(isinstance(layer, nn.RNNBase) for layer in model.modules()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _of_data(training: Training) -> str:
    data, usable = training.dataset, training.usable
    own = own_modalities(training.job, data)
    if not own or not data.complete(own)[usable].all():
        return "samples without a modality"
    if data.labels is None or (data.labels[usable] < 0).any():
        return "samples without a label"
    return "targets that are numbers or sets" if data.targets is not None or data.sets is not None else ""


def trial(devices: Sequence[Halted], clock: Callable[[], float] = time.thread_time) -> Answer:
    """Both ways for devices of one kind, which stay as they are, but for what is in their model's modules."""
    job = devices[0].training.job
    draw, count = np.random.default_rng(0), len(devices)
    batches = [next(batches_of(one.training, draw)) for one in devices]
    with torch.random.fork_rng(devices=[]):
        joint = stacked(batches)
        try:
            stack = Stack(devices)
            stack.backward(joint)
        # Torch's for what it cannot stack: random numbers, branches on values, updates in place.
        except (RuntimeError, TypeError, ValueError) as error:
            return Answer(count, why=f"torch cannot stack the weights ({_first_line(error)})")
        difference = 0.0
        for place, (one, batch) in enumerate(zip(devices, batches, strict=True)):
            one.resume()
            _backward(one.training, batch)
            difference = max(difference, _difference(stack, place, one.training.model))
        if not difference <= ROUNDING:
            return Answer(count, why=f"the gradients differ by {difference:.0e} of the largest")
        model, few = devices[0].training.model, list(zip(devices, batches, strict=True))[:ALONE]
        optimizer = make_optimizer(model, job.stage.trained, job.hyper)

        def alone() -> None:
            for one, batch in few:
                _backward(one.training, batch)
                optimizer.step()

        def at_once() -> None:
            stack.backward(stacked(batches))
            stack.optimizer.step()

        turns = [(_seconds(alone, clock), _seconds(at_once, clock)) for _ in range(1 + TURNS)][1:]
    few_s, all_s = map(min, zip(*turns, strict=True))
    gain = few_s / len(few) * count / max(all_s, 1e-9)
    slow = gain < LEAST_GAIN
    return Answer(count, gain, f"those of {count} devices together are × {gain:.1f} as fast here" if slow else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _seconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    step()
    return clock() - began


def _backward(training: Training, batch: Batch) -> None:
    model, job = training.model, training.job
    model.zero_grad(set_to_none=True)
    run_backward(model, job, batch, run_forward(model, job, batch, training.auxiliary))


def _difference(stack: Stack, place: int, model: nn.Module) -> float:
    """The largest difference between both ways, of a gradient or of batch norm's statistics, as a share."""
    gradients = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {f"model.{name}": b for name, b in model.named_buffers() if f"model.{name}" in stack.buffers}
    found, largest = 0.0, max((float(own.abs().max()) for own in gradients.values()), default=0.0)
    for name, own in gradients.items():
        other = stack.values[name].grad if name in stack.values else None
        if other is None:
            return math.inf
        found = max(found, _distance(other[place], own) / max(largest, ROUNDING))
    if len(gradients) != sum(value.grad is not None for value in stack.values.values()):
        return math.inf
    for name, own in buffers.items():
        found = max(found, _distance(stack.buffers[name][place], own) / max(1.0, float(own.abs().max())))
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0

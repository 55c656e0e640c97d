"""A GPU's memory: its facts, the allocator's ceiling and refusals, with a stand-in for torch.cuda; no GPU is needed."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from device_agent.core.machine import initial, step
from device_agent.core.state import Connected, DataFacts, Result, Saved, Send, State
from device_agent.measured_profile import _gpu_memory
from device_agent.runtime.trainer_process import TrainerSettings, TrainRequest, _with_limit, failed
from device_agent.trainer import local_trainer as trainer_module
from device_agent.trainer.local_trainer import LocalTrainer
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol.messages import Hello, Offer
from edgefl.records import GPU, HOST, Budget, Capabilities, Refusal
from edgefl.registry import Observed
from edgefl.report.refusals import reason
from edgefl.resources.gpu_memory import (
    SEGMENT_BYTES,
    CudaCeiling,
    Gpu,
    GpuMemoryError,
    allocator_bytes,
    gpu_of,
    memory_refusal,
    out_of_memory,
)
from edgefl.resources.process_memory import ceiling_bytes

MIB = 2**20
GIB = 2**30


class Cuda:
    """What of ``torch.cuda`` is used: an allocator that keeps ``cached`` bytes beside its tensors until asked."""

    def __init__(self, *, total: int = 24 * GIB, others: int = 0, shared: bool = False) -> None:
        self.total, self.others, self.shared = total, others, shared
        self.tensors = self.cached = self.peak = 0
        self.fractions: list[float] = []

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, index: int) -> SimpleNamespace:
        assert isinstance(index, int)
        return SimpleNamespace(name="a GPU", is_integrated=int(self.shared))

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total - self.others - self.tensors - self.cached, self.total

    def memory_reserved(self, index: int) -> int:
        return self.tensors + self.cached

    def max_memory_reserved(self, index: int) -> int:
        return max(self.peak, self.memory_reserved(index))

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = 0

    def empty_cache(self) -> None:
        self.cached = 0

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        assert isinstance(index, int)
        self.fractions.append(fraction)

    @property
    def allowed(self) -> int:
        """Bytes that the allocator may hold since it was told last."""
        return round(self.fractions[-1] * self.total)


@pytest.fixture(autouse=True)
def no_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shared pool, what the stand-in for the driver says is free is all there is."""
    monkeypatch.setattr("edgefl.resources.gpu_memory.available_bytes", lambda: 0)


@pytest.mark.parametrize(("shared", "free"), [(True, 5 * GIB), (False, 2 * GIB)])
def test_page_cache_is_free_memory_of_a_shared_pool(monkeypatch: pytest.MonkeyPatch, shared: bool, free: int) -> None:
    """Of 8 GiB: the kernel holds 4 of page cache, 2 are free and 1 of them is this allocator's own."""
    monkeypatch.setattr("edgefl.resources.gpu_memory.available_bytes", lambda: 4 * GIB)
    cuda = Cuda(total=8 * GIB, others=6 * GIB, shared=shared)
    cuda.tensors = GIB
    assert gpu_of(cuda, "cuda").free_bytes == free


def test_free_is_what_this_allocator_could_hold() -> None:
    """Of 24 GiB: 2 are the context's and others', 1 is this allocator's own: it could hold 22."""
    cuda = Cuda(others=2 * GIB)
    cuda.tensors = GIB
    assert gpu_of(cuda, "cuda") == Gpu("a GPU", 24 * GIB, 22 * GIB, shared=False)
    assert gpu_of(Cuda(shared=True), "cuda:0").shared


@pytest.mark.parametrize(
    ("budget", "card", "pool"),
    [
        (Budget(), None, None),
        (Budget(gpu_memory_bytes=4 * GIB), 4 * GIB, 4 * GIB),
        # Of a pool, what the process has taken is not the allocator's: 3 - 1.5 GiB, and 1.25 + 0.5 - 1.5.
        (Budget(memory_bytes=3 * GIB), None, 3 * GIB // 2),
        (Budget(step_memory_bytes=GIB // 2), GIB // 2 + 32 * MIB + SEGMENT_BYTES, GIB // 4),
        (Budget(memory_bytes=3 * GIB, gpu_memory_bytes=GIB), GIB, GIB),
    ],
)
def test_the_allocator_s_limit_by_hand(budget: Budget, card: int | None, pool: int | None) -> None:
    sizes = {"base_bytes": 5 * GIB // 4, "host_bytes": 3 * GIB // 2, "idle_bytes": 32 * MIB}
    assert allocator_bytes(budget, shared=False, **sizes) == card
    assert allocator_bytes(budget, shared=True, **sizes) == pool


def test_a_step_limit_binds_the_process_only_where_the_step_is() -> None:
    budget = Budget(memory_bytes=500, step_memory_bytes=50)
    assert ceiling_bytes(budget, 100) == 150
    assert ceiling_bytes(budget, 100, card=True) == 500


def test_a_card_s_ceiling_is_set_once() -> None:
    cuda = Cuda()
    cuda.cached = GIB  # left over from the round before
    ceiling = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=6 * GIB, memory_bytes=1), 0, lambda: 10 * GIB)
    assert (cuda.cached, cuda.fractions) == (0, [])
    ceiling.hold()
    ceiling.hold()
    assert cuda.fractions == [0.25]
    beyond = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=48 * GIB), 0)
    beyond.hold()
    assert cuda.fractions[-1] == 1.0
    without = CudaCeiling(Cuda(), "cuda", Budget(memory_bytes=GIB), 0)
    without.hold()
    assert without.limit_bytes is None


def test_process_and_allocator_never_hold_more_than_the_one_budget() -> None:
    """Whatever the process takes is no longer the allocator's; blocks without a tensor go back first."""
    cuda, host = Cuda(total=8 * GIB, shared=True), [1 * GIB]
    budget = Budget(memory_bytes=4 * GIB)
    ceiling = CudaCeiling(cuda, "cuda", budget, GIB, lambda: host[0])
    for taken in (1, 2, 1):
        host[0] = taken * GIB
        ceiling.hold()
        assert cuda.allowed + host[0] == 4 * GIB
    cuda.tensors, cuda.cached, host[0] = GIB, 2 * GIB, 2 * GIB
    ceiling.hold()
    assert (cuda.cached, cuda.allowed) == (0, 2 * GIB)
    host[0] = 7 * GIB // 2
    with pytest.raises(GpuMemoryError, match="that the budget leaves them"):
        ceiling.hold()
    told = ceiling.refusal("too much")
    assert (told.reason, told.needed, told.allowed, told.unit) == ("memory", 4.5 * GIB, 4.0 * GIB, "B")
    assert "one pool" in told.detail
    host[0] = 5 * GIB  # alone over the budget
    with pytest.raises(MemoryError):
        ceiling.hold()
    assert ceiling.refusal("too much").allowed == 4 * GIB


def test_what_was_refused_by_the_allocator_was_never_held() -> None:
    cuda = Cuda(others=20 * GIB)
    ceiling = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=2 * GIB), 0)
    ceiling.hold()
    cuda.peak = cuda.tensors = 2 * GIB - MIB
    told = ceiling.refusal("CUDA out of memory")
    assert told == Refusal("memory", None, 2.0 * GIB, "B", "memory of the GPU: CUDA out of memory", GPU)
    cuda.others = 23 * GIB  # somebody else's is the reason, below our own limit
    assert ceiling.refusal("").allowed == GIB


def test_a_refusal_does_not_tell_the_round_before_s_peak() -> None:
    cuda = Cuda()
    cuda.peak = 20 * GIB
    ceiling = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=2 * GIB), 0)
    assert ceiling.refusal("CUDA out of memory").needed is None


def test_a_refusal_names_the_memory_that_ran_out() -> None:
    cuda = Cuda()
    ceiling = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=GIB), 0)
    ceiling.hold()
    words = ("CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
    typed = (torch.OutOfMemoryError("no room"), GpuMemoryError("tensors hold too much"))
    for error in (*map(RuntimeError, words), *typed):
        assert out_of_memory(error)
        for made in (ceiling, None):  # making it may be what took too much
            told = memory_refusal(error, made, card=True)
            assert told.detail.startswith("memory of the GPU: out of memory: ")
            assert (told.where, reason(told)) == (GPU, "GPU memory over budget")
            assert told.allowed == (GIB if made else None)
            assert _with_limit(Result(refusal=told), 1).refusal == told  # the process' limit is not the card's
    for error in (MemoryError("Unable to allocate 1 GiB"), RuntimeError("[enforce] DefaultCPUAllocator: no")):
        told = memory_refusal(error, ceiling, card=True)
        assert told.detail.startswith("out of memory")
        assert (told.where, reason(told)) == (HOST, "process memory over budget")
        assert told.needed > MIB  # this process
        assert told.allowed is None  # the supervisor knows
        assert _with_limit(Result(refusal=told), 1).refusal.allowed == 1.0
        assert memory_refusal(error, None, card=False).where == ""  # a CPU's
    pool = CudaCeiling(Cuda(shared=True), "cuda", Budget(memory_bytes=GIB), 0)
    for error in (MemoryError(), *typed):
        told = memory_refusal(error, pool, card=False)
        assert "one pool" in told.detail
        assert told.where == ""


def test_a_card_whose_tensors_hold_too_much_is_not_the_process_s_fault() -> None:
    """What the idle trainer keeps is over the budget: the first look says so, and of which memory."""
    cuda = Cuda()
    cuda.tensors = 2 * GIB
    ceiling = CudaCeiling(cuda, "cuda", Budget(gpu_memory_bytes=GIB), 0)
    with pytest.raises(GpuMemoryError) as raised:
        ceiling.hold()
    told = memory_refusal(raised.value, ceiling, card=True)
    assert (told.needed, told.allowed, told.where) == (2.0 * GIB, 1.0 * GIB, GPU)


@pytest.mark.parametrize(("card", "where"), [(True, HOST), (False, "")])
def test_a_trainer_killed_beside_a_card_was_short_of_the_process_memory(card: bool, where: str) -> None:
    over = Refusal("ceiling", 2.0, 1.0, "B", "killed")
    for refusal, expected in ((over, "ceiling"), (None, "memory")):
        ceiling = SimpleNamespace(stop=lambda: None, refusal=refusal, limit_bytes=1, peak_bytes=2)
        error = WorkerFailedError("ended", log=Path("log"), status=-signal.SIGKILL)
        ended = failed(error, ceiling, 10, card=card)
        assert (ended.result.refusal.reason, ended.result.refusal.where) == (expected, where)


def on_a_gpu(place: Path, **limits: int) -> LocalTrainer:
    settings = TrainerSettings("d1", store=str(place / "objects"), torch_device="cuda", budget=Budget(**limits))
    return LocalTrainer(settings, SimpleNamespace())


def test_a_round_beyond_the_ceiling_is_declined_and_the_trainer_lives(monkeypatch, tmp_path) -> None:
    """The limit stands before anything is loaded; torch's error becomes the refusal; the next round may be smaller."""
    cuda = Cuda()
    trainer = on_a_gpu(tmp_path, gpu_memory_bytes=6 * GIB)
    monkeypatch.setattr(trainer, "warm", DataFacts)
    made = []

    def ceiling_of(device: str, budget: Budget, base_bytes: int) -> CudaCeiling:
        made.append(CudaCeiling(cuda, device, budget, base_bytes))
        return made[-1]

    def too_much(request: object, note: object, **_: bool) -> Iterator[None]:
        assert cuda.fractions == [0.25]
        raise RuntimeError("CUDA out of memory. Tried to allocate 8.00 GiB")

    def trained(request: object, note: object, **_: bool) -> Generator[None, None, Result]:
        yield from ()
        return Result(observed=Observed(complete=False))

    monkeypatch.setattr(trainer_module, "gpu_ceiling", ceiling_of)
    monkeypatch.setattr(trainer_module, "give_back", lambda device: None)
    monkeypatch.setattr(trainer, "_train", too_much)
    result = trainer.train(TrainRequest(trainer.settings, Offer()), print)
    assert (result.refusal.reason, result.refusal.needed, result.refusal.allowed) == ("memory", None, 6.0 * GIB)
    monkeypatch.setattr(trainer, "_train", trained)
    assert trainer.train(TrainRequest(trainer.settings, Offer()), print) == Result(observed=Observed(complete=False))
    assert (len(made), trainer.ceiling) == (2, None)


def test_a_rehearsal_has_its_round_s_ceiling_and_gives_it_up(monkeypatch, tmp_path) -> None:
    cuda, rehearsed = Cuda(), []
    trainer = on_a_gpu(tmp_path, gpu_memory_bytes=6 * GIB)

    def too_much(offer: Offer) -> None:
        rehearsed.append(list(cuda.fractions))
        raise RuntimeError("CUDA out of memory. Tried to allocate 8.00 GiB")

    monkeypatch.setattr(trainer, "warm", DataFacts)
    monkeypatch.setattr(trainer, "_rehearse", too_much)
    monkeypatch.setattr(trainer_module, "_REHEARSED", set())
    monkeypatch.setattr(trainer_module, "gpu_ceiling", lambda *of: CudaCeiling(cuda, *of))
    monkeypatch.setattr(trainer_module, "give_back", lambda device: None)
    trainer.rehearse(Offer())
    assert (rehearsed, trainer.ceiling) == ([[0.25]], None)


def test_a_ceiling_that_takes_too_much_itself_is_declined_as_the_card_s(monkeypatch, tmp_path) -> None:
    trainer = on_a_gpu(tmp_path)
    trainer.facts = DataFacts(gpu_memory_bytes=24 * GIB)
    monkeypatch.setattr(trainer, "warm", lambda: trainer.facts)

    def full(device: str, budget: Budget, base_bytes: int) -> CudaCeiling:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(trainer_module, "gpu_ceiling", full)
    monkeypatch.setattr(trainer_module, "give_back", lambda device: None)
    refusal = trainer.train(TrainRequest(trainer.settings, Offer()), print).refusal
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.where) == ("memory", None, None, GPU)


def test_every_step_looks_at_the_pool_anew(monkeypatch, tmp_path) -> None:
    trainer = on_a_gpu(tmp_path)
    held = []
    trainer.ceiling = SimpleNamespace(hold=lambda: held.append(1))
    report = trainer._progress(lambda note: None)
    report(1, 1, 2, 0.5)
    report(1, 2, 2, 0.5)
    assert len(held) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_a_trainer_tells_what_it_found(monkeypatch, shared: bool) -> None:
    """Of a pool, what the idle trainer's allocator keeps is part of its size; free memory is a card's."""
    cuda = Cuda(others=2 * GIB, shared=shared)
    cuda.tensors, cuda.cached = 8 * GIB, GIB
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr("device_agent.trainer.local_trainer.idle_rss_bytes", lambda: GIB)
    data = SimpleNamespace(signature=dict, samples=dict, class_counts=tuple, label_names=(), skipped=())
    facts = trainer_module._facts(data, "cuda", elastic=False, alone=True)
    assert (facts.gpu, facts.torch_device, cuda.cached) == ("a GPU", "cuda", 0)
    told = (facts.base_bytes, facts.gpu_memory_bytes, facts.gpu_free_bytes)
    assert told == ((9 * GIB, 0, 0) if shared else (GIB, 24 * GIB, 22 * GIB))
    assert facts.gpu_idle_bytes == 8 * GIB


def test_a_hello_tells_what_the_trainer_found() -> None:
    """A card's own memory, and what is free of it; of a unified pool nothing, whatever the driver calls it."""
    machine = Capabilities(gpu="by the driver", gpu_memory_bytes=9)
    card = {"gpu": "a card", "gpu_memory_bytes": 24, "gpu_free_bytes": 20, "gpu_idle_bytes": 3}
    for facts, told in (
        (DataFacts(**card, torch_device="cuda"), (24, 20, 3)),
        (DataFacts(gpu="one pool", torch_device="cuda", gpu_idle_bytes=3), (0, 0, 3)),
        (DataFacts(torch_device="cpu"), (9, 0, 0)),
    ):
        state = initial(State(device="d", capabilities=machine), Saved(), facts)
        _, out = step(state, Connected(), 0.0)
        (hello,) = [one.message for one in out if isinstance(one, Send) and isinstance(one.message, Hello)]
        has = hello.capabilities
        assert (has.gpu_memory_bytes, has.gpu_free_bytes, has.gpu_idle_bytes) == told


def test_a_measured_profile_says_where_tensors_are() -> None:
    assert _gpu_memory("cpu") == {}
    assert _gpu_memory("cuda", Cuda()) == {"gpu_memory_bytes": 24 * GIB}
    assert _gpu_memory("cuda", Cuda(shared=True)) == {"unified": True}

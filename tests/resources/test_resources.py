"""Probes: each against a case whose answer is known, and what they say when there is nothing to measure."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from board_fixture import BOARDS, ina3221
from tree_fixture import tree

from edgefl.records import Capabilities, kind_of_machine
from edgefl.resources import hardware
from edgefl.resources.hardware import Memory, Nvml, NvmlError
from edgefl.resources.memory_probe import KEEP_MARK, MemoryProbe
from edgefl.resources.process_memory import (
    SLACK_BYTES,
    Ceiling,
    idle_rss_bytes,
    resident_bytes,
    started_at,
    status_bytes,
)
from edgefl.resources.sensors import CounterMeter, EnergyProbe, PowerMeter, temperature

MIB = 2**20


def no_gpu() -> Nvml:
    raise NvmlError("libnvidia-ml.so.1 is not installed")


class Gpu:
    """Stands in for libnvidia-ml: 12 W, an energy counter that moves by 3 J each time it is read."""

    def __init__(self, without: tuple[str, ...] = (), status: int = 0) -> None:
        self.without = without
        self.status = status
        self.millijoules = 1000

    def __getattr__(self, name: str):
        if name in self.without or not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *arguments: object) -> int:
        if name == "nvmlDeviceGetName":
            arguments[1].value = b"Test GPU"
        elif name == "nvmlDeviceGetMemoryInfo":
            ctypes.cast(arguments[1], ctypes.POINTER(Memory)).contents.total = 16 * 2**30
        elif name == "nvmlDeviceGetTotalEnergyConsumption":
            self.millijoules += 3000
            arguments[1]._obj.value = self.millijoules
        elif name == "nvmlDeviceGetPowerUsage":
            arguments[-1]._obj.value = 12_000
        return self.status


# Memory


def touch(size: int) -> None:
    np.ones(size, np.uint8).sum()


@pytest.mark.parametrize("clear_refs", ["/proc/self/clear_refs", "/proc/self/absent/clear_refs"])
def test_memory_freed_inside_the_probe_shows_up_and_does_not_linger(clear_refs):
    touch(MIB)  # numpy's own first-use allocations
    with MemoryProbe(clear_refs=Path(clear_refs)) as probe:
        touch(64 * 2**20)
        time.sleep(0.02)
    step = probe.figures()["step_peak_bytes"]
    if "absent" in clear_refs:
        assert "sampled" in step.source  # a thread may miss the peak, and says that it is one
        assert 0 <= step.value <= 64 * MIB * 1.05
    else:
        assert step.source == "VmHWM after clear_refs"
        assert step.value == pytest.approx(64 * MIB, rel=0.05)
    assert step.kind == "measured"
    with MemoryProbe(clear_refs=Path(clear_refs)) as second:
        time.sleep(0.02)
    assert second.figures()["step_peak_bytes"].value < 3 * MIB


def test_memory_kept_by_the_allocator_does_not_hide_what_the_work_takes():
    def fragments() -> list[bytes]:
        return [b"x" * (8192 - 64) for _ in range(4096)]

    blocks = fragments()
    pin = blocks[-1]  # at the top of the heap: what lies below stays with the allocator
    blocks.clear()
    with MemoryProbe() as probe:
        again = fragments()
    assert probe.figures()["step_peak_bytes"].value == pytest.approx(32 * MIB, rel=0.1)
    del pin, again


def test_the_sampling_thread_sees_memory_that_is_held(tmp_path):
    with MemoryProbe(clear_refs=tmp_path / "absent" / "file") as probe:
        block = np.ones(64 * MIB, np.uint8)
        time.sleep(0.03)
        del block
    assert probe.figures()["step_peak_bytes"].value == pytest.approx(64 * MIB, rel=0.05)


def test_the_step_is_measured_above_the_size_on_entering():
    base = idle_rss_bytes()
    held = np.ones(16 * MIB, np.uint8)
    with MemoryProbe() as probe:
        touch(16 * MIB)
    figures = probe.figures()
    assert figures["step_peak_bytes"].value == pytest.approx(16 * MIB, rel=0.1)
    assert figures["process_peak_bytes"].value == pytest.approx(base + 32 * MIB, rel=0.1)
    assert status_bytes("VmHWM") >= resident_bytes() - MIB
    assert set(figures) == {"process_peak_bytes", "step_peak_bytes"}  # of a GPU nothing
    del held


@pytest.mark.parametrize("integrated", [False, True])
def test_a_card_counts_alone_and_a_shared_pool_adds_up(monkeypatch, integrated):
    import torch

    for name, answer in {
        "get_device_properties": type("Properties", (), {"is_integrated": integrated})(),
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 5 * MIB,
        "max_memory_allocated": 105 * MIB,
        "max_memory_reserved": 128 * MIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with MemoryProbe("cuda:0") as probe:
        touch(32 * MIB)
    step, process = probe.figures()["step_peak_bytes"], probe.figures()["process_peak_bytes"]
    if integrated:
        assert step.value == pytest.approx(132 * MIB, rel=0.05)
        assert process.value > 160 * MIB
        assert "one pool" in step.source
    else:
        assert step.value == 100 * MIB
        assert process.source == "VmHWM after clear_refs"
    assert probe.figures()["cuda_reserved_peak_bytes"].value == 128 * MIB


def test_a_process_that_is_gone_has_no_memory():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) is None
    assert status_bytes("VmRSS", child.pid) is None
    assert started_at(child.pid) is None
    assert started_at(os.getpid()) > 0


# Ceiling

HUNGRY = """import sys, time
sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read(1)
block = b'1' * ({} << 20)
time.sleep({})
"""


GREEDY = """import sys
sys.stdout.write('x'); sys.stdout.flush()
for _ in range(2):
    sys.stdin.read(1)
    try:
        block = bytearray(256 << 20)
        print('granted', flush=True)
    except MemoryError:
        print('refused', flush=True)
"""


def hungry(mebibytes: int, seconds: float) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", HUNGRY.format(mebibytes, seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.read(1)
    return child


def feed(child: subprocess.Popen[bytes]) -> int:
    child.communicate(b"x", timeout=20)
    return child.returncode


def test_a_child_over_the_ceiling_is_killed_and_both_numbers_are_known():
    child = hungry(128, 20)
    with Ceiling(child.pid, 64 * MIB, refuse=False) as ceiling:
        assert feed(child) == -signal.SIGKILL
    assert ceiling.breached
    assert 64 * MIB < ceiling.peak_bytes < 160 * MIB
    refusal = ceiling.refusal
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.unit) == (
        "ceiling",
        ceiling.peak_bytes,
        64 * MIB,
        "B",
    )


def test_an_allocation_far_beyond_the_ceiling_is_refused_before_it_is_touched():
    """A jump of 256 MiB within one period would pass the watch; the child gets a MemoryError instead, and lives."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child.stdout.read(1)
    before = resource.prlimit(child.pid, resource.RLIMIT_DATA)
    with Ceiling(child.pid, 64 * 2**20) as ceiling:
        assert resource.prlimit(child.pid, resource.RLIMIT_DATA)[0] < 64 * MIB + SLACK_BYTES + 64 * MIB
        child.stdin.write("x")
        child.stdin.flush()
        assert child.stdout.readline() == "refused\n"
    assert not ceiling.breached
    assert ceiling.peak_bytes < 64 * MIB
    assert resource.prlimit(child.pid, resource.RLIMIT_DATA) == before
    out, _ = child.communicate("x", timeout=20)
    assert out == "granted\n"  # the ceiling is gone


def test_a_child_below_the_ceiling_lives_and_its_peak_is_remembered():
    child = hungry(32, 0.2)
    with Ceiling(child.pid, 256 * MIB) as ceiling:
        assert feed(child) == 0
    assert not ceiling.breached
    assert ceiling.refusal is None
    assert 32 * MIB < ceiling.peak_bytes < 64 * MIB


def test_a_pid_that_passed_on_to_another_process_is_left_alone(monkeypatch):
    child = hungry(1, 20)
    ceiling = Ceiling(child.pid, 1)
    monkeypatch.setattr(ceiling, "_born", 1)
    with ceiling:
        ceiling._thread.join(5)
    assert child.poll() is None
    assert not ceiling.breached
    child.kill()
    child.communicate()


def test_the_watching_thread_ends_with_the_process():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    with Ceiling(child.pid, 1) as ceiling:
        ceiling._thread.join(5)
        assert not ceiling._thread.is_alive()
    Ceiling(child.pid, 1).stop()  # never started: nothing to do


# Energy


def test_power_is_integrated_by_trapezoids_and_counters_by_differences():
    watts = iter([10.0, 20.0, 0.0])
    power = PowerMeter("test", lambda: next(watts))
    for now in (0.0, 2.0, 3.0):
        power.tick(now)
    assert power.joules == 2 * 15 + 1 * 10
    joules = iter([7.0, 9.5, 1.0])  # wraps at 10: 2.5, then 1.5
    counter = CounterMeter("test", [(lambda: next(joules), 10.0)])
    for now in (0.0, 1.0, 2.0):
        counter.tick(now)
    assert counter.joules == pytest.approx(4.0)


ORIN = BOARDS["Orin Nano, L4T 36"][0]


@pytest.mark.parametrize("board", BOARDS)
def test_each_jetson_reports_its_module_or_the_sum_of_its_rails(tmp_path, board):
    files, source, watts = BOARDS[board]
    clock = iter([100.0, 104.0])
    with EnergyProbe(sysfs=tree(tmp_path, files), period_s=60, clock=lambda: next(clock)) as probe:
        pass
    figure = probe.figure()
    assert figure.source == source
    assert figure.value == pytest.approx(4 * watts)


def test_a_rail_that_is_switched_off_is_not_summed(tmp_path):
    files = ina3221(3, ("VDD_GPU_SOC", 5000, 1000), ("VDD_CPU_CV", 5000, 2000))
    with EnergyProbe(sysfs=tree(tmp_path, files | {"class/hwmon/hwmon3/in2_enable": 0}), period_s=60) as probe:
        pass
    assert probe.figure().source == "ina3221: VDD_GPU_SOC (sum of rails, may be short)"


def test_a_sensor_that_stops_answering_gives_null_and_the_reason(tmp_path):
    sysfs = tree(tmp_path, ORIN)
    with EnergyProbe(sysfs=sysfs, period_s=60) as probe:
        (sysfs / "class/hwmon/hwmon1/curr1_input").unlink()
    figure = probe.figure()
    assert figure.value is None
    assert figure.reason.startswith("ina3221: VDD_IN (module) stopped answering")


def test_rapl_adds_packages_once_and_survives_the_wrap(tmp_path):
    zones = "class/powercap/intel-rapl"
    sysfs = tree(
        tmp_path,
        {
            f"{zones}:0/name": "package-0",
            f"{zones}:0/energy_uj": 9_000_000,
            f"{zones}:0/max_energy_range_uj": 10_000_000,
            f"{zones}:1/name": "package-1",
            f"{zones}:1/energy_uj": 1_000_000,
            f"{zones}:1/max_energy_range_uj": 10_000_000,
            f"{zones}:0:0/name": "package-0-core",
            f"{zones}:2/name": "psys",
        },
    )
    with EnergyProbe(sysfs=sysfs, period_s=60) as probe:
        tree(tmp_path, {f"{zones}:0/energy_uj": 500_000, f"{zones}:1/energy_uj": 3_000_000})
    figure = probe.figure()
    assert figure.source == "rapl: package-0 + package-1"
    assert figure.value == pytest.approx(1.5 + 2.0)


def test_a_rapl_counter_without_a_number_is_the_figures_reason(tmp_path):
    zone = "class/powercap/intel-rapl:0"
    sysfs = tree(tmp_path, {f"{zone}/name": "package-0", f"{zone}/energy_uj": "", f"{zone}/max_energy_range_uj": 1})
    with EnergyProbe(sysfs=sysfs, period_s=60) as probe:
        pass
    assert probe.figure().reason.startswith("rapl: package-0 stopped answering")


def test_the_gpu_counts_only_when_the_training_runs_on_it(tmp_path):
    with EnergyProbe("cuda:0", sysfs=tmp_path, nvml=lambda: Nvml(library=Gpu()), period_s=60) as probe:
        pass
    assert probe.figure().value == pytest.approx(3.0)
    assert "energy counter" in probe.figure().source
    older = Gpu(without=("nvmlDeviceGetTotalEnergyConsumption",))
    clock = iter([0.0, 2.0])
    with EnergyProbe("cuda", sysfs=tmp_path, nvml=lambda: Nvml(library=older), clock=lambda: next(clock)) as probe:
        pass
    assert probe.figure().value == pytest.approx(24.0)
    with EnergyProbe("cpu", sysfs=tmp_path, nvml=lambda: Nvml(library=Gpu())) as probe:
        pass
    assert probe.figure().value is None


def test_without_a_sensor_energy_is_null_and_says_where_was_looked(tmp_path):
    with EnergyProbe("cuda", sysfs=tmp_path, nvml=no_gpu) as probe:
        pass
    figure = probe.figure()
    assert figure.value is None
    for word in ("no energy sensor", "ina3221", "libnvidia-ml.so.1 is not installed", "rapl"):
        assert word in figure.reason


def test_no_probe_leaves_a_thread_behind(tmp_path):
    before = threading.active_count()
    with EnergyProbe(sysfs=tree(tmp_path, ORIN), period_s=0.001), MemoryProbe(clear_refs=tmp_path / "x" / "y"):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


# Temperature and machine


def test_the_hottest_processor_zone_counts_and_fixed_or_dead_sensors_do_not(tmp_path):
    zones = "class/thermal/thermal_zone"
    sysfs = tree(
        tmp_path,
        {
            f"{zones}0/type": "CPU-therm",
            f"{zones}0/temp": 41_500,
            f"{zones}1/type": "PMIC-Die",
            f"{zones}1/temp": 100_000,
            f"{zones}2/type": "cv0-thermal",
            f"{zones}2/temp": -256_000,
            f"{zones}3/type": "gpu-thermal",
            f"{zones}3/temp": "",
        },
    )
    figure = temperature(sysfs)
    assert (figure.value, figure.source) == (41.5, "thermal zone CPU-therm")
    tree(tmp_path, {"class/hwmon/hwmon1/name": "coretemp", "class/hwmon/hwmon1/temp1_input": 60_000})
    assert temperature(sysfs).source == "hwmon coretemp"


def test_without_a_sensor_the_temperature_is_null(tmp_path):
    figure = temperature(tmp_path)
    assert figure.value is None
    assert "no temperature sensor" in figure.reason


def test_capabilities_of_this_machine_are_plausible(tmp_path):
    found = hardware.capabilities(tmp_path)
    assert found.memory_total_bytes > found.memory_free_bytes > 0
    assert found.cores >= 1
    assert found.disk_free_bytes > 0
    assert found.machine == os.uname().machine


def test_the_gpu_is_named_by_the_device_tree_or_the_driver(tmp_path):
    assert hardware.graphics(tmp_path, no_gpu) == ("", 0)
    assert hardware.graphics(tmp_path, lambda: Nvml(library=Gpu())) == ("Test GPU", 16 * 2**30)
    tree(tmp_path, {"proc/device-tree/model": "Raspberry Pi 5"})
    assert hardware.graphics(tmp_path, no_gpu) == ("", 0)
    model = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    (tmp_path / "proc/device-tree/model").write_bytes(model.encode() + b"\0")
    assert hardware.graphics(tmp_path, no_gpu) == (model, 0)


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({}, ""),
        ({"var/lib/nvpmodel/status": "pmode:0002"}, "mode 2"),
        (
            {
                "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
                "etc/nvpmodel.conf": "< POWER_MODEL ID=20 NAME=X >\n< POWER_MODEL ID=2 NAME=MODE_30W >\nCPU_ONLINE 1",
            },
            "MODE_30W",
        ),
        ({"var/lib/nvpmodel/status": "?", "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >"}, ""),
    ],
)
def test_a_jetsons_power_mode_is_read_from_its_files(tmp_path, files, mode):
    assert hardware.power_mode(tree(tmp_path, files)) == mode


def test_machines_in_different_power_modes_are_of_different_kinds():
    orin = Capabilities(cores=6, gpu="NVIDIA Jetson Orin Nano", machine="aarch64", power_mode="7W")
    assert kind_of_machine(orin) == "aarch64, 6 cores, 7W, NVIDIA Jetson Orin Nano"
    assert kind_of_machine(orin) != kind_of_machine(msgspec.structs.replace(orin, power_mode="25W"))


def test_nvml_names_the_call_that_failed():
    with pytest.raises(NvmlError, match="nvmlInit_v2 failed with NVML status 9"):
        Nvml(library=Gpu(status=9))
    with pytest.raises(NvmlError, match="the driver has no nvmlDeviceGetPowerUsage"):
        Nvml(library=Gpu(without=("nvmlDeviceGetPowerUsage",))).power_w()


def test_probes_of_the_supervisor_load_neither_numpy_nor_torch():
    modules = ["hardware", "control_group", "sensors", "process_memory", "memory_probe", "gpu_memory"]
    program = "import sys\n" + "".join(f"import edgefl.resources.{name}\n" for name in modules)
    program += "assert not {'numpy', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


# FLOPs


@pytest.fixture
def torch():
    import torch as library

    library.set_num_threads(1)
    gc.collect()
    return library


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_linear_layer_counts_as_by_hand(torch, device):
    from edgefl.resources.tensor_counters import FlopCounter

    batch, width, out = 8, 16, 4
    layer = torch.nn.Linear(width, out, device=device)
    x = torch.ones(batch, width, device=device, requires_grad=True)
    with FlopCounter() as counter:
        y = layer(x)
        assert counter.flops == 2 * batch * width * out
        y.sum().backward()
    assert counter.flops == 3 * 2 * batch * width * out  # gradients of the input and of the weight, one product each


@pytest.mark.parametrize("masked", [False, True])
def test_attention_counts_the_same_in_the_fused_kernel_in_plain_products_and_on_meta(torch, masked):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from edgefl.resources.tensor_counters import FlopCounter

    def count(device: str, backend: SDPBackend | None = None) -> tuple[int, int]:
        q, k, v = (torch.ones(2, 3, n, 8, device=device, requires_grad=True) for n in (5, 7, 7))
        mask = torch.zeros(2, 1, 1, 7, device=device) if masked else None
        with FlopCounter() as counter:
            attend = torch.nn.functional.scaled_dot_product_attention
            if backend is None:
                out = attend(q, k, v, attn_mask=mask)
            else:
                with sdpa_kernel(backend):
                    out = attend(q, k, v, attn_mask=mask)
            forward = counter.flops
            out.sum().backward()
        return forward, counter.flops

    by_hand = 2 * (2 * 3 * 5 * 7 * 8) * 2
    assert count("cpu", SDPBackend.FLASH_ATTENTION) == (by_hand, 3 * by_hand)
    assert count("cpu", SDPBackend.MATH) == (by_hand, 3 * by_hand)
    assert count("meta") == (by_hand, 3 * by_hand)


def test_a_frozen_layer_costs_its_forward_pass_only(torch):
    from edgefl.resources.tensor_counters import FlopCounter

    frozen, trained = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)
    with FlopCounter() as counter:
        trained(frozen(torch.ones(2, 4))).sum().backward()
    once = 2 * 2 * 4 * 4
    assert counter.flops == once + 2 * once  # no gradient flows below the trained layer


def test_a_mark_that_others_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP_MARK, "1")
    block = np.ones(2**23)
    before = status_bytes("VmHWM")
    del block
    with MemoryProbe() as probe:
        pass
    assert status_bytes("VmHWM") > before - 2**20  # of 64 MiB; the kernel counts in batches of pages
    assert "sampled" in probe.figures()["step_peak_bytes"].source

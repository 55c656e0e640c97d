"""Memory in swap, which a Jetson keeps compressed in its own memory: it counts wherever a process is measured."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edgefl.resources import process_memory
from edgefl.resources.memory_probe import MemoryProbe
from edgefl.resources.process_memory import Ceiling, peak_bytes, resident_bytes, status_bytes

MIB = 2**20
#: Linux 5.4: give these pages to swap now.
_PAGE_OUT = 21
WAITS = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch):
    """Has the kernel's account of every process say that it holds so many bytes in swap."""
    genuine = process_memory._read

    def put(size: int) -> None:
        def read(pid: int | str, file: str) -> bytes:
            lines = genuine(pid, file).split(b"\n")
            return b"\n".join(
                b"VmSwap:\t%8d kB" % (size // 1024) if line.startswith(b"VmSwap:") else line for line in lines
            )

        monkeypatch.setattr(process_memory, "_read", read)

    return put


def test_memory_in_swap_counts_as_held(swapped) -> None:
    plain = resident_bytes()
    swapped(512 * MIB)
    assert resident_bytes() == pytest.approx(plain + 512 * MIB, abs=8 * MIB)
    assert peak_bytes() == status_bytes("VmHWM") + 512 * MIB


def test_a_process_in_swap_is_over_its_ceiling(swapped) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.read(1)
    with Ceiling(child.pid, 256 * MIB, refuse=False) as ceiling:
        time.sleep(0.1)
        assert child.poll() is None
        swapped(512 * MIB)
        child.wait(10)
        ceiling.stop()
    assert child.returncode == -signal.SIGKILL
    assert ceiling.refusal.needed > 512 * MIB
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize("clear_refs", ["/proc/self/clear_refs", "/proc/self/absent/clear_refs"])
def test_a_step_that_is_pushed_into_swap_is_measured(swapped, clear_refs: str) -> None:
    swapped(64 * MIB)  # what lay there before is no step's
    with MemoryProbe(clear_refs=Path(clear_refs)) as probe:
        swapped(256 * MIB)
        time.sleep(0.02)
    figures = probe.figures()
    assert figures["step_peak_bytes"].value == pytest.approx(192 * MIB, abs=8 * MIB)
    assert figures["process_peak_bytes"].value > 256 * MIB
    assert "VmSwap" in figures["step_peak_bytes"].source
    apart = clear_refs == "/proc/self/clear_refs"  # the mark is of one moment, what lies in swap of another
    assert {figure.kind for figure in figures.values()} == {"doubtful" if apart else "measured"}


def test_a_peak_is_measured_where_swap_stays_as_it_is(swapped) -> None:
    swapped(64 * MIB)
    with MemoryProbe() as probe:
        pass
    assert {figure.kind for figure in probe.figures().values()} == {"measured"}


@pytest.mark.skipif(psutil.swap_memory().free < 256 * MIB, reason="no swap here")
def test_pages_that_the_kernel_has_swapped_out_are_still_held() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"1" * 64 * MIB)
        block.madvise(_PAGE_OUT)
        assert status_bytes("VmSwap") > 32 * MIB
        assert resident_bytes() - before == pytest.approx(64 * MIB, rel=0.1)

"""A trainer's allocator gives freed memory back: seen from outside, on the kernel's own figures."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from edgefl.resources.process_memory import without_caches

#: Forty blocks, of which every second one is freed: holes in a heap stay resident, mappings go.
HOLES = """
import ctypes, sys
size = int(sys.argv[2]) << 10
if sys.argv[1] != "as it is":
    from edgefl.resources.process_memory import give_back_at_once
    assert give_back_at_once()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # by this, glibc raises the size from which it maps
blocks = [libc.malloc(size) for _ in range(40)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[::2]:
    libc.free(block)
fields = dict(line.split(":") for line in open("/proc/self/status"))
print(int(fields["VmHWM"].split()[0]) - int(fields["VmRSS"].split()[0]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize("size", [3072, 512, 300])
def test_freed_memory_leaves_the_process(size):
    """``size`` of each block in KiB, half of forty are freed."""
    given, kept = (
        int(subprocess.run([sys.executable, "-c", HOLES, set_up, str(size)], stdout=-1, text=True, check=True).stdout)
        for set_up in ("set up", "as it is")
    )
    assert given > 0.8 * 20 * size
    assert kept < given / 2


#: Messages of one chunk, one after the other: how many pages have to be zeroed for them.
CHUNKS = """
import ctypes, resource, sys
if sys.argv[1]:
    from edgefl.resources import process_memory
    assert getattr(process_memory, sys.argv[1])()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    block = libc.malloc(size)
    more = libc.malloc(size)
    ctypes.memset(block, 1, size)
    ctypes.memset(more, 1, size)
    libc.free(block)
    libc.free(more)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(("how", "size"), [("keep_for_chunks", 786_432), ("keep_for_parts", 7_000_000)])
def test_freed_memory_stays_for_the_next(how, size):
    kept, given = (
        int(subprocess.run([sys.executable, "-c", CHUNKS, set_up, str(size)], stdout=-1, text=True, check=True).stdout)
        for set_up in (how, "")
    )
    assert kept < 3 * 2 * size / 4096, "as many pages as the first two blocks have, and some"
    assert given > 10 * kept


#: Three neighbours of a size are freed: whether one block of all three's size takes their place.
JOINED = """
import ctypes, sys
size = int(sys.argv[1])
chunk = size + 8  # with its header, a multiple of 16
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
kept = [libc.malloc(3 * chunk - 8) for _ in range(1000)]  # no room for it is left elsewhere
blocks = [libc.malloc(size) for _ in range(1000)]
three = next(i for i in reversed(range(900)) if all(blocks[i + n] == blocks[i] + n * chunk for n in (1, 2, 3)))
for block in blocks[three : three + 3]:
    libc.free(block)
print(libc.malloc(3 * chunk - 8) == blocks[three])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize("set_before", ["", "glibc.malloc.tcache_count=7:glibc.malloc.mxfast=128"])
@pytest.mark.parametrize("size", [56, 200])  # of fast bins and the thread's cache, of the latter alone
def test_without_caches_freed_neighbours_are_joined(monkeypatch: pytest.MonkeyPatch, size: int, set_before: str):
    monkeypatch.setenv("GLIBC_TUNABLES", set_before)
    found = [
        subprocess.run([sys.executable, "-c", JOINED, str(size)], env=env, stdout=-1, text=True, check=True).stdout
        for env in ({**os.environ}, {**os.environ, **without_caches()})
    ]
    assert found == ["False\n", "True\n"]


def test_other_tunables_stay_beside_the_caches(monkeypatch: pytest.MonkeyPatch):
    ours = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert without_caches() == {"GLIBC_TUNABLES": ours}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert without_caches() == {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=2:{ours}"}

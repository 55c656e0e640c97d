"""A trainer's allocator gives freed memory back: seen from outside, on the kernel's own figures."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

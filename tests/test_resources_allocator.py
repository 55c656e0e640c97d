"""A trainer's allocator gives freed memory back: seen from outside, on the kernel's own figures."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Blocks of 3 MiB, of which every second one is freed: holes in a heap stay resident, mappings go.
HOLES = """
import ctypes, sys
if sys.argv[1] == "set up":
    from edgefl.resources.allocator import give_back_at_once
    assert give_back_at_once()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # by this, glibc raises the size from which it maps
size = 3 << 20
blocks = [libc.malloc(size) for _ in range(40)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[::2]:
    libc.free(block)
fields = dict(line.split(":") for line in open("/proc/self/status"))
print(int(fields["VmHWM"].split()[0]) - int(fields["VmRSS"].split()[0]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_leaves_the_process():
    given_back = {
        how: int(subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, text=True, check=True).stdout)
        for how in ("set up", "as it is")
    }
    assert given_back["set up"] > 50 * 1024  # KiB, of 60 MiB freed
    assert given_back["as it is"] < given_back["set up"] / 2

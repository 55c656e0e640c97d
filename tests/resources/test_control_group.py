"""Memory limits of control groups over file trees like the kernel's, and once over this kernel's own mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tree_fixture import tree

from edgefl.resources.control_group import within

MIB = 2**20
GROUPS = "sys/fs/cgroup"
UNIT = f"{GROUPS}/system.slice/edgefl-agent.service"
V1_NONE = 9223372036854771712


def v2(group: str, limit: object, used: int, **more: object) -> dict[str, object]:
    files = {"memory.max": limit, "memory.current": used * MIB}
    return {f"{group}/{name}": value for name, value in {**files, **more}.items()}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, (4096, 3000)),
        (v2(GROUPS, "max", 100), (4096, 3000)),
        (v2(GROUPS, 512 * MIB, 100), (512, 412)),
        (v2(GROUPS, 8192 * MIB, 7000), (4096, 1192)),  # the group's own use leaves less than the machine has
        (
            v2(GROUPS, 512 * MIB, 500, **{"memory.stat": f"anon 1\ninactive_file {450 * MIB}\nactive_file {MIB}"}),
            (512, 462),
        ),
        (v2(GROUPS, "max", 100, **{"memory.high": 256 * MIB}), (256, 156)),
        ({f"{GROUPS}/memory.max": 512 * MIB}, (512, 512)),
        (
            {f"{GROUPS}/memory/memory.limit_in_bytes": 512 * MIB, f"{GROUPS}/memory/memory.usage_in_bytes": 100 * MIB},
            (512, 412),
        ),
        (
            {
                f"{GROUPS}/memory/memory.limit_in_bytes": V1_NONE,
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/1f\n0::/",
                f"{GROUPS}/memory/docker/1f/memory.limit_in_bytes": 512 * MIB,
                f"{GROUPS}/memory/docker/1f/memory.usage_in_bytes": 500 * MIB,
                f"{GROUPS}/memory/docker/1f/memory.stat": f"inactive_file 7\ntotal_inactive_file {400 * MIB}",
            },
            (512, 412),
        ),
        ({"proc/self/cgroup": "0::/system.slice/edgefl-agent.service", **v2(UNIT, 512 * MIB, 100)}, (512, 412)),
        (  # of its slice
            {
                "proc/self/cgroup": "0::/system.slice/edgefl-agent.service",
                **v2(UNIT, "max", 100),
                **v2(f"{GROUPS}/system.slice", 1024 * MIB, 924),
            },
            (1024, 100),
        ),
        (  # the host's path in a container that sees its group as the root
            {"proc/self/cgroup": "0::/../../docker/1f", **v2(GROUPS, 512 * MIB, 100)},
            (512, 412),
        ),
        ({"proc/self/cgroup": "0::/a", **v2(f"{GROUPS}/unified/a", 512 * MIB, 100)}, (512, 412)),
        ({"proc/self/cgroup": "nothing", **v2(GROUPS, "?", 100)}, (4096, 3000)),
    ],
)
def test_every_limit_on_this_process_counts(tmp_path: Path, files: dict[str, object], left: tuple[int, int]) -> None:
    assert within(4096 * MIB, 3000 * MIB, tree(tmp_path, files)) == (left[0] * MIB, left[1] * MIB)


def limited(tmp_path: Path, script: str) -> str:
    """Answer of this process' capabilities in a private mount namespace that the script has prepared."""
    program = "from edgefl.resources.hardware import capabilities as c; c = c()\n"
    program += "print(c.memory_total_bytes >> 20, c.memory_free_bytes >> 20)"
    text = f"set -e; mount --make-rprivate /; mount -t tmpfs none /sys/fs/cgroup; cd /sys/fs/cgroup; {script}\n"
    command = ["unshare", "-m", "bash", "-c", f'{text} cd "$2"; exec "$0" -c "$1"', sys.executable, program, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
@pytest.mark.parametrize(
    "script",
    [
        "mkdir memory; echo 536870912 >memory/memory.limit_in_bytes; echo 104857600 >memory/memory.usage_in_bytes",
        (
            "g=system.slice/edgefl-agent.service; mkdir -p $g; echo 536870912 >$g/memory.max; "
            'echo 104857600 >$g/memory.current; echo 0::/$g >"$2/group"; mount --bind "$2/group" /proc/$$/cgroup'
        ),
    ],
)
def test_capabilities_keep_to_the_limit_in_a_mount_namespace(tmp_path: Path, script: str) -> None:
    assert limited(tmp_path, script) == "512 412"

"""Detection of this machine's GPU without torch; NVIDIA's wheels for Jetsons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from edgefl.resources.hardware import graphics

_SBSA = "https://pypi.jetson-ai-lab.io/sbsa/cu130"
#: L4T's major number -> (JetPack, NVIDIA's index of wheels for it). JetPack 5 (L4T 35) has Python 3.8, so none. 7.2 has
#: CUDA 13.2, which runs what is built for 13.0; that this index is for it, too: pollen-robotics/microduck_rl#39.
_JETPACKS = {
    36: ("6", "https://pypi.jetson-ai-lab.io/jp6/cu126"),
    38: ("7", _SBSA),
    39: ("7.2", _SBSA),
}
_OLDEST = min(_JETPACKS)
#: Linux of NVIDIA's own kernels -> L4T's major number. A container sees its host's kernel; 38 and 39 share an index.
_KERNELS = {"4.9": 32, "5.10": 35, "5.15": 36, "6.8": 38}
_ANY_TORCH = "https://pytorch.org/get-started/locally"
_PCI = ("vendor", "class")


class Board(NamedTuple):
    """The machine's GPU. ``cards``: True if NVIDIA's are on the bus, also without a driver; ``l4t``: major number."""

    gpu: str = ""
    cards: bool = False
    l4t: int = 0  # major number of a Jetson's release; 0: none, or not known
    jetson: bool = False  # one whose release is not known, as in a container

    @property
    def is_jetson(self) -> bool:
        """True if this machine is a Jetson."""
        return self.jetson or self.l4t > 0

    @property
    def any_gpu(self) -> bool:
        """True if the machine has a GPU for training."""
        return bool(self.gpu) or self.cards or self.is_jetson

    def source(self, package: str) -> str:
        """Text on the source of a build of ``package`` for this machine, with the command on Jetsons."""
        if not self.is_jetson:
            return _ANY_TORCH
        if not self.l4t:
            unknown = (
                "JetPack not known; `cat /etc/nv_tegra_release` on the host, not in a container, begins with its L4T"
            )
            known = ", ".join(f"L4T {l4t}: {index}" for l4t, (_, index) in _JETPACKS.items())
            return f"{unknown}: {from_index(package, 'INDEX')}, where INDEX is, for {known}"
        jetpack, index = _JETPACKS.get(self.l4t, ("", ""))
        if index:
            return f"JetPack {jetpack}: {from_index(package, index)}"
        if self.l4t < _OLDEST:
            return f"JetPack 6 or newer first: L4T {self.l4t} has too old a Python"
        newer = f"L4T {self.l4t} is newer than this release knows"
        return f"{newer}: {from_index(package, 'INDEX')}, where INDEX is NVIDIA's for its CUDA"


def from_index(package: str, index: str) -> str:
    """Command to install a Jetson's build of ``package`` over any other.

    No other index is asked: many a pip takes PyPI's build for any aarch64 before a Jetson's of the same version. What
    the package needs comes along with EdgeFL's extra.
    """
    return f"pip install --force-reinstall --no-deps --index-url {index} {package}"


def board(root: Path = Path("/")) -> Board:
    """This machine's GPU. ``root``: of the file system."""
    gpu, _ = graphics(root)
    cards = False
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = (_text(device / name) for name in _PCI)
        cards = cards or (vendor == "0x10de" and kind.startswith("0x03"))
    l4t = _release(root)
    tegra = "jetson" in gpu.lower() or _text(root / "sys/devices/soc0/family") == "Tegra" or _tegra_kernel(root)
    return Board(gpu, cards, l4t, jetson=not l4t and bool(tegra))


def _release(root: Path) -> int:
    """Major number of a Jetson's L4T release; 0 without one: in a container the file is empty or absent."""
    if release := re.match(r"# R(\d+)", _text(root / "etc/nv_tegra_release")):
        return int(release[1])
    packages = _text(root / "var/lib/dpkg/status")
    if release := re.search(r"^Package: nvidia-l4t-core\n(?:.+\n)*?Version: (\d+)\.", packages, re.MULTILINE):
        return int(release[1])
    return _KERNELS.get(_tegra_kernel(root), 0)


def _tegra_kernel(root: Path) -> str:
    """Version of a Jetson's kernel (Tegra), such as "5.15"; "" for any other kernel."""
    kernel = re.match(r"Linux version (\d+\.\d+)\.\S*-(?:tegra|l4t)", _text(root / "proc/version"))
    return kernel[1] if kernel else ""


def _text(file: Path) -> str:
    """Contents of a file; "" when it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""

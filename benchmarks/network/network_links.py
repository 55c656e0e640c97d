"""Bad links between network namespaces: delay, loss, reordering, duplicates, a rate, and cuts.

Each namespace is a machine of its own to the kernel, with its own TCP. A link joins two of them by a TUN device in
each; a thread carries the IP packets from one to the other and does to them what its ``Conditions`` say. So it needs
neither a kernel with `netem` nor anything installed but `ip`, the same seed draws the same packets, and every packet is
counted. It needs the right to make namespaces (root, in most places) and /dev/net/tun; ``unavailable`` says what is
missing.

A namespace has no name: it is there as long as a process or a ``Namespace`` is, and nothing is left behind by kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500
_LIBC = ctypes.CDLL(None, use_errno=True)


class Conditions(NamedTuple):
    """What a link does, each way. ``loss``, ``duplicate``: shares of packets; ``reorder``: the share that overtakes,
    since it is not delayed. ``rate``: bits a second, 0: none; a packet that would wait for it longer than ``queue_s``
    is lost.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    rate: int = 0
    queue_s: float = 1.0


CLEAN = Conditions()


class Counters(NamedTuple):
    """Of one way, since the link was made. ``offered``: what the sending machine's interface counts."""

    offered_packets: int = 0
    offered_bytes: int = 0
    lost_packets: int = 0
    lost_bytes: int = 0

    def since(self, before: Counters) -> Counters:
        """What has come to these."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def unavailable() -> str:
    """Why links cannot be made here; "" when they can."""
    if shutil.which("ip") is None:
        return "`ip` is not installed (apt install iproute2)"
    try:
        with Namespace() as one:
            os.close(_tun(one, "probe"))
    except OSError as error:
        return f"this account may not make network namespaces with TUN devices: {error}"
    return ""


class Namespace:
    """A network stack of its own, with nothing but loopback. Raises OSError."""

    def __init__(self) -> None:
        with _returning():
            _check(_LIBC.unshare(_CLONE_NEWNET))
            self._file = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            _ip("link", "set", "lo", "up")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread opens and starts (sockets, threads, processes) belongs to the namespace."""
        with _returning():
            _check(_LIBC.setns(self._file, _CLONE_NEWNET))
            yield

    def tcp(self) -> dict[str, int]:
        """The kernel's counters of TCP in it, such as RetransSegs."""
        with self.entered(), open("/proc/thread-self/net/snmp") as file:  # noqa: PTH123 - no file of a directory tree
            names, values = (line.split()[1:] for line in file if line.startswith("Tcp:"))
        return dict(zip(names, map(int, values), strict=True))

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


class _Way:
    """One direction of a link. Used by the link's thread alone, but for ``counters`` and the conditions."""

    def __init__(self, source: int, target: int, seed: int) -> None:
        self.source, self.target = source, target
        self.counters = Counters()
        self._draw = random.Random(seed)
        self._free_at = 0.0
        self._due: list[tuple[float, int, bytes]] = []
        self._number = 0

    def take(self, conditions: Conditions, up: bool, now: float) -> None:
        """A packet is ready to be read."""
        packet = os.read(self.source, _MTU + 100)
        lost = not up or self._draw.random() < conditions.loss
        if conditions.rate and not lost:
            lost = self._free_at - now > conditions.queue_s
        was, size = self.counters, len(packet)
        self.counters = Counters(
            was.offered_packets + 1,
            was.offered_bytes + size,
            was.lost_packets + lost,
            was.lost_bytes + size * lost,
        )
        if lost:
            return
        at = now
        if conditions.rate:
            at = self._free_at = max(self._free_at, now) + 8 * size / conditions.rate
        if self._draw.random() >= conditions.reorder:
            at += conditions.delay_s
        self._put(at, packet)
        if self._draw.random() < conditions.duplicate:
            self._put(at, packet)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next packet is due; None: there is none."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def give(self, up: bool, now: float) -> None:
        """Deliver what is due; a link that is cut delivers nothing."""
        while self._due and self._due[0][0] <= now:
            packet = heapq.heappop(self._due)[2]
            if up:
                with contextlib.suppress(OSError):  # the interface is down: that end is being closed
                    os.write(self.target, packet)

    def _put(self, at: float, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, packet))


class Link:
    """Joins two namespaces as 10.77.``number``.1 (``near``) and .2 (``far``).

    Set ``conditions`` and ``up`` at any time.
    """

    def __init__(self, near: Namespace, far: Namespace, number: int = 1, seed: int = 0) -> None:
        self.near_address, self.far_address = f"10.77.{number}.1", f"10.77.{number}.2"
        self.conditions, self.up = CLEAN, True
        name = f"link{number}"
        ends = [_tun(near, name), _tun(far, name)]
        for namespace, own, other in (
            (near, self.near_address, self.far_address),
            (far, self.far_address, self.near_address),
        ):
            with namespace.entered():
                _ip("addr", "add", own, "peer", other, "dev", name)
                _ip("link", "set", name, "mtu", str(_MTU), "up")
        self._ends = ends
        self._ways = (_Way(ends[1], ends[0], 2 * seed), _Way(ends[0], ends[1], 2 * seed + 1))
        self._wake = os.pipe()
        self._ended = False
        self._thread = threading.Thread(target=self._carry, name=name, daemon=True)
        self._thread.start()

    @property
    def to_near(self) -> Counters:
        """What the far end sent."""
        return self._ways[0].counters

    @property
    def to_far(self) -> Counters:
        """What the near end sent."""
        return self._ways[1].counters

    def close(self) -> None:
        """End the thread; both devices go."""
        self._ended = True
        os.write(self._wake[1], b"x")
        self._thread.join()
        for file in (*self._ends, *self._wake):
            os.close(file)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry(self) -> None:
        ways = {way.source: way for way in self._ways}
        while not self._ended:
            now = time.monotonic()
            waits = [wait for way in self._ways if (wait := way.wait_s(now)) is not None]
            ready, _, _ = select.select([*ways, self._wake[0]], [], [], min(waits, default=None))
            now = time.monotonic()
            for file in ready:
                if file in ways:
                    ways[file].take(self.conditions, self.up, now)
            for way in self._ways:
                way.give(self.up, now)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Bring this thread back to the namespace it was in."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _check(_LIBC.setns(own, _CLONE_NEWNET))
        os.close(own)


def _tun(namespace: Namespace, name: str) -> int:
    """A new TUN device in a namespace: each packet sent on it is one read of the descriptor, and the other way."""
    with namespace.entered():
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError:
            os.close(file)
            raise
    return file


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)  # noqa: PLW1510 - looked at below
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""Admission of uploads: a burst of them must not overrun the broker's queues or the coordinator."""

from __future__ import annotations

from collections import deque

#: 32 uploads x 16 chunks in flight are half of mosquitto's default queue of 1000 messages, beyond which it drops QoS 1
#: without a word (200 uploads at once lost two chunks of three when measured), and 48 MiB at 96 KiB. Few are enough to
#: fill a server's link: 32 devices at 10 Mbit/s bring 40 MB/s, and one on loopback 365 MB/s.
DEFAULT_UPLOADS = 32


class UploadAdmission:
    """Admits at most ``limit`` uploads at a time, the others in order of asking. Keys are devices (or uploads)."""

    def __init__(self, limit: int = DEFAULT_UPLOADS) -> None:
        if limit < 1:
            raise ValueError(f"{limit} uploads at a time: at least 1")
        self.limit = limit
        self.admitted: set[str] = set()
        self.waiting: deque[str] = deque()

    def request(self, key: str) -> list[str]:
        """Queue an upload; the uploads admitted by it. Asking again changes nothing."""
        if key not in self.admitted and key not in self.waiting:
            self.waiting.append(key)
        return self._admit()

    def release(self, key: str) -> list[str]:
        """The upload is complete, abandoned or no longer waits; the uploads admitted instead."""
        self.admitted.discard(key)
        if key in self.waiting:
            self.waiting.remove(key)
        return self._admit()

    def rotate(self, key: str) -> list[str]:
        """Move a stalled upload to the end of the queue if others wait; the uploads admitted instead."""
        if key not in self.admitted or not self.waiting:
            return []
        self.admitted.discard(key)
        self.waiting.append(key)
        return self._admit()

    def _admit(self) -> list[str]:
        news = []
        while self.waiting and len(self.admitted) < self.limit:
            news.append(self.waiting.popleft())
            self.admitted.add(news[-1])
        return news

"""Objects in the memory of a process that holds a whole fleet: equal ones of its devices and coordinator are one."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary


class Bytes:
    """An object's bytes, shared by the stores that hold them."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class Shared:
    """Objects by name, for as long as a store holds them; each has been checked."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Bytes] = WeakValueDictionary()
        self._turn = threading.Lock()  # the trainers' thread makes objects, the loop's receives them

    def known(self, name: str) -> Bytes | None:
        """The object, if a store holds it."""
        return self._known.get(name)

    def share(self, name: str, data: bytes) -> Bytes:
        """The object as others hold it, else of these bytes."""
        with self._turn:
            return self._known.setdefault(name, Bytes(data))

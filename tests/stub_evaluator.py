"""The coordinator's worker in a process of its own, but without torch; an evaluation lasts until its file is there.

Argument: a directory. Each evaluation writes its process' id to ``evaluating`` there, and waits while ``go`` is absent.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
from coordinator_fixture import FakeWorker

from coordinator.runtime.evaluator import METHODS, Request
from edgefl.process.worker import serve


def main() -> None:
    """Serve as FakeWorker answers."""
    place, fake = Path(sys.argv[1]), FakeWorker()

    def answer(method: str, body: object) -> object:
        if method == "evaluate":
            new = place / "evaluating.new"
            new.write_text(str(os.getpid()))
            new.rename(place / "evaluating")
            until = time.monotonic() + 10
            while not (place / "go").exists() and time.monotonic() < until:
                time.sleep(0.01)
        return msgspec.to_builtins(getattr(fake, method)(msgspec.convert(body, Request)))

    serve({m: lambda body, note, m=m: answer(m, body) for m in METHODS if hasattr(fake, m)})


if __name__ == "__main__":
    main()

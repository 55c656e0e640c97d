"""A worker for the tests of edgefl.process.worker: it answers, notes, prints, fails and hangs on request."""

from __future__ import annotations

import os
import sys
import time

from edgefl.errors import DataError
from edgefl.process.worker import serve


def echo(body, note):
    return body


def variable(body, note):
    return os.environ.get(body, "")


def count(body, note):
    for i in range(body):
        note({"i": i})
    return body


def fail(body, note):
    if body == "data":
        raise DataError("sample 3 is bad", remedy="Mend it.")
    raise KeyError(body)


def chat(body, note):
    print("a library says hello")  # noqa: T201 - what the test is about
    os.write(1, b"so does its C half\n")
    return {"answer": sys.stdin.read()}


def hang(body, note):
    note("hanging")
    time.sleep(60)


def leave(body, note):
    sys.exit(body)


if __name__ == "__main__":
    handlers = {
        "echo": echo,
        "variable": variable,
        "count": count,
        "fail": fail,
        "chat": chat,
        "hang": hang,
        "leave": leave,
    }
    pipe = os.dup(1)  # past ``serve``, as a library in C could write there
    handlers["babble"] = lambda body, note: os.write(pipe, bytes.fromhex(body))
    handlers["swell"] = lambda body, note: "x" * body
    serve({**handlers, "pid": lambda body, note: os.getpid(), "odd": lambda body, note: object()})

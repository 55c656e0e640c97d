"""A server's micro-batches: measured at the start unless a size is given, told in the metadata, used for answers."""

from __future__ import annotations

import inspect

import httpx
import pytest
from serve_fixture import bundles, running

from edgefl.cli.serve import command
from edgefl.export.runtime import ROWS
from edgefl.serve import catalogue as module
from edgefl.serve.catalogue import load_catalogue


def test_each_bundle_is_measured_where_no_size_is_given(monkeypatch: pytest.MonkeyPatch):
    sizes, seconds = iter((2, 4, 8, 16)), []

    def measured(bundle, allowed):
        seconds.append(allowed)
        return module.replace(bundle, rows=next(sizes))

    monkeypatch.setattr(module, "tuned", measured)
    found = load_catalogue(bundles(), threads=1, device="cpu", micro_batch=0)
    assert [one.rows for one in found.main.bundles.values()] == [2, 4, 8, 16]
    assert sum(seconds) == pytest.approx(module.TUNING_S)
    alone = found.models[f"{found.main.name}-acc"]
    assert alone.describe()["parameters"]["micro_batches"] == "acc=2"


@pytest.mark.parametrize("size", [3, ROWS])
def test_a_given_size_is_not_measured(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr(module, "tuned", lambda *_: pytest.fail("measured"))
    found = load_catalogue(bundles(), threads=1, device="cpu", micro_batch=size)
    assert {one.rows for one in found.main.bundles.values()} == {size}


def test_the_command_measures_unless_told():
    assert inspect.signature(command).parameters["micro_batch"].default == 0
    with running("--micro-batch", "5") as server:
        told = httpx.get(f"{server.url}/v2/models/demo-acc").json()
    assert told["parameters"]["micro_batches"] == "acc=5"

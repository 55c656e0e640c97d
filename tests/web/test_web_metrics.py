"""The run as metrics: as Prometheus' own parser, linter and server read them; and every query of the dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from identity_fixture import free_ports
from page_fixture import ELSEWHERE, HOSTILE, LOOPBACK, Page
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from coordinator.web import metrics as module
from coordinator.web.access import Access
from coordinator.web.app import Site
from coordinator.web.metrics import metrics
from edgefl.run_records import EventRow

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
#: Debian's package `prometheus`; EDGEFL_PROMETHEUS is the folder of its programs where they are not on the PATH.
WHERE = os.pathsep.join(filter(None, [os.environ.get("EDGEFL_PROMETHEUS", ""), os.environ["PATH"]]))
PROMETHEUS, PROMTOOL = (shutil.which(name, path=WHERE) for name in ("prometheus", "promtool"))
EVENTS = [
    EventRow(1.0, "run_started", data={"name": "x", "recipe": "lw", "stages": 2, "rounds_total": 3}),
    *(
        EventRow(2.0, "device_joined", 1, 1, name, {"samples": 3, "budget": {"step_memory_bytes": 1000}})
        for name in ("a", HOSTILE)
    ),
    EventRow(3.0, "round_started", 1, 1, data={"participants": ["a", HOSTILE]}),
    EventRow(
        4.0, "update", 1, 1, "a",
        {"loss": 0.5, "step_peak_bytes": 900, "flops": 7.0, "payload_up_bytes": 10, "payload_down_bytes": 20},
    ),
    EventRow(5.0, "device_left", 1, 1, HOSTILE),
    EventRow(6.0, "round_closed", 1, 1, data={"loss": 0.5, "participants": ["a"]}),
    EventRow(
        7.0, "evaluated", 1, 1,
        data={"values": [{"available": ["acc"], "missing": "none", "metric": "accuracy", "value": 0.75}]},
    ),
]  # fmt: skip


def scraped(page: Page, directory: Path) -> str:
    access = Access(LOOPBACK, control=False, announce=lambda _: None)
    app = Site(page.board, access, directory, None).app(metrics(lambda: page.board.latest))
    answer = TestClient(app, base_url="http://127.0.0.1:8480").get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for f in families for one in f.samples}


def test_the_samples_are_the_run_s_figures(tmp_path: Path) -> None:
    found = samples(scraped(Page(tmp_path, EVENTS), tmp_path))
    run, a, other = ("run", "r1"), ("device", "a"), ("device", HOSTILE)
    assert found["edgefl_device_step_memory_bytes", (a, ("kind", "measured"), run)] == 900
    assert found["edgefl_device_step_memory_bytes", (a, ("kind", "budget"), run)] == 1000
    assert found["edgefl_device_sent_bytes_total", (a, run)] == 10
    assert found["edgefl_device_received_bytes_total", (a, run)] == 20
    assert found["edgefl_device_operations_total", (a, run)] == 7
    assert (found["edgefl_device_online", (a, run)], found["edgefl_device_online", (other, run)]) == (1, 0)
    assert found["edgefl_run_devices", (("group", "away"), run)] == 1
    assert (found["edgefl_run_rounds_done_total", (run,)], found["edgefl_run_rounds_planned", (run,)]) == (1, 3)
    assert found["edgefl_run_training_loss", (run,)] == 0.5
    score = (("given", "acc"), ("mask", "none"), ("metric", "accuracy"), run)
    assert found["edgefl_run_test_score", score] == 0.75
    labels = {name for _, given in found for name, _ in given}
    assert labels == {"run", "name", "recipe", "group", "metric", "given", "mask", "device", "kind"}


def test_a_run_that_has_not_begun_has_metrics_too(tmp_path: Path) -> None:
    found = samples(scraped(Page(tmp_path), tmp_path))
    assert found["edgefl_run_ended", (("run", "r1"),)] == 0
    assert not {name for name, _ in found} & {"edgefl_run_stage", "edgefl_run_rounds_planned"}, "not known yet"


def test_what_is_not_measured_has_no_sample(tmp_path: Path) -> None:
    measured = EventRow(8.0, "update", 1, 1, "b", {"loss": 0.5, "energy_j": 0.0})
    found = samples(scraped(Page(tmp_path, [*EVENTS, measured]), tmp_path))
    having = {dict(labels)["device"] for name, labels in found if name == "edgefl_device_energy_joules_total"}
    assert having == {"b"}
    assert found["edgefl_device_energy_joules_total", (("device", "b"), ("run", "r1"))] == 0
    having = {dict(labels)["device"] for name, labels in found if name == "edgefl_device_operations_total"}
    assert having == {"a"}


def test_a_device_left_out_during_a_plan_counts_as_refused(tmp_path: Path) -> None:
    out = EventRow(8.0, "left_out", 2, 1, "a", {"by": "web"})
    planned = EventRow(9.0, "stage_planned", 2, data={"placements": [{"device": "a", "ok": True, "left_out": "web"}]})
    found = samples(scraped(Page(tmp_path, [*EVENTS, out, planned]), tmp_path))
    run = ("run", "r1")
    groups = {dict(labels)["group"]: value for (name, labels), value in found.items() if name == "edgefl_run_devices"}
    assert run in next(labels for name, labels in found if name == "edgefl_run_devices")
    assert (groups["refused"], groups["waiting"], groups["away"]) == (1, 0, 1)


def test_a_vast_fleet_has_a_bounded_number_of_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DEVICES", 5)
    many = [EventRow(2.0, "device_joined", device=f"d{n}", data={"samples": 1}) for n in range(50)]
    found = samples(scraped(Page(tmp_path, [EVENTS[0], *many]), tmp_path))
    assert len({dict(labels).get("device") for _, labels in found} - {None}) == 5
    assert sum(value for (name, _), value in found.items() if name == "edgefl_run_devices") == 50


def test_elsewhere_it_needs_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_WEB_TOKEN", "t" * 40)
    page = Page(tmp_path, EVENTS)
    app = Site(page.board, Access(ELSEWHERE, control=False, announce=lambda _: None), tmp_path, None)
    client = TestClient(app.app(metrics(lambda: page.board.latest)), base_url="http://127.0.0.1:8480")
    assert client.get("/metrics").status_code == 403
    assert client.get("/metrics", headers={"authorization": f"Bearer {'t' * 40}"}).status_code == 200


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")
def test_prometheus_own_linter_has_nothing_to_say(tmp_path: Path) -> None:
    text = scraped(Page(tmp_path, EVENTS), tmp_path)
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [query.replace("$run", ".*").replace("$device", ".*") for query in found]


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    names = {name for name, _ in samples(scraped(Page(tmp_path, EVENTS), tmp_path))}
    asked = {name for query in queries() for name in re.findall(r"edgefl_\w+", query)}
    assert asked - {"edgefl_device_last_heard_timestamp_seconds"} <= names
    board = json.loads(DASHBOARD.read_text())
    assert {"Fleet", "Step memory against budget", "Bytes", "Operations", "Accuracy", "Away devices"} <= {
        panel["title"] for panel in board["panels"]
    }
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def asked(port: int, query: str, start: float) -> list[Any]:
    words = urllib.parse.urlencode({"query": query, "start": start, "end": time.time(), "step": "0.1"})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{words}", timeout=10) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian's package) is not installed")
def test_every_query_of_the_dashboard_returns_a_series_of_a_real_run(tmp_path: Path) -> None:
    from fleet_fixture import RUN, Fleet, share, until

    from edgefl.process.parent_death import leashed

    page, port = free_ports(2)
    began = time.time()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\nscrape_configs:\n"
        f"- {{job_name: edgefl, static_configs: [{{targets: ['127.0.0.1:{page}']}}]}}\n"
    )
    command = [
        str(PROMETHEUS),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'db'}",
    ]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (tmp_path / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(leashed(command), stdout=log, stderr=log)
    try:
        with Fleet(tmp_path) as fleet:
            fleet.agent("whole", share(24, "acc", "gyro", seed=1), step_memory_bytes=10**9)
            (tmp_path / "r1.yaml").write_text(RUN)
            words = ["coordinator.cli", "run", "r1.yaml", "--run", "r1", "--set", "round.devices=1"]
            words += ["--set", "training.rounds=[2, 4]", "--set", "training.epochs=30", "--web-at", f"127.0.0.1:{page}"]
            program = fleet._coordinator(words)
            assert program.wait() == 0, program.story()
        until(lambda: asked(port, "edgefl_run_info", began), 30)
        empty = [query for query in queries() if not asked(port, query, began)]
    finally:
        server.terminate()
        server.wait(30)
    assert empty == []

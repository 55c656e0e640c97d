"""``edgefl data fetch``: the registry, the licence, the hash, the server, and the folder that appears whole."""

from __future__ import annotations

import functools
import gc
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_hapt import archive, raw_files

from edgefl.cli import main
from edgefl.config.profiles import profiles_folder, shipped
from edgefl.errors import ConfigError, DataError
from edgefl.fetch.fetching import CONVERTERS, fetch, source, with_hash


def edgefl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main([str(one) for one in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    return archive(tmp_path / "served" / "hapt.zip", raw_files())


@pytest.fixture
def server(zipped: Path) -> Iterator[str]:
    """Serves the folder of ``zipped``; its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

    handler = functools.partial(Quiet, directory=str(zipped.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", shipped("datasets"))
def test_every_entry_of_the_registry_is_whole_and_shipped(name: str) -> None:
    found = source(name)
    assert found.name == name
    assert found.converter in CONVERTERS
    assert found.url.startswith("https://")
    assert found.licence
    assert found.checksum_source
    assert set(found.runs) <= set(shipped("runs"))


def test_the_registry_has_one_entry() -> None:
    assert shipped("datasets") == ["har_hapt"]


@pytest.mark.parametrize("run", shipped("runs"))
def test_every_shipped_run_says_how_to_get_its_data(run: str) -> None:
    text = (profiles_folder() / "runs" / f"{run}.yaml").read_text(encoding="utf-8")
    (name, _), *_ = yaml.safe_load(text)["data"]["source"].items()
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert (f"edgefl data fetch {name}" in comment) == (name in shipped("datasets"))
    assert "Data:" in comment


def test_a_run_without_its_data_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    assert edgefl("data", "har") == DataError.exit_code
    told = capsys.readouterr().err
    assert "'har_hapt' is not here" in told
    assert "`edgefl data fetch har_hapt` brings it" in told


def test_an_unknown_name_lists_what_there_is(capsys) -> None:
    assert edgefl("data", "fetch", "har_hap") == DataError.exit_code
    assert "Did you mean 'har_hapt'? valid: har_hapt." in capsys.readouterr().err


def test_a_licence_that_is_not_accepted_stops_it(tmp_path: Path, zipped: Path, capsys) -> None:
    assert edgefl("data", "fetch", "har_hapt", "--from", zipped, "--into", tmp_path / "d") == DataError.exit_code
    told = " ".join(capsys.readouterr().err.split())
    assert "CC BY 4.0" in told
    assert "Any commercial use is prohibited" in told
    assert "--accept-licence" in told
    assert not (tmp_path / "d").exists()


def test_a_fetched_set_is_there_with_its_origin_and_stays(tmp_path: Path, zipped: Path, capsys) -> None:
    into = tmp_path / "d"
    words = ("data", "fetch", "har_hapt", "--from", zipped, "--into", into, "--accept-licence")
    assert edgefl(*words, "--sha256", sha(zipped)) == 0
    said = capsys.readouterr().out
    assert sha(zipped) in said
    assert f"export EDGEFL_DATA={into}" in said
    assert "Next: edgefl run har" in said
    assert sorted(path.name for path in (into / "har_hapt").iterdir()) == ["har_hapt.npz", "origin.json"]
    origin = json.loads((into / "har_hapt" / "origin.json").read_text())
    assert (origin["sha256"], origin["url"]) == (sha(zipped), str(zipped))
    assert "Any commercial use" in origin["licence"]
    assert not (into / ".fetch" / "har_hapt").exists()
    before = (into / "har_hapt" / "har_hapt.npz").stat().st_mtime_ns
    assert edgefl(*words, "--sha256", sha(zipped)) == 0
    assert "is there already" in capsys.readouterr().out
    assert (into / "har_hapt" / "har_hapt.npz").stat().st_mtime_ns == before


def test_an_archive_of_another_hash_is_refused(tmp_path: Path, zipped: Path) -> None:
    with pytest.raises(DataError, match="has the sha256") as caught:
        fetch(source("har_hapt"), tmp_path / "d", str(zipped))
    assert sha(zipped) in caught.value.message
    assert source("har_hapt").sha256 in caught.value.message
    with pytest.raises(DataError, match="is no sha256"):
        with_hash(source("har_hapt"), "abc")
    assert not (tmp_path / "d" / "har_hapt").exists()


def test_a_conversion_that_fails_publishes_nothing(tmp_path: Path) -> None:
    path = archive(tmp_path / "bad.zip", {**raw_files(), "labels.txt": "1 1 13 1 200\n"})
    with pytest.raises(DataError, match=r"labels\.txt"):
        fetch(with_hash(source("har_hapt"), sha(path)), tmp_path / "d", str(path))
    assert not (tmp_path / "d" / "har_hapt").exists()


def test_the_archive_comes_from_an_address(tmp_path: Path, zipped: Path, server: str) -> None:
    done = fetch(with_hash(source("har_hapt"), sha(zipped)), tmp_path / "d", f"{server}/hapt.zip")
    assert sorted(path.name for path in done.folder.iterdir()) == ["har_hapt.npz", "origin.json"]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["har_hapt"]


def test_a_download_of_another_hash_is_refused(tmp_path: Path, zipped: Path, server: str) -> None:
    with pytest.raises(DataError, match=r"hapt\.zip: ") as caught:
        fetch(source("har_hapt"), tmp_path / "d", f"{server}/hapt.zip")
    assert sha(zipped) in caught.value.message
    assert source("har_hapt").sha256 in caught.value.message
    assert "--sha256" in caught.value.remedy
    assert not [path for path in (tmp_path / "d").rglob("*") if path.is_file()]


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")  # pooch does not close a refused answer
@pytest.mark.parametrize(
    ("place", "reason"),
    [("SERVER/other.zip", "404"), ("http://127.0.0.1:1/h.zip", "Connection refused"), ("x://h/h.zip", "x://h/h.zip")],
)
def test_a_download_that_fails_says_why_and_what_to_do(tmp_path: Path, server: str, place: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        fetch(source("har_hapt"), tmp_path / "d", place.replace("SERVER", server))
    gc.collect()
    assert "--from FILE" in caught.value.remedy


def test_an_entry_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = yaml.safe_load((profiles_folder() / "datasets" / "har_hapt.yaml").read_text(encoding="utf-8"))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "har_hapt.yaml").write_text(yaml.safe_dump({**values, "url": "http://h/f", "sha256": "x"}))
    monkeypatch.setattr("edgefl.fetch.fetching.profiles_folder", lambda: tmp_path)
    with pytest.raises(ConfigError) as caught:
        source("har_hapt")
    assert {problem.path for problem in caught.value.problems} == {"url", "sha256"}

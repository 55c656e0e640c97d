"""``edgefl data fetch``: the registry, the licence, hashes that are not known, and the folder that appears whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from test_hapt import archive, raw_files

from edgefl.cli import main
from edgefl.config.profiles import profiles_folder, shipped
from edgefl.errors import ConfigError, DataError
from edgefl.fetch import fetching
from edgefl.fetch.fetching import CONVERTERS, FetchOptions, fetch
from edgefl.fetch.registry import source


def edgefl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main([str(one) for one in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    with archive(tmp_path / "hapt.zip", raw_files()) as opened:
        return opened.path


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def nothing(_done: int, _all: int) -> None:
    """No progress is shown."""


@pytest.mark.parametrize("name", shipped("datasets"))
def test_every_entry_of_the_registry_is_whole_and_shipped(name: str) -> None:
    found = source(name)
    assert found.name == name
    assert found.converter in CONVERTERS
    assert found.url.startswith("https://")
    assert found.licence
    assert found.checksum_source or found.sha256 is None
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
    options = FetchOptions(tmp_path / "d", str(zipped))
    with pytest.raises(DataError, match="has the sha256") as caught:
        fetch(source("har_hapt"), options, nothing)
    assert sha(zipped) in caught.value.message
    assert source("har_hapt").sha256 in caught.value.message
    with pytest.raises(DataError, match="is no sha256"):
        fetch(source("har_hapt"), options._replace(sha256="abc"), nothing)
    assert not (tmp_path / "d" / "har_hapt").exists()


def test_a_hash_that_is_not_known_is_asked_for_or_accepted(tmp_path: Path, zipped: Path) -> None:
    unknown = source("har_hapt").model_copy(update={"sha256": None})
    options = FetchOptions(tmp_path / "d", str(zipped))
    with pytest.raises(DataError, match="sha256 is not known") as caught:
        fetch(unknown, options, nothing)
    assert "--accept-first-seen" in caught.value.remedy
    done = fetch(unknown, options._replace(first_seen=True), nothing)
    assert (done.sha256, done.already) == (sha(zipped), False)


def test_an_archive_that_another_address_left_is_not_taken(
    tmp_path: Path, zipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with archive(tmp_path / "bad.zip", {**raw_files(), "labels.txt": "1 1 13 1 200\n"}) as opened:
        served = {"https://a.example/h.zip": opened.path, "https://b.example/h.zip": zipped}
    monkeypatch.setattr(
        fetching, "download", lambda wanted, target, _: target.write_bytes(served[wanted.url].read_bytes())
    )
    first, second = (FetchOptions(tmp_path / "d", url, first_seen=True) for url in served)
    with pytest.raises(DataError, match=r"labels\.txt"):
        fetch(source("har_hapt"), first, nothing)
    assert fetch(source("har_hapt"), second, nothing).sha256 == sha(zipped)
    origin = json.loads((tmp_path / "d" / "har_hapt" / "origin.json").read_text())
    assert (origin["url"], origin["sha256"]) == (second.place, sha(zipped))


def test_a_file_far_larger_than_the_archive_is_refused_unread(tmp_path: Path, zipped: Path) -> None:
    small = source("har_hapt").model_copy(update={"bytes": 10})
    with pytest.raises(DataError, match="more than the limit of 20, twice the known archive's"):
        fetch(small, FetchOptions(tmp_path / "d", str(zipped), sha(zipped)), nothing)


def test_a_conversion_that_fails_publishes_nothing(tmp_path: Path) -> None:
    with archive(tmp_path / "bad.zip", {**raw_files(), "labels.txt": "1 1 13 1 200\n"}) as opened:
        path = opened.path
    options = FetchOptions(tmp_path / "d", str(path), sha(path))
    with pytest.raises(DataError, match=r"labels\.txt"):
        fetch(source("har_hapt"), options, nothing)
    assert not (tmp_path / "d" / "har_hapt").exists()


def test_the_archive_comes_from_the_source_or_a_mirror(
    tmp_path: Path, zipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(wanted, target, _progress):
        asked.append(wanted)
        target.write_bytes(zipped.read_bytes())
        return wanted.sha256

    monkeypatch.setattr(fetching, "download", download)
    own = source("har_hapt").model_copy(update={"sha256": sha(zipped), "bytes": zipped.stat().st_size})
    assert fetch(own, FetchOptions(tmp_path / "d"), nothing).sha256 == sha(zipped)
    (wanted,) = asked
    assert (wanted.url, wanted.size, wanted.sha256) == (own.url, own.bytes, own.sha256)
    elsewhere = FetchOptions(tmp_path / "e", "https://mirror.example/h.zip", sha(zipped))
    assert fetch(own, elsewhere, nothing).sha256 == sha(zipped)
    assert asked[1].url == "https://mirror.example/h.zip"


def test_an_entry_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = yaml.safe_load((profiles_folder() / "datasets" / "har_hapt.yaml").read_text(encoding="utf-8"))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "har_hapt.yaml").write_text(yaml.safe_dump({**values, "url": "http://h/f", "sha256": "x"}))
    monkeypatch.setattr("edgefl.fetch.registry.profiles_folder", lambda: tmp_path)
    with pytest.raises(ConfigError) as caught:
        source("har_hapt")
    assert {problem.path for problem in caught.value.problems} == {"url", "sha256"}

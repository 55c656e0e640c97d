"""Copies of runs: taken in the middle, restored elsewhere, gone on with; damaged ones refused whole."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import a_plan
from ledger_fixture import POSTGRESQL, ledger_at, ledger_in, moved, new_database
from test_coordinator_runner import Scene, played
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.core.state import Assignment
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.tables import SnapshotRow
from coordinator.runtime import backup
from coordinator.runtime.backup import MANIFEST, back_up
from coordinator.runtime.restore import restore
from edgefl.aggregation.history import KEY, Memory
from edgefl.aggregation.pace import StageTrack
from edgefl.errors import StoreError
from edgefl.plan.job import Placement
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, Manifest, ObjectRef
from edgefl.run_records import BundleRow, EventRow
from edgefl.storage.disk import LEDGER, ledger_of, note_ledger
from edgefl.storage.objects import ObjectStore


def run_of(place: Path, do: Callable[[EventRow], None] = lambda _: None, *, resume: bool = False) -> Path:
    """A finished run of three rounds. ``do``: at each event, while the coordinator holds the run."""

    async def script(scene: Scene) -> None:
        scene.events = Told(do)
        await scene.device("a", add=1.0, samples=10)
        await scene.device("b", add=4.0, samples=20)
        await scene.coordinator(a_plan(), resume=resume)

    played(place, script)
    return place / "run"


class Told(list[EventRow]):
    def __init__(self, do: Callable[[EventRow], None]) -> None:
        super().__init__()
        self._do = do

    def append(self, row: EventRow) -> None:
        super().append(row)
        self._do(row)


def last_state(ledger: str | Path) -> Manifest:
    with Ledger(ledger, create=False) as opened:
        return opened.position("r1").manifest


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    directory = moved(run_of(tmp_path / "finished"), tmp_path / "finished" / "r1")
    (directory / "run.yaml").write_text(f"data: {{test: {directory}/shares/test.npz}}\n")
    (directory / "shares").mkdir()
    (directory / "shares" / "test.npz").write_bytes(b"samples")
    (directory / "bundles" / "acc+gyro").mkdir(parents=True)
    (directory / "bundles" / "acc+gyro" / "model.onnx").write_bytes(b"graph")
    (directory / "broker").mkdir()
    (directory / "broker" / "url").write_text("mqtt://user:secret@here")
    return directory


@pytest.mark.parametrize(
    ("kind", "stage", "number"),
    [("run_started", 0, 0), ("round_started", 1, 1), ("update", 2, 1), ("round_closed", 2, 1), ("evaluated", 2, 1)],
)
def test_a_copy_from_the_middle_ends_with_the_same_weights(tmp_path: Path, kind: str, stage: int, number: int) -> None:
    """To the bit, and without anything of what was done after the copy."""
    out, elsewhere = tmp_path / "copy.tar", tmp_path / "elsewhere"
    (tmp_path / "whole" / "run").mkdir(parents=True)
    (tmp_path / "whole" / "r1").symlink_to("run")  # in a database a run is found by its directory's name
    ledger_in(tmp_path / "whole" / "run")

    def copy(event: EventRow) -> None:
        if (event.kind, event.stage, event.round) == (kind, stage, number) and not out.exists():
            back_up([tmp_path / "whole" / "r1"], out)

    run_of(tmp_path / "whole", copy)
    restore(out, elsewhere)
    (elsewhere / "r1").rename(elsewhere / "run")
    if POSTGRESQL:
        shutil.copy(elsewhere / "run" / LEDGER, tmp_path / "copied.sqlite")
        restore(out, tmp_path / "again", str(ledger_at(elsewhere / "run" / LEDGER)))
    assert len(last_state(ledger_at(elsewhere / "run" / LEDGER))) > 0
    run_of(elsewhere, resume=True)
    here, there = last_state(ledger_of(tmp_path / "whole" / "run")), last_state(ledger_at(elsewhere / "run" / LEDGER))
    assert there == here
    store = ObjectStore(elsewhere / "run" / "objects")
    assert all(store.read(ref.id) for ref in there.values())


def test_a_copy_has_the_rows_and_the_files_and_no_secret(finished: Path, tmp_path: Path) -> None:
    with Ledger(ledger_of(finished)) as ledger:
        ledger.add_bundle("r1", BundleRow("acc+gyro", str(finished / "bundles" / "acc+gyro" / "model.onnx")))
        before = ledger.report("r1")
        rows = ledger.dump("r1")
    contents = back_up([finished], tmp_path / "copy.tar")
    assert contents.runs == {"r1": str(finished)}
    assert (tmp_path / "copy.tar").stat().st_mode & 0o777 == 0o600
    with tarfile.open(tmp_path / "copy.tar") as archive:  # a program of its own reads it
        names = archive.getnames()
    assert names[-1] == MANIFEST
    beside = {name.removeprefix("r1/") for name in names if "/objects/" not in name}
    files = {"run.yaml", "events.jsonl", "ledger.jsonl", "shares/test.npz", "bundles/acc+gyro/model.onnx"}
    assert beside == files | {MANIFEST}
    restore(tmp_path / "copy.tar", tmp_path / "new")
    now = tmp_path / "new" / "r1"
    assert (now.stat().st_mode & 0o777, sorted(path.name for path in now.iterdir())) == (
        0o700,
        ["bundles", "events.jsonl", LEDGER, "objects", "run.yaml", "shares"],
    )
    assert (now / "run.yaml").read_text() == f"data: {{test: {now}/shares/test.npz}}\n"
    with Ledger(now / LEDGER) as ledger:
        after = ledger.report("r1")
        of_others = [row for row in rows if row[0] not in {"runs", "snapshots", "bundles"}]
        assert [row for row in ledger.dump("r1") if row[0] not in {"runs", "snapshots", "bundles"}] == of_others
    (bundle,) = after.bundles
    assert bundle.path == str(now / "bundles" / "acc+gyro" / "model.onnx")
    same = msgspec.structs.replace(after, bundles=before.bundles)
    assert same == before
    assert {p.name: p.read_bytes() for p in (now / "objects").glob("?" * 64)} == {
        p.name: p.read_bytes() for p in (finished / "objects").glob("?" * 64)
    }


def test_a_copy_of_all_runs_goes_into_one_database(finished: Path, tmp_path: Path) -> None:
    url = new_database() if POSTGRESQL else f"sqlite:///{tmp_path / 'all.sqlite'}"
    back_up([finished], tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "new", url)
    assert ledger_of(tmp_path / "new" / "r1") == url
    assert last_state(url) == last_state(ledger_of(finished))
    with pytest.raises(StoreError, match=r"in the ledger .* already"):
        restore(tmp_path / "copy.tar", tmp_path / "other", url)
    assert not (tmp_path / "other").exists()
    with Ledger(url) as ledger:
        ledger.forget("r1")
        assert ledger.runs() == []
        ledger.forget("r1")  # again is nothing
    shutil.rmtree(tmp_path / "new")
    restore(tmp_path / "copy.tar", tmp_path / "new", url)


@pytest.mark.parametrize("at", ["before", "after"], ids=["before its rows are in", "after"])
def test_a_restore_into_a_database_that_was_cut_off_can_be_repeated(finished: Path, tmp_path: Path, at: str) -> None:
    """Killed beside the transaction: nothing half there looks whole, and what is whole stays."""
    url = new_database() if POSTGRESQL else f"sqlite:///{tmp_path / 'all.sqlite'}"
    back_up([finished], tmp_path / "copy.tar")
    killed = (
        "import os, signal, sys; from pathlib import Path; from coordinator.ledger.ledger import Ledger\n"
        "from coordinator.runtime.restore import restore\n"
        "real = Ledger.take_in\n"
        "def take_in(self, run, kept):\n"
        f"    if {at == 'after'}: real(self, run, kept)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Ledger.take_in = take_in\n"
        "restore(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])\n"
    )
    command = [sys.executable, "-c", killed, tmp_path / "copy.tar", tmp_path / "new", url]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    with Ledger(url) as ledger:
        assert [one.run for one in ledger.runs()] == (["r1"] if at == "after" else [])
    if at == "after":
        with pytest.raises(StoreError, match="is there already"):
            restore(tmp_path / "copy.tar", tmp_path / "new", url)
    else:
        restore(tmp_path / "copy.tar", tmp_path / "new", url)
    assert last_state(ledger_of(tmp_path / "new" / "r1")) == last_state(ledger_of(finished))
    assert (tmp_path / "new" / "r1" / "shares" / "test.npz").is_file()


def test_a_restored_run_counts_as_made_when_it_was_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So devices take its attempts, also those they have closed; by a clock that is behind, and from a copy's copy."""
    out = tmp_path / "first.tar"

    def copy(event: EventRow) -> None:
        if (event.kind, event.stage, event.round) == ("update", 2, 1) and not out.exists():
            back_up([run_of_r1], out)

    run_of_r1 = tmp_path / "whole" / "r1"
    (tmp_path / "whole" / "run").mkdir(parents=True)
    run_of_r1.symlink_to("run")
    ledger_in(tmp_path / "whole" / "run")
    run_of(tmp_path / "whole", copy)
    monkeypatch.setattr("coordinator.runtime.restore.time.time", lambda: 0.0)
    restore(out, tmp_path / "once")
    back_up([tmp_path / "once" / "r1"], tmp_path / "second.tar")
    restore(tmp_path / "second.tar", tmp_path / "twice")
    with Ledger(ledger_of(run_of_r1)) as ledger:
        made_ms = ledger.position("r1").made_ms
    with Ledger(ledger_of(tmp_path / "twice" / "r1")) as ledger:
        stands, kept = ledger.position("r1"), ledger.dump("r1")
    assert (stands.made_ms, stands.earlier_ms) == (made_ms + 2, (made_ms, made_ms + 1))
    (outline,) = [row.value for _, row in kept if getattr(row, "kind", "") == "outline"]
    assert outline["open"]["made_ms"] == made_ms + 2


def test_what_is_there_stays(finished: Path, tmp_path: Path) -> None:
    back_up([finished], tmp_path / "copy.tar")
    (tmp_path / "new" / "r1").mkdir(parents=True)
    with pytest.raises(StoreError, match="is there already"):
        restore(tmp_path / "copy.tar", tmp_path / "new")
    assert list((tmp_path / "new").rglob("*")) == [tmp_path / "new" / "r1"]


def test_a_copy_is_replaced_whole_or_not_at_all(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.tar"
    out.write_bytes(b"the copy of yesterday")
    (finished / "objects" / next(iter(last_state(ledger_of(finished)).values())).id).write_bytes(b"rotten")
    with pytest.raises(StoreError, match="is damaged"):
        back_up([finished], out)
    assert (out.read_bytes(), sorted(tmp_path.glob(".*"))) == (b"the copy of yesterday", [])
    for path in (finished / "objects").glob("?" * 64):
        path.unlink()
    with pytest.raises(StoreError, match=r"lacks .* objects"):
        back_up([finished], out)
    assert out.read_bytes() == b"the copy of yesterday"


def test_a_run_that_has_not_begun_is_passed_over_and_the_others_are_copied(finished: Path, tmp_path: Path) -> None:
    """Killed before its first event: a directory, and a ledger without the run, or one of other runs."""
    shared = f"sqlite:///{tmp_path / 'all.sqlite'}"
    back_up([finished], tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "runs", shared)
    for name, own in (("r2", False), ("r3", True)):
        directory = tmp_path / "runs" / name
        directory.mkdir()
        if own:
            Ledger(directory / LEDGER).close()
        else:
            note_ledger(directory, shared)
    told = CliRunner().invoke(
        app, ["backup", "--all", "--directory", str(tmp_path / "runs"), "--out", str(tmp_path / "all.tar")]
    )
    assert told.exit_code == 0, told.output
    for name in ("r2", "r3"):
        assert f"{name} has not begun" in told.output
    assert list(restore(tmp_path / "all.tar", tmp_path / "again").runs) == ["r1"]


def test_two_copies_into_one_file_at_a_time_leave_a_whole_one(finished: Path, tmp_path: Path) -> None:
    """And what lies under the name of a temporary file is not written through."""
    out, other = tmp_path / "copy.tar", tmp_path / "of-another"
    other.write_bytes(b"theirs")
    (tmp_path / ".copy.tar.new").symlink_to(other)

    def directories() -> Iterator[Path]:
        back_up([finished], out)  # while the first is being written
        yield finished

    back_up(directories(), out)
    assert list(restore(out, tmp_path / "new").runs) == ["r1"]
    assert other.read_bytes() == b"theirs"


@pytest.mark.parametrize("name", ["shares/\u00e4.npz", "bundles/a/b/c/d/e.onnx", f"shares/{'a' * 120}.npz"])
def test_a_file_that_a_copy_cannot_hold_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    (finished / name).parent.mkdir(parents=True, exist_ok=True)
    (finished / name).write_bytes(b"samples")
    (finished / "shares" / ".DS_Store").write_bytes(b"")
    with pytest.raises(StoreError, match=Path(name).name):
        back_up([finished], tmp_path / "copy.tar")


def test_of_two_runs_none_is_restored_where_one_is_in_the_database_already(finished: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'all.sqlite'}"
    back_up([finished], tmp_path / "copy.tar")
    restore(tmp_path / "copy.tar", tmp_path / "there", url)
    both = {
        f"{run}/{name.partition('/')[2]}": data
        for run in ("r0", "r1")
        for name, data in members_of(tmp_path / "copy.tar").items()
        if name != MANIFEST
    }
    files = {name: backup.Member(len(data), backup.hashlib.sha256(data).hexdigest()) for name, data in both.items()}
    manifest = backup.Contents(0.0, "", {"r0": "/x", "r1": "/x"}, files)
    (tmp_path / "both.tar").write_bytes(written({**both, MANIFEST: msgspec.json.encode(manifest)}))
    with pytest.raises(StoreError, match=r"'r1' is in the ledger .* already"):
        restore(tmp_path / "both.tar", tmp_path / "new", url)
    assert not (tmp_path / "new").exists()
    with Ledger(url) as ledger:
        assert [one.run for one in ledger.runs()] == ["r1"]


def test_updates_that_lie_in_packs_are_copied(tmp_path: Path) -> None:
    store, data = ObjectStore(tmp_path / "objects"), [b"an update", b"another"]
    refs = [store.append(one) for one in data]
    store.publish([])
    file = io.BytesIO()
    archive = backup._Archive(file)
    archive.add_objects("r1", store.root)
    assert sorted(archive.files) == sorted(f"r1/objects/{ref.id}" for ref in refs)
    assert all(one in file.getvalue() for one in data)


def test_the_best_state_of_a_stage_under_way_is_needed(finished: Path) -> None:
    """A run that goes on may end the stage with it; until then no row of the ledger names it."""
    best = {"task": ObjectRef("b" * 64, 1)}
    memory = msgspec.json.encode(Memory(stage=StageTrack(index=1, state=best)))
    kept = ObjectStore(finished / "objects").put(memory)
    with Ledger(ledger_of(finished), create=False) as ledger:
        rows = ledger.dump("r1")
    last = [row for name, row in rows if name == "rounds" and row.status == "done"][-1]
    last.manifest[KEY] = kept
    assert best["task"].id in backup._needed(rows, finished / "objects")


def test_a_late_update_that_will_count_is_needed(finished: Path) -> None:
    update = Update(device="a", attempt=Attempt("r1", 1, 1, 1), manifest={"task": ObjectRef("b" * 64, 1)})
    late = Assignment(Placement(device="a"), "done", update, attempt=update.attempt)
    with Ledger(ledger_of(finished), create=False) as ledger:
        rows = ledger.dump("r1")
    rows.append(("snapshots", SnapshotRow("taken", "1.1.1/a", msgspec.to_builtins(late))))
    assert "b" * 64 in backup._needed(rows, finished / "objects")


def test_objects_that_come_and_go_meanwhile_are_no_matter(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is deleted after it was listed, and one that is there only when the ledger has been read."""
    store, late = finished / "objects", next(iter(last_state(ledger_of(finished)).values())).id
    (store / late).rename(tmp_path / "late")
    gone = store / ("f" * 64)
    gone.write_bytes(b"")
    real, asked = backup._Archive.add_file, list[str]()

    def vanish(self: backup._Archive, name: str, path: Path) -> backup.Member | None:
        if "/objects/" in name:
            gone.unlink(missing_ok=True)
        asked.append(name)
        return real(self, name, path)

    def dump(self: Ledger, run: str) -> object:
        (tmp_path / "late").rename(store / late)
        return real_dump(self, run)

    real_dump = Ledger.dump
    monkeypatch.setattr(backup._Archive, "add_file", vanish)
    monkeypatch.setattr(Ledger, "dump", dump)
    files = back_up([finished], tmp_path / "copy.tar").files
    assert f"r1/objects/{late}" in files
    assert f"r1/objects/{gone.name}" in asked
    assert f"r1/objects/{gone.name}" not in files


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("copied")
    directory = moved(run_of(place), place / "r1")
    (directory / "run.yaml").write_text("name: tiny\n")
    back_up([directory], place / "copy.tar")
    return place / "copy.tar"


def members_of(copy: Path) -> dict[str, bytes]:
    with tarfile.open(copy) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]


Damage = Callable[[dict[str, bytes], Path], bytes]


def written(members: Mapping[str, bytes], *more: tarfile.TarInfo) -> bytes:
    """A tar of these, the manifest as it is."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for info in more:
            archive.addfile(info)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def of_kind(kind: bytes, name: str = "r1/run.yaml", link: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def renamed(members: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    return {new if name == old else name: data for name, data in members.items()}


def vast(info: tarfile.TarInfo) -> bytes:
    info.size = 2**62
    return info.tobuf(tarfile.GNU_FORMAT)


def object_in(members: dict[str, bytes]) -> str:
    return next(name for name in members if "/objects/" in name)


DAMAGES: dict[str, Damage] = {
    "cut off": lambda _, file: file.read_bytes()[:-4000],
    "cut in the middle": lambda _, file: file.read_bytes()[: file.stat().st_size // 2],
    "empty": lambda _m, _f: b"",
    "no tar": lambda _m, _f: b"hello" * 1000,
    "a bit of an object": lambda m, _: written({**m, (n := object_in(m)): bytes([m[n][0] ^ 1]) + m[n][1:]}),
    "an object is missing": lambda m, _: written({n: d for n, d in m.items() if n != object_in(m)}),
    "something more": lambda m, _: written({"r1/shares/more.npz": b"x", **m}),
    "twice": lambda m, _: written({}, tarfile.TarInfo("r1/run.yaml"), tarfile.TarInfo("r1/run.yaml")),
    "absolute": lambda m, _: written(renamed(m, "r1/run.yaml", "/tmp/run.yaml")),
    "above": lambda m, _: written(renamed(m, "r1/run.yaml", "../run.yaml")),
    "above inside": lambda m, _: written(renamed(m, "r1/run.yaml", "r1/bundles/../../../run.yaml")),
    "the lock": lambda m, _: written(renamed(m, "r1/run.yaml", "r1/lock")),
    "hidden": lambda m, _: written(renamed(m, "r1/run.yaml", "r1/shares/.ssh")),
    "link": lambda m, _: written(m, of_kind(tarfile.SYMTYPE)),
    "hard link": lambda m, _: written(m, of_kind(tarfile.LNKTYPE)),
    "device": lambda m, _: written(m, of_kind(tarfile.CHRTYPE)),
    "directory": lambda m, _: written(m, of_kind(tarfile.DIRTYPE, "r1/shares")),
    "sparse": lambda m, _: written(m, of_kind(tarfile.GNUTYPE_SPARSE)),
    "long name": lambda m, _: written(m, of_kind(tarfile.GNUTYPE_LONGNAME)),
    "extension": lambda m, _: written(m, of_kind(tarfile.XHDTYPE)),
    "vast": lambda _m, _f: vast(tarfile.TarInfo("r1/run.yaml")),
    "vast manifest": lambda _m, _f: vast(tarfile.TarInfo(MANIFEST)),
    "no manifest": lambda m, _: written({n: d for n, d in m.items() if n != MANIFEST}),
    "manifest is none": lambda m, _: written({**m, MANIFEST: b"[]"}),
    "of another form": lambda m, _: written({**m, MANIFEST: m[MANIFEST].replace(b'"form":1', b'"form":2')}),
    "no run": lambda m, _: written({MANIFEST: m[MANIFEST]}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_copy_is_refused_and_leaves_nothing(copied: Path, tmp_path: Path, damage: Damage) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(damage(members_of(copied), copied))
    with pytest.raises(StoreError) as refused:
        restore(bad, tmp_path / "new")
    assert refused.value.remedy
    assert not (tmp_path / "new").exists()


def test_the_same_members_written_by_another_program_are_a_copy(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "good.tar").write_bytes(written(members_of(copied)))
    assert list(restore(tmp_path / "good.tar", tmp_path / "new").runs) == ["r1"]


def rows_changed(members: dict[str, bytes], old: bytes, new: bytes) -> dict[str, bytes]:
    """The copy with another ledger, of which the manifest knows."""
    name = "r1/ledger.jsonl"
    data = members[name].replace(old, new)
    assert data != members[name]
    contents = msgspec.json.decode(members[MANIFEST], type=backup.Contents)
    files = {**contents.files, name: backup.Member(len(data), backup.hashlib.sha256(data).hexdigest())}
    manifest = msgspec.json.encode(msgspec.structs.replace(contents, files=files))
    return {**members, name: data, MANIFEST: manifest}


@pytest.mark.parametrize(
    ("old", "new"), [(b'["runs"', b'["alembic_version"'), (b'["devices",{', b'["devices",'), (b'"r1"', b"7")]
)
def test_rows_that_make_no_sense_are_refused(copied: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
    (tmp_path / "bad.tar").write_bytes(written(rows_changed(members_of(copied), old, new)))
    with pytest.raises(StoreError, match="row of the copy's ledger"):
        restore(tmp_path / "bad.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_commands(finished: Path, tmp_path: Path) -> None:
    runs, out = str(finished.parent), str(tmp_path / "copy.tar")
    told = CliRunner().invoke(app, ["backup", "--all", "--directory", runs, "--out", out])
    assert (told.exit_code, "r1: " in told.output) == (0, True)
    assert CliRunner().invoke(app, ["backup", "r1", "--directory", runs, "--out", out]).exit_code == 0
    assert (
        CliRunner().invoke(app, ["backup", "r2", "--directory", runs, "--out", out]).exit_code == StoreError.exit_code
    )
    assert CliRunner().invoke(app, ["backup", "--directory", runs]).exit_code == 2
    told = CliRunner().invoke(app, ["restore", out, "--into", str(tmp_path / "new")])
    assert (told.exit_code, told.stdout) == (0, f"{tmp_path / 'new' / 'r1'}\n")

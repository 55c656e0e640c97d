"""Options of ``edgefl serve`` as the server gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_fixture import bundles

import edgefl.serve.server
from edgefl.cli.main import main
from edgefl.cli.options import bundle_folder
from edgefl.process.listening import Place


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ([], Place("127.0.0.1", 8481, chosen=False)),
        (["--host", "127.0.0.1:8481"], Place("127.0.0.1", 8481)),  # asked for: taken is an error, no other port
        (["--host", ":9"], Place("127.0.0.1", 9)),
        (["--port", "9"], Place("127.0.0.1", 9)),
        (["--host", "127.0.0.2", "--port", "9"], Place("127.0.0.2", 9)),
    ],
)
def test_only_without_host_another_port_will_do(words: list[str], place: Place, monkeypatch: pytest.MonkeyPatch):
    found: list[Place] = []
    monkeypatch.setattr(edgefl.serve.server, "serve", lambda serving, place, announce: found.append(place))
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(bundles() / "acc"), *words])
    assert (ended.value.code, found) == (0, [place])


def test_a_runs_folder_stands_for_its_bundles(tmp_path: Path):
    (tmp_path / "run" / "bundles" / "a").mkdir(parents=True)
    (tmp_path / "run" / "bundles" / "a-int8").mkdir()
    assert bundle_folder(str(tmp_path / "run"), tmp_path) == tmp_path / "run" / "bundles"
    assert bundle_folder(str(tmp_path / "run" / "bundles"), tmp_path) == tmp_path / "run" / "bundles"

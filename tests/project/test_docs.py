"""The generated pages say what the code says, and their examples work."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edgefl.config.settings import DeviceProfile, RunConfig
from edgefl.config.slots import RecipeFile
from edgefl.config.yaml_files import Values
from edgefl.data.sources import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module("generate")
    for name in [name for name in sys.modules if name in {"generate", "pages"} or name.startswith("pages.")]:
        del sys.modules[name]


def test_the_pages_are_what_the_code_says(generate):
    for name, text in generate.pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"docs/{name} is out of date: run `make docs`"


def models(model: type[Values]):
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Values):
                yield from models(kind)


@pytest.mark.parametrize("top", [RunConfig, RecipeFile, DeviceProfile])
def test_every_field_and_every_group_of_fields_is_described(top):
    for model in models(top):
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_every_verb_and_every_option_has_a_line(generate):
    text = generate.pages()["commands.md"]
    for verb in ("edgefl run", "edgefl plan", "edgefl predict", "edgefl-agent run", "edgefl-coordinator run"):
        assert f"### {verb}\n" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_the_example_of_a_manifest_can_be_read(generate, tmp_path):
    example = importlib.import_module("pages.data").MANIFEST
    (tmp_path / "manifest.jsonl").write_text(example)
    data = load(tmp_path)
    assert data.samples() == {"": 3, "acc": 2, "gyro": 2, "&acc&gyro": 1}
    assert data.label_names == ("resting", "walking")
    assert data.groups.tolist() == ["anna", "anna", "ben"]


def test_the_example_of_an_npz_file_can_be_run_and_read(generate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(importlib.import_module("pages.data").NPZ, {})  # noqa: S102 - the page's own example
    data = load("share.npz")
    assert data.samples() == {"": 3, "acc": 2, "gyro": 3, "&acc&gyro": 2}
    assert data.label_names == ("walking", "resting")
    np.testing.assert_array_equal(data.labels, [0, 1, 0])


@pytest.mark.parametrize("page", ["docs/fuzzing.md", "SECURITY.md", "CONTRIBUTING.md"])
def test_every_test_that_a_page_names_is_there(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    tests = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
    files = set(re.findall(r"tests/[\w/]+\.py", text))
    names = set(re.findall(r"(?<![\w/…*])test_\w+(?![\w….*/])", text))
    assert files | names, "the page names no test: leave it out here"
    assert files <= tests.keys()
    assert [name for name in names if not any(f"def {name}(" in source for source in tests.values())] == []

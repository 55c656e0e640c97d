"""The public names: pinned, typed, and imported only when they are used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.api import needs
from edgefl.config.profiles import load_run
from edgefl.errors import ConfigError, MissingDependencyError, RunError

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "PROTOCOL_VERSION", "__version__",
    "run", "plan_run", "study", "load_report", "load_bundle", "encoder",
    "Run", "Plan", "Study", "Cell", "Report", "Bundle", "Prediction", "EventRow", "EdgeFLError",
}  # fmt: skip


def test_the_public_names_are_pinned_and_all_there() -> None:
    assert set(edgefl.__all__) == PUBLIC
    assert set(edgefl.__all__) <= set(dir(edgefl))
    for name in PUBLIC:
        assert getattr(edgefl, name) is not None
    for name in PUBLIC - {"PROTOCOL_VERSION", "__version__"}:
        assert inspect.getdoc(getattr(edgefl, name)), name


def test_importing_the_package_imports_nothing_else_of_it() -> None:
    program = "import sys; import edgefl; print(sorted(m for m in sys.modules if m.startswith(('edgefl.', 'msgspec'))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'edgefl' has no attribute 'launch'"):
        edgefl.launch  # noqa: B018 - the access is what is tried


def test_type_checkers_see_each_name_where_it_is_imported_from() -> None:
    """They read the stub, whose imports are the table by which names are found when a program runs."""
    tree = ast.parse((ROOT / "edgefl" / "__init__.pyi").read_text(encoding="utf-8"))
    typed = {
        name.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert typed == edgefl._PLACES
    (exported,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(exported) == edgefl.__all__


def test_fields_are_a_run_file_and_overrides_a_mapping(tmp_path: Path) -> None:
    fields = {
        "name": "mine",
        "data": {"source": tmp_path / "own"},
        "model": {"stages": 1, "encoders": {"acc": {"kind": "sensor"}}},
        "training": {"rounds": (2,)},
        "fleet": [{"name": "box"}],
    }
    config, recipe = load_run(fields, {"training.epochs": 3, "fleet.0.name": "crate", "data.partition": "natural"})
    assert (config.name, config.training.epochs, config.training.rounds) == ("mine", 3, [2])
    assert (config.fleet[0].name, config.data.source) == ("crate", str(tmp_path / "own"))
    assert recipe.name == "end_to_end"
    assert load_run("demo", {"training.epochs": 3}) == load_run("demo", ["training.epochs=3"])


def test_wrong_fields_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run({"name": "mine", "model": {"stages": 0}, "epochs": 3})
    assert str(caught.value).startswith("the run mine: ")
    assert {problem.path for problem in caught.value.problems} >= {"model.stages", "epochs"}
    with pytest.raises(ConfigError, match=r"training\.epochs: is a object; give texts, numbers, lists and mappings"):
        load_run("demo", {"training.epochs": object()})


def test_errors_reach_the_caller_with_their_remedies(tmp_path: Path) -> None:
    with pytest.raises(edgefl.EdgeFLError) as caught:
        edgefl.run("demmo", directory=tmp_path)
    assert "did you mean 'demo'" in caught.value.message
    with pytest.raises(RunError) as none:
        edgefl.load_report(directory=tmp_path / "none")
    assert "edgefl run" in none.value.remedy
    with pytest.raises(ConfigError, match="local mode needs at least one device"):
        edgefl.run("demo", overrides={"fleet": []}, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    @needs.explained("to_pandas")
    def without() -> None:
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    with pytest.raises(MissingDependencyError) as caught:
        without()
    assert "pip install 'edgefl-toolkit[pandas]'" in caught.value.remedy

    @needs.explained("to_pandas")
    def own_fault() -> None:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    with pytest.raises(ModuleNotFoundError, match="mine"):
        own_fault()

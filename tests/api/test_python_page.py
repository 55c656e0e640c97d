"""docs/python.md: its code fits the interface (here), and runs from top to bottom (nightly)."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl.config.profiles import shipped

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
#: Names of the page's results -> their classes.
RESULTS = {
    "run": edgefl.Run,
    "wine": edgefl.Run,
    "rates": edgefl.Study,
    "report": edgefl.Report,
    "bundle": edgefl.Bundle,
    "answer": edgefl.Prediction,
    "plan": edgefl.Plan,
    "study": edgefl.Study,
    "error": edgefl.EdgeFLError,
}


def calls(code: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


def owner(node: ast.expr) -> object:
    """The module or class that a name of the page stands for; None for others."""
    if not isinstance(node, ast.Name):
        return None
    return edgefl if node.id == "edgefl" else RESULTS.get(node.id)


def misfits(code: str) -> list[str]:
    """Attributes that do not exist, and calls that do not fit their function."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and (of := owner(node.value)) is not None:
            known = {*dir(of), *getattr(of, "__dataclass_fields__", {}), "message"}
            found += [] if node.attr in known else [f"{ast.unparse(node)} does not exist"]
    for call in calls(code):
        function = call.func
        if isinstance(function, ast.Attribute) and (of := owner(function.value)) is not None:
            method = getattr(of, function.attr, None)
            given = [None] * (len(call.args) + inspect.isclass(of))
            try:
                inspect.signature(method).bind(*given, **{str(k.arg): None for k in call.keywords})  # type: ignore[arg-type]
            except TypeError as error:
                found.append(f"{ast.unparse(call)}: {error}")
    return found


def test_misfits_are_found() -> None:
    assert misfits('edgefl.launch("demo")')
    assert misfits('edgefl.run("demo", epochs=3)')
    assert misfits("report.to_pandas('scores', 1, 2)")
    assert misfits("print(plan.fit)")
    assert not misfits('edgefl.run("demo", overrides={})')


def test_the_page_has_code_of_each_call() -> None:
    code = "".join(SNIPPETS)
    for name in ("run", "load_report", "load_bundle", "plan_run", "study"):
        assert f"edgefl.{name}(" in code


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_the_code_of_the_page_fits_the_interface(index: int) -> None:
    assert misfits(SNIPPETS[index]) == []


def test_the_recipes_of_the_page_are_shipped() -> None:
    named = re.findall(r'"recipe": \[(.*?)\]', "".join(SNIPPETS))
    assert named
    assert {name.strip('" ') for names in named for name in names.split(",")} <= set(shipped("recipes"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_code_of_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/python.md", "exec"), names)  # noqa: S102 - the page's own examples
    assert names["run"].accuracy > 0.5  # type: ignore[attr-defined]
    assert names["answer"].probabilities.shape == (3, 4)  # type: ignore[attr-defined]
    assert names["wine"].accuracy > 0.9  # type: ignore[attr-defined]
    assert [cell.error for cell in names["rates"].cells] == ["", ""]  # type: ignore[attr-defined]
    cells = names["study"].cells  # type: ignore[attr-defined]
    assert [cell.error for cell in cells] == [""] * 4


@pytest.mark.slow
def test_the_readmes_code_trains_on_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 5
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    activity = rng.integers(0, 2, 80)
    acc, gyro = (rng.normal(activity[:, None, None], 0.5, (80, 20, 3)).astype(np.float32) for _ in range(2))
    names: dict[str, Any] = {"acc": acc, "gyro": gyro, "activity": activity}
    exec(code, names)  # noqa: S102  # the README's own
    assert names["run"].accuracy > 0.9

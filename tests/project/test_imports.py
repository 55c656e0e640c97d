"""What importing costs: planning, configuration and protocol load no torch, and help is quick. Fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(",".join(name for name in sys.argv[2:] if name in sys.modules) or "-")
"""
HELP = """
import contextlib, io, sys
from {module} import main
sys.argv = [{program!r}, *{arguments!r}]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
    main()
assert any(word in out.getvalue() for word in ("Usage", "(protocol")), out.getvalue()
print(",".join(name for name in sys.argv[2:] + {heavy!r} if name in sys.modules) or "-")
"""
TORCH = ["torch", "transformers"]
HEAVY = [*TORCH, "numpy", "pydantic", "sqlalchemy", "matplotlib", "onnx", "onnxruntime", "safetensors", "amqtt"]


def loaded(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("edgefl.errors", [*HEAVY, "msgspec", "yaml"]),
        ("edgefl.records", [*HEAVY, "yaml"]),
        ("edgefl.process.worker", HEAVY),
        ("edgefl.config.profiles", TORCH),
        ("edgefl.plan.compile", TORCH),
        ("edgefl.budget.fit", HEAVY),
        ("edgefl.protocol.messages", HEAVY),
        ("edgefl.protocol.topics", HEAVY),
        ("edgefl.storage.objects", HEAVY),
        ("coordinator.runtime.runner", TORCH),
        ("coordinator.cli", TORCH),
    ],
)
def test_a_module_loads_no_more_than_it_needs(module, heavy):
    assert loaded(PROBE, module, *heavy) == "-"


@pytest.mark.parametrize(
    ("module", "program"),
    [("edgefl.cli.main", "edgefl"), ("device_agent.cli", "edgefl-agent"), ("coordinator.cli", "edgefl-coordinator")],
)
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_program_that_tells_of_itself_loads_nothing_heavy(module, program, option):
    probe = HELP.format(module=module, program=program, arguments=[option], heavy=HEAVY)
    assert loaded(probe) == "-"


@pytest.mark.parametrize(
    "verb", ["run", "plan", "runs", "report", "devices", "export", "data", "predict", "serve", "doctor"]
)
def test_help_of_a_verb_loads_nothing_heavy(verb):
    heavy = [name for name in HEAVY if name not in {"numpy", "pydantic"}]  # typer itself looks for pydantic
    probe = HELP.format(module="edgefl.cli.main", program="edgefl", arguments=[verb, "--help"], heavy=heavy)
    assert loaded(probe) == "-"

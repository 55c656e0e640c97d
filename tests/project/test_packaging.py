"""What is installed: the wheel's files and metadata, and that every command starts from the base install alone."""

from __future__ import annotations

import configparser
import email
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import edgefl
from edgefl.errors import EXTRAS, install_command

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edgefl", "device_agent", "coordinator")
BASE = {
    "paho-mqtt", "msgspec", "pyyaml", "psutil", "numpy", "safetensors", "pydantic", "typer", "rich",
    "cryptography", "pynacl", "xxhash",
}  # fmt: skip
MACHINES = [
    (platform, machine, f"3.{minor}")
    for platform, machine in (
        ("linux", "x86_64"),
        ("linux", "aarch64"),
        ("linux", "armv7l"),
        ("darwin", "arm64"),
        ("darwin", "x86_64"),
        ("win32", "AMD64"),
    )
    for minor in (10, 11, 12, 13)
]

#: As sitecustomize.py it hides the extras' packages from a program and from all that it starts.
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {sorted(EXTRAS)} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""
#: Runs commands in one process. argv[1]: [[program module, arguments], …].
#: Prints one JSON line: where edgefl came from, then [exit code, stdout, stderr] of each.
COMMANDS = """
import contextlib, importlib, io, json, sys
import edgefl
results = []
for module, arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(module).main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([edgefl.__file__, results]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"edgefl_toolkit-{edgefl.__version__}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    (folder / "sitecustomize.py").write_text(HIDE)
    return folder


def base_only(unpacked: Path, folder: Path, commands: list[tuple[str, list[str]]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each (module, arguments), as after the base install, without any extra."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGEFL_")}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(unpacked), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, results = json.loads(done.stdout)
    assert Path(where).is_relative_to(unpacked)
    return [(code, out, err) for code, out, err in results]


def for_extra(requirements: list[Requirement], extra: str, **machine: str) -> set[str]:
    """Names that ``edgefl-toolkit[extra]`` brings beyond the base."""
    return {
        canonicalize_name(found.name)
        for found in requirements
        if found.marker and found.marker.evaluate({**machine, "extra": extra})
    }


def test_the_wheel_holds_the_packages_with_their_data_and_the_profiles_and_nothing_else(wheel):
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()]
    expected = {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}
    expected |= {f"edgefl/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "profiles").rglob("*.yaml")}
    assert there == expected


@pytest.mark.parametrize(
    "file",
    [
        *(f"{package}/py.typed" for package in PACKAGES),
        "edgefl/profiles/runs/demo.yaml",
        "edgefl/profiles/recipes/lw-fedmml.yaml",
        "edgefl/profiles/devices/cpu.yaml",
        "edgefl/report/templates/base.html.j2",
        "edgefl/report/templates/brief.html.j2",
        "edgefl/report/templates/report.html.j2",
        "edgefl/report/templates/tables.html.j2",
        "edgefl/report/templates/style.css",
        "coordinator/web/static/htmx.min.js",
        "coordinator/web/templates/page.html.j2",
    ],
)
def test_files_that_programs_look_for_are_in_the_wheel(wheel, file):
    assert file in wheel.namelist()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_ignores_nothing_that_ships():
    folders = [*PACKAGES, "profiles", "tests", "docs", "benchmarks"]
    files = [str(f.relative_to(ROOT)) for name in folders for f in (ROOT / name).rglob("*") if f.is_file()]
    shipped = "\n".join(file for file in files if "__pycache__" not in file and "/." not in file)
    found = subprocess.run(["git", "check-ignore", "--stdin"], cwd=ROOT, input=shipped, capture_output=True, text=True)
    assert found.returncode == 1, f"a clone would lack these, see .gitignore: {found.stdout}"  # 1: none is ignored


def test_metadata_says_what_is_promised(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("edgefl-toolkit", edgefl.__version__)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {
        "train", "coordinator", "export", "profile", "completion", "minilm", "demo", "all", "dev", "mutants",
        "postgresql", "web", "parquet", "pandas", "fetch", "tensorboard", "mlflow", "serve", "gpu", "docs", "ray",
            "data", "reference", "sound",
    }  # fmt: skip


def test_nothing_tells_people_to_install_the_stranger_of_the_same_name():
    """On the package index ``edgefl`` is another project's."""
    kinds = {".md", ".py", ".toml", ".yaml", ".j2", ".html", ""}
    folders = [*PACKAGES, "profiles", "docs", "benchmarks", ".ci"]
    files = [f for f in ROOT.iterdir() if f.is_file()] + [f for name in folders for f in (ROOT / name).rglob("*")]
    texts = [f for f in files if f.is_file() and f.suffix in kinds and "__pycache__" not in f.parts]
    assert len(texts) > 300
    stranger = re.compile(r"""pip[^\n]* install [^\n#]*?(?<![\w./@-])edgefl(?=[\[\s'"`=<>~!]|$)""", re.MULTILINE)
    assert stranger.search("pip install 'edgefl[train]'")
    assert stranger.search("python -m pip install -U torch edgefl")
    assert not stranger.search("pip install 'edgefl-toolkit[train]'")
    assert {str(f.relative_to(ROOT)) for f in texts if stranger.search(f.read_text(errors="replace"))} == set()


def test_a_remedy_works_in_the_environment_it_was_shown_in_and_fetches_no_stranger():
    """pip takes the installed distribution: what is here already is all that the extra needs, without any index."""
    command = shlex.split(install_command("train"))
    done = subprocess.run([*command, "--no-index", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


def test_the_base_is_light(requirements):
    assert {canonicalize_name(found.name) for found in requirements if not found.marker} == BASE


@pytest.mark.parametrize(("platform", "machine", "python"), MACHINES)
def test_exactly_one_onnxruntime_everywhere(requirements, platform, machine, python):
    told = {"sys_platform": platform, "platform_machine": machine, "python_version": python}
    both = {"onnxruntime", "onnxruntime-gpu"}
    for extra, one in (("export", "onnxruntime"), ("serve", "onnxruntime"), ("gpu", "onnxruntime-gpu")):
        assert for_extra(requirements, extra, **told) & both == {one}
    for extra in ("demo", "all", "dev"):
        assert for_extra(requirements, extra, **told) & both == {"onnxruntime"}


def test_gpu_brings_what_export_and_serve_do_with_the_other_runtime(requirements):
    without = for_extra(requirements, "export") | for_extra(requirements, "serve")
    assert for_extra(requirements, "gpu") == without - {"onnxruntime"} | {"onnxruntime-gpu"}
    assert not for_extra(requirements, "serve") & {"torch", "transformers", "onnx", "sqlalchemy"}


def test_torch_has_one_bound_here_and_in_the_makefile(requirements):
    bounds = {str(found.specifier) for found in requirements if found.name == "torch"}
    (here,) = bounds
    (makefile,) = re.findall(r"^TORCH := 'torch(.*)'$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(here.split(",")) == set(makefile.split(","))


@pytest.mark.parametrize(("package", "extra"), sorted(set(EXTRAS.values())))
def test_the_extra_an_error_names_brings_the_package(requirements, package, extra):
    names = for_extra(requirements, extra, sys_platform="linux", platform_machine="aarch64")
    assert canonicalize_name(package) in names


def test_demo_and_all_bring_what_they_join(requirements):
    joined = set().union(
        *(
            for_extra(requirements, extra)
            for extra in ("train", "coordinator", "web", "export", "serve", "data", "reference")
        )
    )
    assert for_extra(requirements, "demo") == joined | {"sktime"}
    assert for_extra(requirements, "all") == joined | {"sktime", "fvcore"}
    assert for_extra(requirements, "dev") >= for_extra(requirements, "all")


def test_console_scripts_resolve(wheel):
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"edgefl_toolkit-{edgefl.__version__}.dist-info/entry_points.txt").decode())
    assert scripts.sections() == ["console_scripts"]
    entries = dict(scripts["console_scripts"])
    assert set(entries) == {"edgefl", "edgefl-agent", "edgefl-coordinator"}
    for target in entries.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_every_command_starts_from_the_base_install(unpacked, tmp_path):
    from edgefl.cli.main import VERBS

    commands = [("edgefl.cli.main", [verb, "--help"]) for verb in VERBS]
    commands += [("edgefl.cli.main", arguments) for arguments in (["--help"], ["runs"])]
    commands += [(program, ["--version"]) for program in ("edgefl.cli.main", "device_agent.cli", "coordinator.cli")]
    commands += [("device_agent.cli", [*verb, "--help"]) for verb in ([], ["run"], ["doctor"])]
    commands += [("coordinator.cli", [*verb, "--help"]) for verb in ([], ["run"])]
    for command, (code, out, err) in zip(commands, base_only(unpacked, tmp_path, commands), strict=True):
        assert (code, err) == (0, ""), command
        assert out.strip(), command


def test_a_command_that_needs_an_extra_names_it(unpacked, tmp_path):
    samples = tmp_path / "samples" / "manifest.jsonl"
    samples.parent.mkdir()
    sensors = {"acc": [[0.0, 0.0, 1.0]] * 4, "gyro": [[0.0, 0.0, 0.0]] * 4}
    samples.write_text("".join(json.dumps({**sensors, "label": label}) + "\n" for label in "ab" * 40))
    commands = {
        "train": ("edgefl.cli.main", ["plan", "demo", "--device", "cpu", "--set", f"data.source={samples.parent}"]),
        "demo": ("edgefl.cli.main", ["data", "demo"]),
        "coordinator": ("coordinator.cli", ["run", "demo"]),
        "serve": ("edgefl.cli.main", ["serve", "bundles"]),
    }
    for extra, (code, _, err) in zip(commands, base_only(unpacked, tmp_path, list(commands.values())), strict=True):
        assert code == 19
        assert f"pip install 'edgefl-toolkit[{extra}]'" in err
        assert "Traceback" not in err


def test_doctor_says_what_the_base_install_lacks(unpacked, tmp_path):
    ((code, out, _),) = base_only(unpacked, tmp_path, [("edgefl.cli.main", ["doctor"])])
    assert code == 1
    assert "edgefl-toolkit[train]" in out

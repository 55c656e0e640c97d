"""A pytest session that tries mutants: the tests are collected once, and each mutant runs in a fork of that process.

A mutant meets the tests that execute a statement it changes, fastest first, until one fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mutation.mutants import FOLDERS, Mutant

#: Seconds of the processor: a mutant has those of its tests, measured without mutants, this often, and so much more.
CPU_FACTOR, CPU_MORE = 5, 10
#: Seconds of the clock, for one that waits for what never comes: many, since the machine may be busy.
WALL_FACTOR, WALL_MORE = 10, 180
#: What a mutant may take beyond what the process has: it may ask for anything.
MORE_MEMORY_BYTES = 3 << 30
STATS = Path("mutants/tests.json")


@dataclasses.dataclass
class Timed:
    """A test without mutants."""

    cpu: float
    wall: float
    ok: bool
    module: str  # hash of its file
    lines: dict[str, list[int]]  # by file: what it and its fixtures execute
    loaded: list[str]  # modules that its file's tests needed


class Session:
    """Plugin: replaces the loop over the tests."""

    def __init__(
        self, mutants: list[Mutant], children: int, until: float, tell: Callable[[Mutant, str, str], None]
    ) -> None:
        self.mutants, self.children, self.until, self.tell = mutants, children, until, tell
        self.failed = ""  # the test that failed, in a child
        self.killers: set[str] = set()
        self.unsound: list[str] = []  # failed without a mutant
        self.wavering: list[str] = []  # killed a mutant, and failed without one afterwards

    def pytest_configure(self) -> None:
        """That there is a failing example is enough: it need not be the smallest, and none is kept."""
        from hypothesis import Phase, settings  # pytest rewrites it when it loads it

        kept = settings.get_profile("edgefl")
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", kept, phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a failure."""
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then try the mutants."""
        items = {item.nodeid: item for item in session.items}
        timed = measured(self, items, self.children)
        for name in sorted({name for each in timed.values() for name in each.loaded}):
            with contextlib.suppress(Exception):
                importlib.import_module(name)  # once here, not in each fork
        self.unsound = [test for test, each in timed.items() if not each.ok]
        by_line: dict[tuple[str, int], list[str]] = {}
        for test, each in timed.items():
            if each.ok:
                for path, lines in each.lines.items():
                    for line in lines:
                        by_line.setdefault((path, line), []).append(test)

        run(self.jobs(items, timed, by_line), self.children)
        run(self.again(items, timed), self.children)
        return True

    def jobs(
        self, items: dict[str, pytest.Item], timed: dict[str, Timed], by_line: dict[tuple[str, int], list[str]]
    ) -> Iterator[Job]:
        """One for each mutant that a test executes."""
        for mutant in self.mutants:
            if self.until and time.time() > self.until:
                return
            tests = {test for line in mutant.lines for test in by_line.get((mutant.path, line), [])}
            order = sorted(tests, key=lambda test: (timed[test].cpu, timed[test].wall))
            if not order:
                self.tell(mutant, "no test", "")
                continue
            cpu = CPU_FACTOR * sum(CPU_MORE + timed[test].cpu for test in order)
            wall = WALL_MORE + WALL_FACTOR * sum(timed[test].wall for test in order)

            def work(mutant: Mutant = mutant, order: list[str] = order) -> str:
                mutant.apply()
                return f"killed {self.failed}" if self.fails([items[test] for test in order], timed) else "survived"

            def done(said: str, mutant: Mutant = mutant) -> None:
                status, _, test = said.partition(" ")
                self.killers |= {test} & items.keys()
                self.tell(mutant, status, test)

            yield Job(work, cpu, wall, done)

    def again(self, items: dict[str, pytest.Item], timed: dict[str, Timed]) -> Iterator[Job]:
        """One for each test that killed, without a mutant."""
        for test in sorted(self.killers):

            def done(said: str, test: str = test) -> None:
                if said != "passed":
                    self.wavering.append(test)

            def work(test: str = test) -> str:
                return "failed" if self.fails([items[test]], timed) else "passed"

            yield Job(work, 3000, 3000, done)

    def fails(self, items: list[pytest.Item], timed: dict[str, Timed]) -> bool:
        """Whether one does; the rest is not run. Each has its own time of the processor."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            seconds = int(time.process_time() + CPU_MORE + CPU_FACTOR * timed[item.nodeid].cpu) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                return True
        return False


@dataclasses.dataclass
class Job:
    """Work for a fork."""

    work: Callable[[], str]
    cpu: float
    wall: float
    done: Callable[[str], None]


def run(jobs: Iterator[Job], children: int) -> None:
    """Each job in a fork of its own. Ended by us: "time" took too much of the processor, "wall" of the clock."""
    running: dict[int, tuple[Job, Path, float]] = {}
    more = True
    while more or running:
        while more and len(running) < children:
            job = next(jobs, None)
            if job is None:
                more = False
                break
            gc.collect()
            gc.freeze()
            folder = Path(tempfile.mkdtemp(prefix="m", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
            pid = os.fork()
            if not pid:
                forked(job, folder)
            running[pid] = (job, folder, time.monotonic() + job.wall)
        if not running:
            break
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for each, (_, _, until) in running.items():
                if time.monotonic() > until:
                    (running[each][1] / "said").write_text("wall")
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.005)
            continue
        job, folder, _ = running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it started
        said = folder / "said"
        if said.is_file():
            answer = said.read_text(encoding="utf-8")
        else:
            answer = "time" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU else "died"
        shutil.rmtree(folder, ignore_errors=True)
        job.done(answer)


def forked(job: Job, folder: Path) -> None:
    """In the fork: work, leave the answer, end."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(null, each)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    seconds = int(job.cpu) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of memory to write to, not of addresses (RLIMIT_AS): V8, which draws charts, reserves many times what it uses.
    counts = Path("/proc/self/statm").read_text().split() if Path("/proc/self/statm").is_file() else []
    if counts:
        limit = int(counts[5]) * resource.getpagesize() + MORE_MEMORY_BYTES  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer = "died"
    try:
        answer = job.work()
    except BaseException as error:
        answer = f"killed {type(error).__name__}"
    finally:
        (folder / "said.new").write_text(answer, encoding="utf-8")
        (folder / "said.new").replace(folder / "said")
        os._exit(0)


def measured(plugin: Session, items: dict[str, pytest.Item], children: int) -> dict[str, Timed]:
    """Every test's lines and time; those of before where neither its file nor the code that it executes has changed."""
    code = {str(path): digest(path) for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))}
    module = {test: digest(Path(str(item.path))) for test, item in items.items()}
    kept: dict[str, Timed] = {}
    if STATS.is_file():
        read = json.loads(STATS.read_text(encoding="utf-8"))
        before = {test: Timed(**each) for test, each in read["tests"].items() if module.get(test) == each["module"]}
        same = {path for path, text in read["code"].items() if code.get(path) == text}
        kept = {test: each for test, each in before.items() if each.lines.keys() <= same}
    left: dict[str, list[str]] = {}
    for test in items:
        if test not in kept:
            left.setdefault(test.partition("::")[0], []).append(test)
    begun = time.monotonic()
    STATS.parent.mkdir(exist_ok=True)

    def jobs() -> Iterator[Job]:
        for file, tests in left.items():
            out = Path(tempfile.mkstemp(suffix=".json")[1])

            def work(tests: list[str] = tests, out: Path = out) -> str:
                out.write_text(json.dumps(measure(plugin, [items[test] for test in tests], module)), encoding="utf-8")
                return "measured"

            def done(said: str, file: str = file, out: Path = out) -> None:
                if said == "measured":
                    kept.update({test: Timed(**each) for test, each in json.loads(out.read_text()).items()})
                else:
                    sys.stderr.write(f"measuring {file}: {said}\n")
                out.unlink()
                tests = {test: dataclasses.asdict(each) for test, each in kept.items()}
                STATS.write_text(json.dumps({"code": code, "tests": tests}), encoding="utf-8")

            yield Job(work, 3000, 3000, done)

    run(jobs(), children)
    if left:
        sys.stdout.write(f"\n{len(kept)} tests measured in {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
    return kept


def measure(plugin: Session, tests: list[pytest.Item], module: dict[str, str]) -> dict[str, dict[str, object]]:
    """In a fork: run one file's tests with coverage, a context each; fixtures that several share have their own."""
    import coverage

    cover = coverage.Coverage(include=[f"{folder}/*" for folder in FOLDERS], data_file=None, config_file=False)
    cover.set_option("run:disable_warnings", ["no-data-collected"])  # a warning is an error here

    class Contexts:
        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
            if fixturedef.scope == "function":
                return (yield)
            before = self.now
            cover.switch_context(f"{fixturedef.baseid} {fixturedef.argname}")
            try:
                return (yield)
            finally:
                cover.switch_context(before)

        now = ""

    contexts = Contexts()
    tests[0].config.pluginmanager.register(contexts)
    before = set(sys.modules)
    took = {}
    cover.start()
    for item, after in zip(tests, [*tests[1:], None], strict=True):
        contexts.now, plugin.failed = item.nodeid, ""
        cover.switch_context(item.nodeid)
        cpu, wall = time.process_time(), time.monotonic()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
        took[item.nodeid] = (time.process_time() - cpu, time.monotonic() - wall, not plugin.failed)
    cover.stop()
    data = cover.get_data()
    lines: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        for line, names in data.contexts_by_lineno(path).items():
            for name in names:
                lines.setdefault(name, {}).setdefault(os.path.relpath(path), []).append(line)
    loaded = sorted(
        name for name in set(sys.modules) - before if name.partition(".")[0] not in {"tests", "__mp_main__"}
    )
    made: dict[str, dict[str, object]] = {}
    for at, item in enumerate(tests):
        shared = [
            f"{definition.baseid} {definition.argname}"
            for each in item._fixtureinfo.name2fixturedefs.values()
            for definition in each
            if definition.scope != "function"
        ]
        own: dict[str, set[int]] = {}
        for name in [item.nodeid, *shared]:
            for path, each in lines.get(name, {}).items():
                own.setdefault(path, set()).update(each)
        cpu, wall, ok = took[item.nodeid]
        executed = {path: sorted(each) for path, each in own.items()}
        timed = Timed(cpu, wall, ok, module[item.nodeid], executed, [] if at else loaded)
        made[item.nodeid] = dataclasses.asdict(timed)
    return made


def digest(*paths: Path) -> str:
    """Of their texts."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]

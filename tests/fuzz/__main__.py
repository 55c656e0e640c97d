"""Fuzzing guided by coverage (atheris): ``python -m fuzz [--time SECONDS] [--target NAME …]``, or ``--replay FILE``.

Each target runs in a process of its own. Inputs that reach new code are kept under ``.fuzz/<target>`` and are where the
next time begins; what breaks a contract is written to ``.fuzz/found/<target>-…`` and told with the command that replays
it. Mend it, and keep the input as ``corpus/<target>/found-<what>``: CI replays it from then on.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from fuzz.target import CORPUS, Target, attempt, measured, room_for

KEPT = Path(".fuzz")
#: Address space of a target: what claims gigabytes and gets them fails here, with a MemoryError.
MOST_BYTES = 6 * 2**30
#: An input that takes more seconds of the processor is a finding: the slowest of ours takes a tenth of one. A machine that
#: is paused or busy makes any input slow, so the clock's limit is only for what never returns.
HANG_S = 10.0
STUCK_S = 900
LONGEST = 4096


def main() -> int:
    """Run what is asked for; 1 when there is a finding."""
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--time", type=int, default=60, help="seconds a target")
    parser.add_argument("--target", nargs="*", default=[], help="default: all")
    parser.add_argument("--replay", type=Path, help="an input that was found; the target is the start of its name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return guided(options.one, options.time)
    from fuzz.table import TARGETS

    strange = [name for name in options.target if name not in TARGETS]
    if strange:
        parser.error(f"no target {', '.join(strange)}; there are {', '.join(TARGETS)}")
    if options.replay:
        return replay(TARGETS, options.replay, options.target)
    return sum([one_process(name, options.time) for name in options.target or TARGETS]) and 1


def replay(targets: dict[str, Target], file: Path, named: list[str]) -> int:
    """One input again, in the open."""
    name = named[0] if named else max((one for one in targets if file.name.startswith(f"{one}-")), key=len, default="")
    if not name:
        sys.stderr.write("which target? Give --target NAME\n")
        return 2
    data = file.read_bytes()
    refused, peak = measured(targets[name], data)
    told = "taken" if refused is None else f"refused: {type(refused).__name__}: {refused}"
    sys.stdout.write(f"{name}: {told}\n{peak} bytes allocated, {room_for(targets[name], data)} allowed\n")
    return int(peak > room_for(targets[name], data))


def one_process(name: str, seconds: int) -> int:
    """Fuzz one target in a process of its own; 1 when it found something."""
    found = KEPT / "found"
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    log = KEPT / f"{name}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "fuzz", "--one", name, "--time", str(seconds)]
        status = subprocess.run(command, stdout=out, stderr=out).returncode
    lines = log.read_text(errors="replace").splitlines()
    last = [line for line in lines if line.startswith(("Done", "#"))][-1:] or ["no input was run"]
    news = sorted(set(found.iterdir()) - before)
    sys.stdout.write(f"{name:16} {last[0].strip()}{'' if status == 0 else f'  STATUS {status}: {log}'}\n")
    for file in news:
        sys.stdout.write(f"  found {file}\n  replay: PYTHONPATH=tests python -m fuzz --target {name} --replay {file}\n")
    sys.stdout.flush()
    return int(status != 0 or bool(news))


def guided(name: str, seconds: int) -> int:
    """This process becomes libFuzzer on one target; it does not return."""
    import atheris

    with atheris.instrument_imports(include=["edgefl", "coordinator", "device_agent", "yaml", "zipfile", "wave"]):
        from fuzz.table import TARGETS
    target = TARGETS[name]
    from fuzz.mutate import mutated

    kept, found = KEPT / name, KEPT / "found"
    kept.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

    def hung(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {HANG_S:g} s of the processor")

    signal.signal(signal.SIGVTALRM, hung)

    def run(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        try:
            attempt(target, data)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def change(data: bytes, most: int, seed: int) -> bytes:
        if seed % 3 == 0:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, target.form, random.Random(seed))[:most]

    arguments = [
        *(f"-max_total_time={seconds}", f"-artifact_prefix={found}{os.sep}{name}-", f"-timeout={STUCK_S}"),
        *(f"-max_len={LONGEST}", "-rss_limit_mb=0", "-print_final_stats=0", str(kept), str(CORPUS / name)),
    ]
    atheris.Setup([sys.argv[0], *arguments], run, custom_mutator=change)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())

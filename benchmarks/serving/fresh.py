"""A fresh environment with ``edgefl-toolkit[serve]`` from the wheel: its size, that torch is not in it, and its start.

Builds the wheel, makes a virtual environment, installs the wheel with the extra `serve`, starts `edgefl serve` on
bundles and asks /predict for one sample of zeros until it is answered. "Start" is from the process's start to that
answer; the first start compiles the packages' bytecode.

    python -m benchmarks.serving.fresh BUNDLES [--write docs/results/serving.md]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import numpy as np

from benchmarks.common import sections
from edgefl.export.runtime import encoders, find_bundles

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
PORT = 18_481
COMMAND = "python -m benchmarks.serving.fresh BUNDLES --write docs/results/serving.md"
#: Most that may be on disk, pip and setuptools aside, and most seconds of a start that is not the first.
MOST_MIB, MOST_S = 350, 30
HEAD = """# Serving

What a bundle costs where it serves. Every section is written by the command it names.
"""


def size(folder: Path) -> int:
    """Bytes of the files below, as `du --apparent-size` counts them."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def installed(folder: Path) -> tuple[Path, float]:
    """An environment in ``folder`` with the extra, and the seconds that pip took."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder / "wheel", ROOT], check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    where = folder / "environment"
    venv.create(where, with_pip=True)
    begun = time.perf_counter()
    subprocess.run(
        [where / "bin/python", "-m", "pip", "--quiet", "install", f"edgefl-toolkit[serve] @ file://{wheel}"], check=True
    )
    return where, time.perf_counter() - begun


def form(bundles: Path) -> bytes:
    """A form with one modality's sample of zeros."""
    m, encoder = next(iter(encoders(find_bundles(bundles)).items()))
    file = io.BytesIO()
    np.save(file, np.zeros(encoder.input_shape, np.int64 if encoder.kind == "text" else np.float32))
    head = f'--b\r\ncontent-disposition: form-data; name="{m}"; filename="x.npy"\r\n\r\n'
    return head.encode() + file.getvalue() + b"\r\n--b--\r\n"


def start(where: Path, bundles: Path, body: bytes) -> tuple[float, int]:
    """Seconds to the first answer, and resident bytes after it."""
    begun = time.perf_counter()
    command = [str(where / "bin/edgefl"), "serve", str(bundles), "--host", f"127.0.0.1:{PORT}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{PORT}/predict", body, {"content-type": "multipart/form-data; boundary=b"}
                )
                with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                    assert answer.status == 200
                    break
                time.sleep(0.02)
            took = time.perf_counter() - begun
            status = Path(f"/proc/{server.pid}/status").read_text()
            resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    return took, resident


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where, pip_s = installed(Path(folder))
        (site,) = where.glob("lib/python*/site-packages")
        tools = sum(size(one) for one in site.glob("pip*")) + sum(size(one) for one in site.glob("setuptools*"))
        before = size(site) - tools
        sizes = sorted(((size(one), one.name) for one in site.iterdir() if one.is_dir()), reverse=True)
        largest = [(bytes_, name) for bytes_, name in sizes if not name.startswith(("pip", "setuptools"))][:5]
        names = {one.name.partition("-")[0].lower() for one in site.glob("*.dist-info")}
        assert not names & {"torch", "transformers", "onnx", "sqlalchemy", "onnxruntime_gpu"}, names
        body = form(given.bundles)
        first, *later = [start(where, given.bundles, body) for _ in range(4)]
    seconds = statistics.median(took for took, _ in later)
    resident = statistics.median(rss for _, rss in later)
    text = f"""| | |
|---|---|
| on disk, pip and setuptools left out | {before / MIB:.0f} MiB in {len(names - {"pip", "setuptools"})} packages |
| of these the largest | {", ".join(f"{name} {bytes_ / MIB:.0f}" for bytes_, name in largest)} MiB |
| torch, transformers, onnx, SQLAlchemy, onnxruntime-gpu | not there |
| pip install | {pip_s:.0f} s |
| from the start of `edgefl serve` to the first answer, the first time | {first[0]:.1f} s |
| the same afterwards, median of {len(later)} | {seconds:.1f} s |
| resident after the first answer | {resident / MIB:.0f} MiB |

Bundles of {", ".join(one.name for one in find_bundles(given.bundles))}, {size(given.bundles) / MIB:.1f} MiB; two cores
that others used meanwhile; pip from a cache or mirror near by."""
    print(text)
    assert before < MOST_MIB * MIB, before
    assert seconds < MOST_S, seconds
    if given.write:
        sections.put(given.write, "The server, installed fresh", f"`{COMMAND}`\n\n{text}", head=HEAD)


if __name__ == "__main__":
    main()

"""docs/doctor.md: what doctor checks, and every fault that it tells apart."""

from __future__ import annotations

from collections.abc import Iterator

from edgefl.findings import FINDINGS
from pages.markdown import GENERATED, table

ABOUT = """# What is wrong with a device: `edgefl-agent doctor`

Look up here what each fault that `doctor` reports means, and the way out.

```
edgefl-agent doctor                        # an enrolled device: its identity, its broker dialled as the agent does
edgefl-agent doctor --broker mqtts://broker.example:8883 --ca ca.pem
edgefl-agent doctor --data DATA --profile device.yaml --format json
sudo edgefl-agent doctor --state /var/lib/edgefl-agent    # the machine's service, whose state is its account's alone
```

It needs the base install alone, changes nothing, and goes on when a check fails. Each result is one line, `ok`,
`warn` or `fail`, with the id of the fault and, below it, the way out:

```
fail  broker       cannot reach the broker mqtts://broker.example:8883:
                   broker.example:8883 speaks plain MQTT, and mqtts:// asks for
                   TLS [broker-plain]
                   -> Write mqtt://, or the port of the TLS listener.
```

**Exit code** 0: no fault, or warnings alone; 1: at least one `fail`; 2 and more: the command line, or a profile (10).

**`--format json`** is a list of objects with `id`, `name` (the check), `status`, `detail` and `remedy` (empty when
all is well). An id is stable: it is never used for another fault. A check without fault has the id `<name>-ok`.

`edgefl-agent run` has the same words. It ends before it connects when torch or the data is missing, or the state
directory cannot be written (exit codes 19, 11, 15), and with 10 as soon as torch is loaded and lacks the CUDA that
the profile asks for. It says so and goes on where time may mend it: a clock that is
behind, a certificate that has expired, a full disk. What the broker answers is in its `unreachable` lines; their
field `finding` has the id. `edgefl doctor` makes the same checks of a server.

Torch and onnxruntime are tried in processes of their own: a training step, and a model of one addition on each
provider, since a GPU that is listed need not run. Memory: a process grows beyond a ceiling on purpose and has to be
stopped.

## Every fault

`{source}` stands for where a build for this device is: on a Jetson with JetPack 6 that is `pip install
--force-reinstall --no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 torch`, with JetPack 7
`https://pypi.jetson-ai-lab.io/sbsa/cu130`; where the JetPack is not known, as in some containers, both are named.
They are NVIDIA's own builds for these boards. pip's `onnxruntime-gpu` does not fit there: its aarch64 wheels are
for servers' GPUs and Python 3.11 or newer, and JetPack 6 has Python 3.10. None of this has been tried on a Jetson;
the indexes are those that their maintainers name. A torch for processors fails on a Jetson, and with a Jetson's
profile.
"""


def doctor() -> Iterator[str]:
    """Lines of the page."""
    yield GENERATED
    yield ABOUT
    rows = [(f"`{name}`", fault.status, fault.means, fault.remedy) for name, fault in FINDINGS.items()]
    yield from table(("id", "result", "what is wrong", "the way out"), rows)

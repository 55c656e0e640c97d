"""EdgeFL's run in one process with joint steps."""

from __future__ import annotations

from functools import partial

from benchmarks.cost.simulators import with_edgefl

main = partial(with_edgefl.main, joint_steps=True)

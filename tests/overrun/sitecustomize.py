"""On a trainer's PYTHONPATH: its training steps take more memory than was predicted, as a library's workspace would.

EDGEFL_TEST_OVERRUN: bytes, or bytes@whole for steps of the whole batch alone. The toy step that warms a trainer up is
left as it is: what it takes belongs to the idle process.
"""

import importlib.abc
import importlib.machinery
import os
import sys

AMOUNT, _, WHICH = os.environ.get("EDGEFL_TEST_OVERRUN", "0").partition("@")
NAME = "edgefl.training.step"


class Overrun(importlib.abc.MetaPathFinder):
    """Wraps ``train_step`` when its module is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            module.train_step = overrunning(module.train_step)

        spec.loader.exec_module = loaded
        return spec


def overrunning(train_step):
    held, calls = [], [0]

    def step(model, job, batch, *others):
        calls[0] += 1
        if calls[0] > 1 and not (WHICH and job.hyper.micro_batch) and not held:
            held.append(b"\1" * int(AMOUNT))
        return train_step(model, job, batch, *others)

    return step


if int(AMOUNT):
    sys.meta_path.insert(0, Overrun())

"""On a program's PYTHONPATH: its clock is off by EDGEFL_TEST_CLOCK seconds, as that of a board without a battery."""

import os
import time

if off := float(os.environ.get("EDGEFL_TEST_CLOCK", "0")):
    right = time.time
    time.time = lambda: right() + off

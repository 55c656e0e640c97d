"""On a coordinator's PYTHONPATH: devices are to beat every EDGEFL_TEST_BEAT seconds, so that beats meet transfers."""

import os

from coordinator.core.timeouts import Timeouts

defaults = {**Timeouts._field_defaults, "heartbeat_s": float(os.environ["EDGEFL_TEST_BEAT"])}
Timeouts.__new__.__defaults__ = tuple(defaults[name] for name in Timeouts._fields)

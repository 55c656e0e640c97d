"""On a program's PYTHONPATH: it is of another release. EDGEFL_TEST_RELEASE: RELEASE:PROTOCOL, such as 0.0.9:0."""

import os

if said := os.environ.get("EDGEFL_TEST_RELEASE", ""):
    import edgefl  # which imports nothing: what reads its numbers comes later

    edgefl.__version__, _, protocol = said.partition(":")
    edgefl.PROTOCOL_VERSION = int(protocol)

"""Makes a device's key and its signing request; as a process: ``python -m edgefl.identity.request NAME KEY``.

What makes keys weighs 8 MB, which the supervisor would keep for as long as it lives. The key goes into the file KEY,
for its owner alone, unless that is there already; the request, which is no secret, to standard output as DER.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgefl.console import guarded
from edgefl.identity.authority import key_pem, load_key, new_key, signing_request
from edgefl.identity.files import read_private, write_private


def make_request(name: str, key_file: Path) -> bytes:
    """The signing request, DER, for the key in a file, which is made if it is not there."""
    if not key_file.exists():
        write_private(key_file, key_pem(new_key()))
    return signing_request(name, load_key(read_private(key_file), str(key_file)))


def main() -> None:
    """NAME and KEY on the command line."""
    with guarded():
        sys.stdout.buffer.write(make_request(sys.argv[1], Path(sys.argv[2])))


if __name__ == "__main__":
    main()

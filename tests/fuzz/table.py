"""Every target by name. What has none, and why, is in docs/fuzzing.md."""

from __future__ import annotations

from fuzz import disk, people, wire
from fuzz.target import Target

TARGETS: dict[str, Target] = {one.name: one for one in (*wire.TARGETS, *disk.TARGETS, *people.TARGETS)}

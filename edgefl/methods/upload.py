"""Uploads: what a device sends of what it trained.

whole: every part, as it was trained.
"""

from __future__ import annotations

from edgefl.registry import register
from edgefl.roles import Upload

register(Upload("whole", "every part, as it was trained", default=True))

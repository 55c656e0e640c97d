"""The kinds of encoder, by the name that an encoder's specification gives."""

from __future__ import annotations

from edgefl.models.encoders import audio, sensor, text, vision
from edgefl.models.encoders.base import Kind

KINDS: dict[str, Kind] = {"sensor": sensor.KIND, "vision": vision.KIND, "text": text.KIND, "audio": audio.KIND}

"""Suffixes of the files that are read, by kind of encoder."""

from __future__ import annotations

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
#: PCM in .wav is read everywhere; the rest takes the package soundfile.
SOUNDS = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff")

#: Suffix -> the kind of encoder that reads the file. ``.npy`` may hold any kind; alone it is taken for a sensor's.
KIND_OF = {
    **dict.fromkeys(PICTURES, "vision"),
    **dict.fromkeys(SOUNDS, "audio"),
    ".txt": "text",
    ".csv": "sensor",
    ".npy": "sensor",
}

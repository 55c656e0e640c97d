"""A benchmark's pages of a processor and of a GPU: their files, titles, and what one says of the other."""

from __future__ import annotations

#: Of every page that was made on a processor alone.
UNTESTED = "**Not run on a GPU**, though `--device cuda` would; [what was](gpu.md)."


def page_name(what: str, device: str, ending: str = "md") -> str:
    """File of a page or plot: those of a GPU stand beside those of a processor."""
    return f"{what}.{ending}" if device == "cpu" else f"{what}_{device.partition(':')[0]}.{ending}"


def title(words: str, device: str) -> str:
    """The page's first line."""
    return f"# {words}" + ("" if device == "cpu" else ", on a GPU")


def elsewhere(what: str, device: str) -> list[str]:
    """Lines that tell on which processor a page's figures are, and where the other's are."""
    if device == "cpu":
        return ["", "Of a processor; [what was measured on a GPU](gpu.md)."]
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "a GPU"
    return ["", f"On {card}; [the same on a processor]({page_name(what, 'cpu')})."]

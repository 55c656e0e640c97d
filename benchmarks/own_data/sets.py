"""Data sets that come inside packages, as a user would have them on disk.

Python packages: scikit-learn, sktime, palmerpenguins, vega_datasets, statsmodels. Debian packages: fortunes,
tango-icon-theme, asterisk-core-sounds-{en,fr,es,it,ru}-wav, klettres-data. A set whose package is not installed raises
``MissingError``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class MissingError(Exception):
    """A package that a data set comes in is not installed."""


class OwnData(NamedTuple):
    """A data set on disk and the same samples for a baseline.

    ``source``: what is given to ``edgefl init``; ``kind``: of its baseline (table, numeric, text, sound, picture,
    series, mixed), numeric being a table with a numeric target; ``labels``: of all samples in order; ``values``: per
    sample, as the baseline takes them; ``options``: of init, which a user would name; ``number``: pattern of a sample's
    number (from ``first``) in its id.
    """

    source: Path
    kind: str
    labels: list[str]
    values: list[Any]
    options: tuple[str, ...] = ()
    number: str = r"-(\d+)$"
    first: int = 1


_IN_NAME = r"s(\d{5})"


def _table(folder: Path, name: str, frame: Any, label: str, *options: str, **csv: Any) -> OwnData:
    path = folder / f"{name}.csv"
    frame = frame[frame[label].notna()].reset_index(drop=True)
    frame.to_csv(path, index=False, **csv)
    values = frame.drop(columns=label).to_dict("records")
    return OwnData(path, "table", frame[label].astype(str).tolist(), values, options)


def _sklearn(load: str) -> Callable[[Path], OwnData]:
    def make(folder: Path) -> OwnData:
        from sklearn import datasets

        data = getattr(datasets, f"load_{load}")(as_frame=True)
        names = data.target_names if load != "digits" else [f"digit {i}" for i in range(10)]
        return _table(folder, load, data.data.assign(kind=[str(names[i]) for i in data.target]), "kind")

    return make


def _penguins(folder: Path) -> OwnData:
    import palmerpenguins

    return _table(folder, "penguins", palmerpenguins.load_penguins(), "species")


def _vega(name: str, label: str, *options: str) -> Callable[[Path], OwnData]:
    def make(folder: Path) -> OwnData:
        from vega_datasets import local_data

        return _table(folder, name, getattr(local_data, name)(), label, *options)

    return make


def _german_wine(folder: Path) -> OwnData:
    from sklearn.datasets import load_wine

    data = load_wine(as_frame=True)
    frame = data.data.assign(sorte=[f"Sorte {i}" for i in data.target])
    return _table(folder, "wein", frame, "sorte", sep=";", decimal=",", encoding="utf-8-sig")


def _loud_column(folder: Path) -> OwnData:
    """One large column without meaning, two small ones that tell three classes."""
    import pandas as pd

    rng = np.random.default_rng(7)
    label = np.arange(450) % 3
    frame = pd.DataFrame(
        {
            "serial": rng.uniform(0, 1e6, 450).round(1),
            "a": (label == 1) * 0.02 + rng.normal(0, 0.005, 450),
            "b": (label == 2) * 0.02 + rng.normal(0, 0.005, 450),
            "machine": [f"m{i}" for i in label],
        }
    )
    return _table(folder, "machines", frame, "machine")


def _heart_votes(folder: Path) -> OwnData:
    """The American National Election Study of 1996: how people voted, by ten answers."""
    from statsmodels.datasets import anes96

    frame = anes96.load_pandas().data
    frame = frame.assign(vote=["Clinton" if v == 0 else "Dole" for v in frame["vote"]])
    return _table(folder, "voters", frame, "vote")


def _diabetes(folder: Path) -> OwnData:
    from sklearn.datasets import load_diabetes

    data = load_diabetes(as_frame=True, scaled=False)
    frame = data.data.assign(progression=data.target)
    return _table(folder, "diabetes", frame, "progression", "--label", "progression")._replace(kind="numeric")


def _mileage(folder: Path) -> OwnData:
    from vega_datasets import local_data

    frame = local_data.cars().drop(columns="Name")
    label = ("--label", "Miles_per_Gallon")
    return _table(folder, "mileage", frame, "Miles_per_Gallon", *label)._replace(kind="numeric")


def _economy(folder: Path) -> OwnData:
    """Unemployment in 203 quarters of the United States, by the state of its economy."""
    from statsmodels.datasets import macrodata

    frame = macrodata.load_pandas().data
    return _table(folder, "economy", frame, "unemp", "--label", "unemp")._replace(kind="numeric")


def _affairs(folder: Path) -> OwnData:
    from statsmodels.datasets import fair

    frame = fair.load_pandas().data
    frame = frame.assign(affair=["yes" if v > 0 else "no" for v in frame.pop("affairs")]).iloc[::3]
    return _table(folder, "affairs", frame, "affair")


def _series(name: str) -> Callable[[Path], OwnData]:
    def make(folder: Path) -> OwnData:
        from sktime import datasets

        load = getattr(datasets, f"load_{name}")
        x, y = load(return_type="numpy3d")
        root = folder / name
        for i, (rows, label) in enumerate(zip(x, y, strict=True)):
            place = root / f"class_{label}"
            place.mkdir(parents=True, exist_ok=True)
            head = ",".join(f"ch{c}" for c in range(len(rows)))
            np.savetxt(place / f"s{i:05d}.csv", rows.T, delimiter=",", header=head, comments="", fmt="%.6g")
        return OwnData(root, "series", [f"class_{v}" for v in y], list(x), number=_IN_NAME, first=0)

    return make


def _fortunes(topics: Sequence[str], below: str = "", options: Sequence[str] = ()) -> Callable[[Path], OwnData]:
    def make(folder: Path) -> OwnData:
        import pandas as pd

        root = Path("/usr/share/games/fortunes") / below
        rows = []
        for topic in topics:
            if not (root / topic).exists():
                raise MissingError(f"fortunes ({root / topic})")
            quotes = (root / topic).read_text("utf-8", "replace").split("\n%\n")
            rows += [(" ".join(q.split()), topic) for q in quotes if 4 < len(q.split()) < 120][:200]
        frame = pd.DataFrame(rows, columns=["quote", "topic"]).sample(frac=1, random_state=1).reset_index(drop=True)
        path = folder / f"fortunes{below}.csv"
        frame.to_csv(path, index=False)
        return OwnData(path, "text", frame["topic"].tolist(), frame["quote"].tolist(), tuple(options))

    return make


_ICONS = frozenset({"actions", "apps", "devices", "mimetypes", "status", "places"})


def _icon_files() -> Iterator[tuple[str, Path]]:
    root = Path("/usr/share/icons/Tango/32x32")
    if not root.exists():
        raise MissingError("tango-icon-theme")
    for path in sorted(root.rglob("*.png")):
        if not path.is_symlink() and path.parent.name in {
            "actions",
            "apps",
            "devices",
            "mimetypes",
            "status",
            "places",
        }:
            yield path.parent.name, path


def _pixels(path: Path) -> Any:
    from PIL import Image

    image = Image.open(path).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return np.asarray(Image.alpha_composite(white, image).convert("RGB").resize((32, 32)), np.float32) / 255


def _icons(folder: Path) -> OwnData:
    labels, values = [], []
    for i, (label, path) in enumerate(_icon_files()):
        place = folder / "icons" / label
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / f"s{i:05d}.png")
        labels.append(label)
        values.append(_pixels(path))
    return OwnData(folder / "icons", "picture", labels, values, number=_IN_NAME, first=0)


def _captioned(folder: Path) -> OwnData:
    import pandas as pd

    rows, values = [], []
    (folder / "captioned").mkdir()
    for i, (label, path) in enumerate(_icon_files()):
        shutil.copy(path, folder / "captioned" / f"s{i:05d}.png")
        caption = "a small icon of " + " ".join(re.split(r"[-_]", path.stem))
        rows.append((f"s{i:05d}.png", caption, label))
        values.append((_pixels(path), caption))
    pd.DataFrame(rows, columns=["file", "caption", "label"]).to_csv(folder / "captioned" / "captions.csv", index=False)
    return OwnData(folder / "captioned", "mixed", [r[2] for r in rows], values, number=_IN_NAME, first=0)


def _digit_pictures(folder: Path) -> OwnData:
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    for i, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        place = folder / "digits" / f"digit_{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32)).save(place / f"s{i:05d}.png")
    labels = [f"digit_{v}" for v in data.target]
    return OwnData(
        folder / "digits", "picture", labels, [image / 16 for image in data.images], number=_IN_NAME, first=0
    )


def _sounds(files: Sequence[tuple[str, Path]], root: Path) -> OwnData:
    import soundfile

    values = []
    for i, (label, path) in enumerate(files):
        place = root / label
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / f"s{i:05d}{path.suffix}")
        samples, rate = soundfile.read(path, always_2d=True)
        values.append((samples.mean(axis=1), rate))
    return OwnData(root, "sound", [label for label, _ in files], values, number=_IN_NAME, first=0)


def _voices(folder: Path) -> OwnData:
    files = []
    for place in sorted(Path("/usr/share/asterisk/sounds").glob("*_*_*_*")):
        short = [path for path in sorted(place.glob("*.wav")) if 8_000 < path.stat().st_size < 80_000]
        files += [(place.name.split("_")[0], path) for path in short[:120]]
    if len({label for label, _ in files}) < 3:
        raise MissingError("asterisk-core-sounds-*-wav")
    return _sounds(files, folder / "voices")


def _letters(folder: Path) -> OwnData:
    root = Path("/usr/share/klettres")
    languages = [path for path in sorted(root.glob("*")) if (path / "alpha").is_dir()][:6]
    if len(languages) < 3:
        raise MissingError("klettres-data")
    files = [(lang.name, path) for lang in languages for path in sorted((lang / "alpha").glob("*.ogg"))]
    return _sounds(files, folder / "letters")


_TOPICS = (
    "art",
    "computers",
    "definitions",
    "food",
    "law",
    "medicine",
    "platitudes",
    "politics",
    "science",
    "startrek",
)
_THEMEN = ("anekdoten", "computer", "kinderzitate", "murphy", "sprichworte", "sprueche", "witze", "zitate")

#: Name -> how the set is put on disk below a folder.
SETS: dict[str, Callable[[Path], OwnData]] = {
    "penguins": _penguins,
    "iris": _sklearn("iris"),
    "wine": _sklearn("wine"),
    "cancer": _sklearn("breast_cancer"),
    "digits-table": _sklearn("digits"),
    "cars": _vega("cars", "Origin", "--label", "Origin", "--drop", "Name"),
    "weather": _vega("seattle_weather", "weather", "--label", "weather"),
    "machines": _loud_column,
    "wein": _german_wine,
    "voters": _heart_votes,
    "affairs": _affairs,
    "diabetes": _diabetes,
    "mileage": _mileage,
    "economy": _economy,
    "gunpoint": _series("gunpoint"),
    "motions": _series("basic_motions"),
    "power": _series("italy_power_demand"),
    "arrows": _series("arrow_head"),
    "fortunes": _fortunes(_TOPICS),
    "fortunes-pretrained": _fortunes(_TOPICS, options=["--pretrained"]),
    "fortunes-de": _fortunes(_THEMEN, "de"),
    "icons": _icons,
    "digits": _digit_pictures,
    "captioned": _captioned,
    "voices": _voices,
    "letters": _letters,
}

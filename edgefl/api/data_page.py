"""Page of a run's data, from its shares and the texts of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgefl.api.needs import explained
from edgefl.api.run_inputs import shares_table
from edgefl.config.settings import RunConfig
from edgefl.data.dataset import Dataset
from edgefl.data.encoding import decoded
from edgefl.data.prepare import Prepared
from edgefl.data.readers import MAX_TEXT_BYTES, inside
from edgefl.data.sources import has_manifest, manifest_of
from edgefl.models.spec import EncoderSpec
from edgefl.plan.preparation import read_as


@explained("data_page")
def page_of(config: RunConfig, prepared: Prepared) -> str:
    """The page. Raises MissingDependencyError, DataError."""
    from edgefl.report.data_page import Data, to_html

    encoders = read_as(config, folder=False)
    known = {m: encoder for m, encoder in encoders.items() if m in prepared.signature}
    shares = {share.device: Dataset.load_npz(share.path, known) for share in prepared.shares}
    data = Data(
        config.name, shares, Dataset.load_npz(prepared.test, known), known, _texts(config, known), prepared.skipped
    )
    return to_html(data, [shares_table(config.name, prepared)])


def _texts(config: RunConfig, encoders: Mapping[str, EncoderSpec]) -> Callable[[str, str], str]:
    """Look-up function for a sample's raw text.

    (modality, sample id) -> text, from the manifests of ``data.source`` and ``data.test``; "" if there is none. Windows
    of a text ("id#n") give the whole text.
    """
    found: dict[tuple[str, str], tuple[Path, str]] = {}
    for source in (config.data.source, config.data.test):
        if not source or not has_manifest(source):
            continue
        root, manifest = manifest_of(source)
        for number, line in enumerate(manifest.read_bytes().splitlines() if manifest.is_file() else (), start=1):
            try:
                record = msgspec.json.decode(line, type=dict[str, object])
            except ValueError:  # it was left out, and that is said
                continue
            for m in encoders:
                if encoders[m].kind == "text" and isinstance(value := record.get(m), str):
                    found[m, str(record.get("id", f"line {number}"))] = root, value

    def text(modality: str, sample: str) -> str:
        key = (modality, sample) if (modality, sample) in found else (modality, sample.rpartition("#")[0])
        folder, value = found.get(key, (Path(), ""))
        if not value.endswith(".txt") or any(letter.isspace() for letter in value):
            return value
        return decoded(inside(folder, value, MAX_TEXT_BYTES).read_bytes())

    return text

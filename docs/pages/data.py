"""The formats of data, with examples that a test reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from edgefl.data import readers
from edgefl.data.dataset import SHOWN
from edgefl.data.folder import MAX_SAMPLES
from edgefl.data.named import NAMED, ORIGINS
from pages.fields import as_yaml
from pages.markdown import flowing

MANIFEST = """\
{"id": "w1", "label": "walking", "group": "anna", "acc": [[0.1, 0.0], [0.2, 0.1]], "gyro": [[1.0], [0.5]]}
{"id": "w2", "label": "resting", "group": "anna", "acc": [[0.0, 0.0], [0.0, 0.1]]}
{"id": "w3", "label": "walking", "group": "ben", "acc": null, "gyro": [[0.9], [0.4]]}
"""
NPZ = """\
import numpy as np

np.savez(
    "share.npz",
    acc=np.zeros((3, 2, 2), np.float32),  # [samples, time, channels]; zeros where a sample lacks it
    **{"acc.present": np.array([True, True, False])},  # may be left out when every sample has it
    gyro=np.zeros((3, 2, 1), np.float32),
    label=np.array([0, 1, 0]),  # whole numbers (-1: none), or names ("": none)
    label_names=np.array(["walking", "resting"]),
    ids=np.array(["w1", "w2", "w3"]),  # optional, as is group
    group=np.array(["anna", "anna", "ben"]),
)
"""
TEXT = """\
## Data

`data.source` (and `edgefl-agent run --data`) is a folder with `manifest.jsonl`, an `.npz` file, or a data set by name.
A sample may lack any modality, but not all of them.

### A folder: `manifest.jsonl`

One JSON object a line; here the second sample has no gyroscope and the third no accelerometer:

```json
{manifest}```

`id`, `label` (a name, or a whole number), `group` (a person, a device: used by `partition: natural`) and `meta`
(ignored) are optional; every other key is a modality. An absent key, or null, is a missing modality. `labels.json`
beside it, a list of names, fixes the numbering of labels; without it the names found are sorted. At most {samples}
samples. Bad samples are an error that names them, {shown} in full, or with `bad_samples: skip` they are left out and
counted. What a value may be:

{values}

A string is a path relative to the folder, which it cannot leave; for text it is the text itself unless it is one word
that ends in .txt or .npy. Files are read as their encoder takes them: texts by its vocabulary or its checkpoint's
tokenizer, pictures at `image_size` (or the size that a named encoder was made for; grey ones among coloured ones become
coloured). Without one, all pictures have to be of one size. With `window`, a line whose recordings are cut gives
a sample a window, `w1#0`, `w1#1`, …, with the line's label; [file formats](data_formats.md) has the rules.

### A file: `.npz`

```python
{npz}```

Feature vectors [N, d] are signals of d steps and one channel.

`edgefl data RUN --out shares` writes such a file for each device, and `test.npz`.

### By name

`source: {{name: {{option: value}}}}`; the option `part: test` takes the official test half, `part: reserved` what the
option `reserve` keeps from both. `data.test` takes the same form, with options of its own
([tasks from the named sets](public_data.md#tasks-from-the-named-sets)).
`basic_motions` comes with the extra `demo`. The others do not come with EdgeFL: they are looked for in the folders
`$EDGEFL_DATA/<name>/`, by default in `~/.local/share/edgefl/data/<name>/`. `edgefl data fetch har_hapt` brings what the
shipped run `har` trains on ([public data sets](public_data.md)).

{origins}

{named}
### Sharing out

`partition: natural` (by group; a group that is called as a device is that device's), `uniform`, or `{{dirichlet:
{{alpha: 0.5, minimum: 1}}}}`: a small alpha gives each device few classes (`within: 1` shares out each group); or
`shards`, one a class, dealt at random (`{{shards: {{each: 2}}}}`: of equal size, two a device). With `{{drawn: {{each:
20}}}}` each device draws its own by its name, and others may have them too, so that there may be more devices than
samples; `alpha` skews its classes.
`missing: {{rate: 0.2, keep: one, devices: {{wrist: [gyro]}}}}` then takes modalities away, each by itself, or
(`lose: one`) exactly one of a fixed share of the samples; devices named in `complete` are spared, those in
`unlabelled` lose their labels. All of it follows from `seed`, whatever method trains on it.
"""


def data_section() -> Iterator[str]:
    """Lines of the section."""
    values = [line for line in (inspect.getdoc(readers) or "").splitlines() if line.startswith("|")]
    named = []
    for name, function in NAMED.items():
        options = ", ".join(
            f"`{p.name}` = {as_yaml(p.default) or 'none'}" for p in inspect.signature(function).parameters.values()
        )
        named.append(f"**`{name}`** ({options or 'no options'}). {flowing(function)}\n")
    yield TEXT.format(
        manifest=MANIFEST,
        samples=f"{MAX_SAMPLES:,}",
        shown=SHOWN,
        values="\n".join(values),
        npz=NPZ,
        origins="\n".join(f"* `{name}`: {origin}." for name, origin in ORIGINS.items()),
        named="\n".join(named),
    )

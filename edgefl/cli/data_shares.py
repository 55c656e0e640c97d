"""How the data of a run file is shared out to its devices, or is taken to be for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from edgefl.config.settings import RunConfig
from edgefl.data.prepare import Prepared, Share, prepare_shares
from edgefl.data.sources import Source, load
from edgefl.errors import ConfigError, Problem
from edgefl.plan.compile import read_as

#: Facts of a run's data: modality -> shape of one sample, label names, the devices' shares.
Data = tuple[Mapping[str, tuple[int, ...]], tuple[str, ...], Sequence[Share]]


def data_of(config: RunConfig, devices: Sequence[str]) -> Data:
    """The devices' data: shared out of the source or, where it is on the devices alone, like the test set."""
    return _shared_out(config, devices) if config.data.source is not None else _as_tested(config, devices)


def _shared_out(config: RunConfig, devices: Sequence[str]) -> Data:
    with TemporaryDirectory() as folder:
        prepared = shares_of(config, devices, Path(folder))
    return prepared.signature, prepared.label_names, prepared.shares


def _as_tested(config: RunConfig, devices: Sequence[str]) -> Data:
    """Each device with as many samples as the test set, and of its shapes."""
    source = config.data.test
    if not source:
        text = "is needed, or data.test, to know the shapes of the samples"
        raise ConfigError(config.name, [Problem("data.source", text)])
    test = load(source, bad_samples=config.data.bad_samples, modalities=read_as(config, folder=_is_folder(source)))
    shares = [Share(device, source, test.samples(), test.class_counts()) for device in devices]
    return test.signature(), test.label_names, shares


def _is_folder(source: Source) -> bool:
    return isinstance(source, str) and Path(source).is_dir()


def shares_of(config: RunConfig, devices: Sequence[str], folder: Path) -> Prepared:
    """Write every device's share and the test set of a run below ``folder``. Raises DataError."""
    if config.data.source is None:
        raise ConfigError(config.name, [Problem("data.source", "is needed to share data out")])
    encoders = read_as(config, folder=_is_folder(config.data.source))
    return prepare_shares(config.data, devices, folder, config.seed, encoders)

"""Inference engine behind HTTP and MQTT: request bytes in, answer bytes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset
from edgefl.data.raw_sample import Value, raw_samples
from edgefl.data.readers import read_text
from edgefl.errors import DataError, ExportError
from edgefl.export.entries import SCHEMA, entry, matched, recording_entries
from edgefl.export.recordings import truth_of
from edgefl.export.runtime import Answers, Bundle
from edgefl.own_data.table_rows import read_rows
from edgefl.own_data.trained_tables import read_trained, takes_tables
from edgefl.serve.batching import Batcher, Work
from edgefl.serve.catalogue import Catalogue, Model
from edgefl.serve.limits import MAX_CSV_BYTES, MAX_CSV_LINE, MAX_WINDOWS, Limits, Refused, Room, busy
from edgefl.serve.metrics import Metrics
from edgefl.serve.tensors import InferRequest, Reply, Scalar, bad, decode_request, encode_reply

Array = npt.NDArray[Any]
T = TypeVar("T")
#: Up to here a request is read in the event loop: a thread takes as long to hand it over.
SMALL_BYTES = 2**16


class Asked(NamedTuple):
    """An inference request as received, not yet decoded.

    ``head``: length of the JSON before binary data; None: JSON alone.
    """

    model: str
    body: bytes
    head: int | None = None


class _Part(NamedTuple):
    """Samples of a data set for one call: rows, bundle and inputs."""

    rows: np.ndarray
    bundle: Bundle
    work: Work


class Answered(NamedTuple):
    """Answers to samples. ``filled``: absent modalities filled in by the answers' mask."""

    answers: Answers
    filled: tuple[str, ...]


class Engine:
    """The catalogue's models with a queue of requests. Made inside a running event loop."""

    def __init__(self, catalogue: Catalogue, limits: Limits, metrics: Metrics) -> None:
        self.catalogue, self.limits, self.metrics = catalogue, limits, metrics
        self.batcher = Batcher(limits, metrics.batch)
        self.room = Room(limits.room_bytes)
        # One at a time: what a request takes in memory while it is read is bounded, not what many take.
        self._reader = ThreadPoolExecutor(1, "edgefl-read")
        self._reading = 0

    async def close(self) -> None:
        """Stop; waiting requests are cancelled."""
        await self.batcher.close()
        await asyncio.to_thread(self._reader.shutdown)

    @property
    def waiting(self) -> int:
        """Number of requests waiting to be read or computed."""
        return self._reading + len(self.batcher)

    def model(self, name: str) -> Model:
        """The model of this name. Raises Refused."""
        found = self.catalogue.models.get(name)
        if found is None:
            raise Refused(404, f"there is no model {name!r:.300}", f"Models here: {', '.join(self.catalogue.models)}.")
        return found

    async def infer(self, asked: Asked) -> tuple[bytes, int | None]:
        """The body of the answer to an inference request, and its JSON's length with binary data. Raises Refused."""
        return await self._in_time(self._infer(asked))

    async def predict(self, files: Mapping[str, Value], mask: str | None) -> bytes:
        """The answer to a raw sample, its file or value of each modality, as JSON. Raises Refused."""
        return await self._in_time(self._predict(files, mask))

    async def _in_time(self, answer: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(answer, self.limits.answer_s)
        except asyncio.TimeoutError:
            raise Refused(504, f"no answer within {self.limits.answer_s:g} s", "Try again later.") from None

    async def _infer(self, asked: Asked) -> tuple[bytes, int | None]:
        model = self.model(asked.model)
        request, bundle, work = await self._read(lambda: self._understood(model, asked), len(asked.body))
        found = await self._answered(bundle, work)
        reply = Reply(model.name, _outputs(found.answers), _parameters(model, found), request.id)
        return await self._read(lambda: encode_reply(reply, request), found.answers.prediction.probabilities.nbytes)

    async def _predict(self, files: Mapping[str, Value], mask: str | None) -> bytes:
        model = self.catalogue.main

        def read() -> tuple[Dataset, list[_Part]]:
            data = _samples(files, model)
            if len(data) > MAX_WINDOWS:
                raise Refused(413, f"{data.ids[0]}: {len(data)} windows; at most {MAX_WINDOWS} are answered", "Cut it.")
            return data, list(_parts(model, data, mask, self.limits.batch_rows))

        data, parts = await self._read(read, SMALL_BYTES + 1)
        answers: list[Answers] = []
        entries: dict[int, dict[str, object]] = {}
        for part in parts:  # one after the other: a long recording leaves room for others between its pieces
            found = await self._answered(part.bundle, part.work)
            answers.append(replace(found.answers, rows=part.rows))
            how = {"mask": found.answers.mask, "filled": found.filled}
            for at, row in enumerate(part.rows.tolist()):
                truth = truth_of(data, row)
                entries[row] = entry(found.answers, at, data.ids[row], model.names, truth) | how
        return msgspec.json.encode(
            {
                "schema": SCHEMA,
                "model": model.name,
                "runs_on": model.runs_on,
                "untrained": model.untrained,
                "recordings": recording_entries(data, answers, model.names),
                "predictions": [entries[row] for row in sorted(entries)],
                "notes": data.notes,
            }
        )

    def _understood(self, model: Model, asked: Asked) -> tuple[InferRequest, Bundle, Work]:
        request, inputs = decode_request(asked.body, asked.head)
        mask = request.options.get("mask")
        if mask is not None and not isinstance(mask, str):
            raise bad(f"the parameter mask is {mask!r}, not a text")
        if unknown := [name for name in inputs if name not in model.inputs]:
            raise bad(f"{model.name} has no input {', '.join(unknown)}", f"Choose from: {', '.join(model.inputs)}.")
        shown = {m: self._tokens(m, inputs[m]) for m in model.inputs if m in inputs}
        return request, *_work(model, shown, mask)

    def _tokens(self, modality: str, values: Array) -> Array:
        """Texts as token ids; numbers as they are."""
        if values.dtype != object:
            return values
        to = self.catalogue.targets[modality]
        if to.kind != "text":
            raise bad(f"'{modality}' takes numbers, not BYTES", "Send raw files to POST /predict.")
        return np.stack([read_text(text, to) for text in values])

    async def _answered(self, bundle: Bundle, work: Work) -> Answered:
        prediction = await self.batcher.answer(work)
        manifest, given = bundle.manifest, tuple(work.inputs)
        filled = tuple(m for m in manifest.fills if m not in given)
        mask = (work.mask or manifest.mask) if filled else "none"
        self.metrics.samples(given, mask, work.rows)
        return Answered(Answers(manifest.name, given, np.arange(work.rows), prediction, mask), filled)

    async def _read(self, what: Callable[[], T], size: int) -> T:
        """Result of ``what``, run in a thread for large requests. Raises Refused for a faulty request."""
        try:
            return what() if size <= SMALL_BYTES else await self._in_thread(what)
        except (DataError, ExportError) as error:
            # A data set's remedy is none for a request.
            raise bad(error.message, None if error.remedy == DataError.remedy else error.remedy) from None

    async def _in_thread(self, what: Callable[[], T]) -> T:
        if self._reading >= self.limits.waiting:
            raise busy(f"{self._reading} requests wait to be read already")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, what)
        finally:  # one that is given up before its turn is not read
            self._reading -= 1


def _samples(files: Mapping[str, Value], model: Model) -> Dataset:
    """Samples of a request: each row of a lone table, else one sample of all parts. Raises Refused, DataError."""
    encoders, manifest = model.encoders, model.first.manifest
    for m, file in files.items():
        kinds = {"table", "text"} if len(files) == 1 else {"table"}
        if not isinstance(file, Path) or m not in encoders or encoders[m].kind not in kinds:
            continue
        if not takes_tables(file, {m: encoders[m]}):
            continue
        size = file.stat().st_size
        lines = [size] if size > MAX_CSV_BYTES else list(map(len, file.read_bytes().splitlines()))
        if len(lines) > MAX_WINDOWS or max(lines, default=0) > MAX_CSV_LINE:
            most = f"{MAX_CSV_BYTES} bytes, {MAX_WINDOWS} lines or {MAX_CSV_LINE} bytes a line"
            raise Refused(413, f"the table '{m}' has more than {most}", "Send it in pieces.")
        if len(files) == 1:
            return read_trained(file, encoders, model.names, manifest.label_column)
        rows = read_rows(file).rows
        if len(rows) != 1:
            what = f"the table '{m}' has {len(rows)} rows, and the other parts are of one sample"
            raise bad(what, "Send one row with them, or the table alone: each of its rows is answered.")
        row = {name: cell for name, cell in rows[0].items() if name != manifest.label_column}
        return raw_samples({**files, m: row}, encoders)
    return raw_samples(files, encoders)


def _work(model: Model, inputs: Mapping[str, Array], mask: str | None) -> tuple[Bundle, Work]:
    """The bundle for these inputs, and its work on them, checked. Raises Refused, DataError, ExportError."""
    bundle = model.pick(inputs)
    if bundle is None:
        needs = (
            f"takes exactly {', '.join(model.inputs)}" if model.complete else "has no bundle that uses them together"
        )
        raise bad(
            f"given {', '.join(inputs) or 'nothing'}: {model.name} {needs}",
            f"Inputs of its bundles: {'; '.join(', '.join(one.modalities) for one in model.bundles.values())}.",
        )
    fitted = bundle.fitted(inputs, mask)
    fills = set(bundle.manifest.fills) - set(inputs)
    return bundle, Work(bundle, {m: fitted[m] for m in inputs}, mask if fills else None)


def _parts(model: Model, data: Dataset, mask: str | None, most: int) -> Iterator[_Part]:
    """Samples grouped by their modalities, at most ``most`` each. Windows of a recording may lack some modalities."""
    names = [m for m in model.inputs if m in data.modalities]
    has = np.stack([data.present[m] for m in names], axis=1)
    for pattern in np.unique(has, axis=0)[::-1]:
        every = np.flatnonzero((has == pattern).all(axis=1))
        for start in range(0, len(every), most):
            rows = every[start : start + most]
            shown = {m: data.modalities[m][rows] for m, there in zip(names, pattern, strict=True) if there}
            yield _Part(rows, *_work(model, shown, mask))


def _outputs(answers: Answers) -> dict[str, Array]:
    found = answers.prediction
    if not len(found.classes):
        return {f"embedding.{m}": found.embeddings[m] for m in answers.modalities}
    labels = np.empty(len(found.labels), object)
    labels[:] = found.labels
    return {"logits": found.logits, "probabilities": found.probabilities, "label": labels}


def _parameters(model: Model, found: Answered) -> dict[str, Scalar]:
    """Response parameters on filled-in modalities. The protocol admits texts and numbers only, so matches are
    JSON in a text.
    """
    answers = found.answers
    told: dict[str, Scalar] = {"given": ",".join(answers.modalities), "mask": answers.mask, "bundle": answers.bundle}
    told |= {"filled": ",".join(found.filled)} if found.filled else {}
    for m in answers.prediction.matched:
        rows = [matched(answers, m, at, model.names) for at in range(len(answers.rows))]
        told[f"matched.{m}"] = msgspec.json.encode(rows).decode()
    return told | ({"untrained": ",".join(model.untrained)} if model.untrained else {})

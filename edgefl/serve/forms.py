"""Parsing of a raw sample: multipart/form-data with a file or text per modality, or a JSON object."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from edgefl.data.encoders import Encoders
from edgefl.data.raw_sample import SAMPLES, Value
from edgefl.data.readers import MAX_TEXT_BYTES
from edgefl.records import TableColumn, is_modality
from edgefl.serve.limits import MAX_JSON_BYTES, MAX_PARTS, Refused
from edgefl.serve.tensors import bad

Form = dict[str, tuple[str, bytes]]
#: Times its text that JSON takes as objects, about (``MAX_JSON_BYTES``).
OBJECT_BYTES = 16
_HOW = "Send one part a modality, such as curl -F image=@cat.png -F text='a cat'."
#: Columns of a table's row that an error shows.
_SHOWN = 3


def ways(encoders: Encoders) -> str:
    """Help text with curl commands to send a sample of these encoders: JSON for tables, else a form."""
    told = []
    parts = [f"{m}='a text'" if e.kind == "text" else f"{m}=@FILE" for m, e in encoders.items() if e.kind != "table"]
    if len(parts) < len(encoders):
        record = {
            m: {column.name: _example(column) for column in encoder.columns[:_SHOWN]} if encoder.columns else [1.5]
            for m, encoder in encoders.items()
            if encoder.kind == "table"
        }
        text = json.dumps(record, ensure_ascii=False).replace("'", "'\\''")
        told.append(f"as JSON: curl -H 'Content-Type: application/json' -d '{text}'")
    if parts:
        told.append(f"as a form, one part a modality: curl -F {' -F '.join(parts)}")
    return f"Send a sample {', or '.join(told)}."


def _example(column: TableColumn) -> str | float:
    dates = f"a date as {column.unit or '%Y-%m-%d'}"
    return dates if column.kind == "date" else column.values[0] if column.values else 1.5


async def read_form(headers: Headers, body: bytes, how: str = _HOW) -> Form:
    """Modality -> (file name's ending, "" for a text; bytes) of a form. Raises Refused."""
    kind = headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise Refused(415, "POST /predict takes application/json or multipart/form-data", how)
    # A client would choose among all codecs of Python: half characters of utf-7, and punycode's minutes for a megabyte.
    if parse_options_header(kind)[1].get(b"charset", b"utf-8").lower() not in {b"utf-8", b"utf8"}:
        raise Refused(415, "the form's charset is not utf-8", _HOW)

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(headers, pieces(), max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=MAX_TEXT_BYTES)
    parser.spool_max_size = len(body)  # it is in memory already
    found: Form = {}
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise bad(f"the form cannot be read: {getattr(error, 'message', error)}", _HOW) from None
    try:
        for name, value in form.multi_items():
            _check(name)
            if name in found:
                raise bad(f"the part '{name}' is given twice", _HOW)
            if isinstance(value, UploadFile):
                found[name] = (file_end(name, value.filename or ""), await value.read())
            else:
                found[name] = ("", value.encode())
    finally:
        await form.close()
    if not found:
        raise bad("the form has no part", how)
    return found


def file_end(name: str, file: str) -> str:
    """Ending of an uploaded file's name. Raises Refused for an unknown kind of file or an invalid modality name."""
    _check(name)
    end = Path(file).suffix.lower()
    if end not in SAMPLES:
        raise bad(f"'{name}' is the file {file!r:.60}; {', '.join(SAMPLES)} are read", _HOW)
    return end


def _check(name: str) -> None:
    if not is_modality(name):
        raise bad(f"{name!r:.60} cannot name a modality", _HOW)


def read_record(body: bytes, encoders: Encoders) -> dict[str, Value]:
    """Parse a JSON object: modality -> a table's row by column, a sensor's rows, or a text. Raises Refused."""
    how = ways(encoders)
    if len(body) > MAX_JSON_BYTES:
        raise Refused(413, f"a record of {len(body)} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        given = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the record cannot be read: {error}", how) from None
    record = given if given.keys() & encoders.keys() else _row(given, encoders)
    for name, value in record.items():
        _check(name)
        if isinstance(value, str) and len(value) > MAX_TEXT_BYTES:
            raise bad(f"the text '{name}' has {len(value)} characters; at most {MAX_TEXT_BYTES} are read", how)
    if not record or record.keys() - encoders.keys():
        raise bad(f"the record has {', '.join(record)[:60] or 'no modality'}; it is of {', '.join(encoders)}", how)
    found: dict[str, Value] = {}
    for name, value in record.items():
        if not isinstance(value, str | dict | list):
            raise bad(f"'{name}' is {value!r:.30}; it has to be a text, a row by columns or a list", how)
        found[name] = value
    return found


def _row(record: dict[str, object], encoders: Encoders) -> dict[str, object]:
    """A flat JSON row split by modality: a column for each text, all other columns for each table.

    Unchanged if no key is a column of ``encoders``.
    """
    columns = {m: [column.name for column in encoder.columns] for m, encoder in encoders.items()}
    if not any(name in record for names in columns.values() for name in names):
        return record
    texts = {
        m: names[0] for m, names in columns.items() if encoders[m].kind == "text" and names[:1] and names[0] in record
    }
    rest = {name: value for name, value in record.items() if name not in texts.values()}
    tables = {m: rest for m, encoder in encoders.items() if encoder.kind == "table"}
    return {**{m: record[name] for m, name in texts.items()}, **tables}


@contextmanager
def as_files(form: Form) -> Iterator[dict[str, Value]]:
    """The form's parts as temporary files for the block, texts unchanged."""
    with tempfile.TemporaryDirectory(prefix="edgefl-serve-") as folder:
        placed: dict[str, Value] = {}
        for modality, (end, data) in form.items():
            if not end:
                placed[modality] = data.decode()
                continue
            placed[modality] = path = Path(folder) / f"{modality}{end}"
            path.write_bytes(data)
        try:
            yield placed
        except Refused as error:  # clients learn nothing of our folders
            raise Refused(error.status, error.message.replace(f"{folder}/", ""), error.remedy) from None

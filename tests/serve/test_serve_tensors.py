"""What tensors and forms take to be refused: no more than their bytes."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import tracemalloc

import pytest
from starlette.datastructures import Headers

from edgefl.models.spec import EncoderSpec
from edgefl.records import TableColumn
from edgefl.serve.forms import read_form, read_record, ways
from edgefl.serve.limits import Refused
from edgefl.serve.tensors import decode_request


def tensor(shape: str, data: str) -> bytes:
    return f'{{"inputs": [{{"name": "text", "datatype": "BYTES", "shape": [{shape}], {data}}}]}}'.encode()


def test_texts_that_are_too_many_are_refused_before_they_are_made():
    blob = struct.pack("<I", 0) * 2**18  # each text would be an object of some 50 bytes
    head = tensor(f"1, {2**18}", f'"parameters": {{"binary_data_size": {len(blob)}}}')
    body = head + blob
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="one text a sample is expected") as raised:
            decode_request(body, len(head))
        assert tracemalloc.get_traced_memory()[1] < 2**17
    finally:
        tracemalloc.stop()
    assert raised.value.status == 400


@pytest.mark.parametrize("data", ['"data": [1]', '"parameters": {"binary_data_size": 0}'])
@pytest.mark.parametrize("digits", [10, 2600, 5000])
def test_an_axis_longer_than_any_body_is_refused(data: str, digits: int):
    body = tensor(f"1, {'9' * digits}, {'9' * digits}", data)
    with pytest.raises(Refused, match="no inference request") as raised:
        decode_request(body, len(body) if "parameters" in data else None)
    assert len(raised.value.told) < 300


def test_a_shape_as_metadata_has_it_is_told_what_is_expected():
    with pytest.raises(Refused, match=r"has the shape \[-1\]: one sample or more"):
        decode_request(tensor("-1", '"data": ["a"]'), None)


@pytest.mark.parametrize("charset", ["utf-7", "punycode", '"UTF-16"', "no-such"])
def test_a_form_in_another_charset_is_refused_unread(charset: str):
    body = b'--b\r\ncontent-disposition: form-data; name="text"\r\n\r\n+2AA-\r\n--b--\r\n'
    headers = Headers({"content-type": f"multipart/form-data; charset={charset}; boundary=b"})
    with pytest.raises(Refused, match="charset is not utf-8") as raised:
        asyncio.run(read_form(headers, body))
    assert raised.value.status == 415


def test_a_form_in_utf_8_that_says_so_is_read():
    body = '--b\r\ncontent-disposition: form-data; name="text"\r\n\r\nčau\r\n--b--\r\n'.encode()
    headers = Headers({"content-type": "multipart/form-data; charset=UTF-8; boundary=b"})
    assert asyncio.run(read_form(headers, body)) == {"text": ("", "čau".encode())}


@pytest.mark.parametrize("where", ["request", "input", "output"])
def test_parameters_beyond_a_few_are_refused_before_they_are_made(where: str):
    many = "{" + ",".join(f'"p{i}":1' for i in range(560_000)) + "}"
    places = {place: f',"parameters":{many if place == where else "{}"}' for place in ("request", "input", "output")}
    body = (
        f'{{"inputs":[{{"name":"a","shape":[1],"datatype":"FP32","data":[1]{places["input"]}}}],'
        f'"outputs":[{{"name":"logits"{places["output"]}}}]{places["request"]}}}'
    )
    begun = time.process_time()
    with pytest.raises(Refused, match="more than 16384 bytes of parameters"):
        decode_request(body.encode(), None)
    assert time.process_time() - begun < 0.1


@pytest.mark.parametrize("given", ["1", "[]", '{"mask":[]}', '{"mask":{}}'])
def test_parameters_that_are_none_are_refused(given: str):
    body = f'{{"inputs":[{{"name":"a","shape":[1],"datatype":"FP32","data":[1]}}],"parameters":{given}}}'
    with pytest.raises(Refused, match="is no inference request: its parameters"):
        decode_request(body.encode(), None)


def test_how_to_send_a_sample_names_the_bundles_own_columns():
    columns = (
        TableColumn("Sales"),
        TableColumn("Region", "category", ("Côte d'Or", "East")),
        TableColumn("on", "date"),
    )
    table = EncoderSpec("table", (3, 2), columns=columns)
    told = ways({"features": table, "photo": EncoderSpec("vision", (8, 8, 3))})
    assert told == (
        "Send a sample as JSON: curl -H 'Content-Type: application/json' -d "
        """'{"features": {"Sales": 1.5, "Region": "Côte d'\\''Or", "on": "a date as %Y-%m-%d"}}', """
        "or as a form, one part a modality: curl -F photo=@FILE."
    )
    with pytest.raises(Refused, match="takes application/json or") as raised:
        asyncio.run(read_form(Headers({"content-type": "application/x-www-form-urlencoded"}), b"{}", told))
    assert raised.value.remedy == told
    with pytest.raises(Refused, match="the record has Turnover; it is of features"):
        read_record(b'{"Turnover": "3"}', {"features": table})
    with pytest.raises(Refused, match="'photo' is 3; it has to be a text"):
        read_record(b'{"photo": 3}', {"features": table, "photo": EncoderSpec("vision", (8, 8, 3))})


def test_a_row_as_it_is_in_a_file_is_split_into_modalities():
    table = EncoderSpec("table", (2, 2), columns=(TableColumn("Sales"), TableColumn("Region", "category", ("East",))))
    note = EncoderSpec("text", (8,), columns=(TableColumn("Note"),))
    row = {"Note": "late", "Sales": 3, "Region": "East", "else": None}
    assert read_record(json.dumps(row).encode(), {"features": table, "note": note}) == {
        "features": {"Sales": 3, "Region": "East", "else": None},
        "note": "late",
    }
    assert read_record(b'{"features": {"Sales": 3}}', {"features": table}) == {"features": {"Sales": 3}}

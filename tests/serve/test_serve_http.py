"""The server as a process: every route, any subset of modalities, raw files, and what it refuses."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from serve_fixture import LABELS, Server, arrays, bundles, json_inputs, post, running, windowed

from edgefl.data.raw_sample import raw_samples
from edgefl.export.runtime import load_bundle
from edgefl.models.spec import EncoderSpec

TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as started:
        yield started


def test_the_first_sentence_says_where_what_and_by_what(server: Server):
    assert server.said.startswith("Serving demo (any of acc, image, text), and each alone as demo-acc, ")
    assert f" at {server.url}, computed by CPUExecutionProvider of onnxruntime" in server.said


def test_it_loads_no_torch_and_no_database(server: Server):
    loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "onnxruntime" in loaded
    assert "libtorch" not in loaded
    assert "_sqlite3" not in loaded


def test_health_server_and_models(server: Server):
    def get(path: str) -> object:
        return httpx.get(server.url + path).raise_for_status().json()

    assert get("/v2/health/live") == {"live": True}
    assert get("/v2/health/ready") == {"ready": True}
    assert get("/v2")["extensions"] == ["binary_tensor_data"]
    assert get("/v2/models") == {"models": ["demo", "demo-acc", "demo-image", "demo-text", "demo-acc+image+text"]}
    assert get("/v2/models/demo-acc+image+text/ready") == {"name": "demo-acc+image+text", "ready": True}
    told = get("/v2/models/demo/versions/1")
    assert told["inputs"] == [
        {"name": "acc", "datatype": "FP32", "shape": [-1, 4, 3]},
        {"name": "image", "datatype": "FP32", "shape": [-1, 8, 8, 3]},
        {"name": "text", "datatype": "INT64", "shape": [-1, -1]},
    ]
    assert told["outputs"][-1] == {"name": "label", "datatype": "BYTES", "shape": [-1]}
    assert told["parameters"]["inputs_needed"] == "any"
    assert told["parameters"]["providers"] == "CPUExecutionProvider"
    assert told["parameters"]["labels"].split("\n") == list(LABELS)
    assert get("/v2/models/demo-acc")["parameters"]["inputs_needed"] == "all"


@pytest.mark.parametrize("given", [("acc",), ("image",), ("acc", "text"), ("acc", "image", "text")])
def test_any_subset_is_answered_and_says_what_stood_in(server: Server, given: tuple[str, ...]):
    some = {m: a for m, a in arrays(3).items() if m in given}
    answer = post(server.url, {"id": "x7", "inputs": json_inputs(some)}).raise_for_status().json()
    alone = len(given) == 1
    expected = load_bundle(bundles() / (given[0] if alone else "acc+image+text")).predict(some)
    found = {one["name"]: one for one in answer["outputs"]}
    assert answer["id"] == "x7"
    assert found["label"]["data"] == list(expected.labels)
    np.testing.assert_allclose(
        np.reshape(found["probabilities"]["data"], found["probabilities"]["shape"]), expected.probabilities, atol=1e-6
    )
    told = answer["parameters"]
    absent = [m for m in arrays() if m not in given]
    assert told["given"] == ",".join(given)
    if not absent:
        assert (told["mask"], "filled" in told) == ("none", False)
        return
    assert (told["mask"], told["filled"]) == ("prototype", ",".join(absent))
    assert json.loads(told[f"matched.{absent[0]}"])[2] == [
        {"label": "run", "weight": 0.75},
        {"label": "rest", "weight": 0.25},
    ]


def test_a_bundle_alone_takes_exactly_its_inputs(server: Server):
    some = arrays()
    assert post(server.url, {"inputs": json_inputs(some)}, "demo-acc+image+text").status_code == 200
    refused = post(server.url, {"inputs": json_inputs({"acc": some["acc"]})}, "demo-acc+image+text")
    assert refused.status_code == 400
    assert "takes exactly acc, image, text" in refused.json()["error"]


def test_binary_data_in_and_out(server: Server):
    x = arrays(2)["acc"]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "acc",
                    "shape": [2, 4, 3],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": x.nbytes},
                }
            ],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}, {"name": "label"}],
        }
    ).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    answer = httpx.post(f"{server.url}/v2/models/demo/infer", content=head + x.tobytes(), headers=length)
    size = int(answer.headers["inference-header-content-length"])
    outputs = json.loads(answer.content[:size])["outputs"]
    assert [one["name"] for one in outputs] == ["logits", "label"]
    assert outputs[0]["parameters"] == {"binary_data_size": 24}
    expected = load_bundle(bundles() / "acc").predict({"acc": x})
    np.testing.assert_allclose(np.frombuffer(answer.content[size:], "<f4").reshape(2, 3), expected.logits, atol=1e-6)
    assert outputs[1]["data"] == list(expected.labels)


def test_texts_are_tokenised_by_the_server(server: Server):
    to = EncoderSpec(kind="text", input_shape=(6,), vocabulary=100)
    ids = raw_samples({"text": "a red cat"}, {"text": to}).modalities["text"]
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a red cat"]}
    by_text = post(server.url, {"inputs": [tensor]}).raise_for_status().json()
    by_ids = post(server.url, {"inputs": json_inputs({"text": np.asarray(ids)})}).json()
    assert by_text["outputs"] == by_ids["outputs"]
    blob = struct.pack("<I", 9) + b"a red cat"
    head = json.dumps({"inputs": [{**tensor, "data": None, "parameters": {"binary_data_size": len(blob)}}]}).encode()
    binary = httpx.post(
        f"{server.url}/v2/models/demo/infer",
        content=head + blob,
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    assert binary.raise_for_status().json()["outputs"] == by_ids["outputs"]


def test_raw_files_of_several_modalities(server: Server):
    picture = io.BytesIO()
    Image.new("RGB", (16, 16), (255, 0, 0)).save(picture, "PNG")
    files = {"image": ("a cat.png", picture.getvalue()), "acc": ("walk.csv", b"x,y,z\n" + b"1,2,3\n" * 4)}
    body = httpx.post(f"{server.url}/predict", files=files, data={"text": "a cat"}).raise_for_status().json()
    image = np.zeros((1, 8, 8, 3), np.float32)
    image[..., 0] = 1
    to = EncoderSpec(kind="text", input_shape=(6,), vocabulary=100)
    ids = raw_samples({"text": "a cat"}, {"text": to}).modalities["text"]
    expected = load_bundle(bundles() / "acc+image+text").predict(
        {"acc": np.tile(np.float32([1, 2, 3]), (1, 4, 1)), "image": image, "text": np.asarray(ids)}
    )
    (found,) = body["predictions"]
    assert (found["label"], found["given"], found["mask"]) == (expected.labels[0], ["acc", "image", "text"], "none")
    assert list(found["probabilities"].values()) == pytest.approx(expected.probabilities[0].tolist(), abs=1e-5)
    assert body["schema"] == "edgefl.predictions/1"
    zero = httpx.post(f"{server.url}/predict?mask=zero", files={"text": (None, "a cat")}).json()["predictions"][0]
    assert (zero["mask"], zero["filled"]) == ("zero", ["acc", "image"])


def test_a_recording_is_answered_by_its_windows(tmp_path: Path):
    folder = windowed(tmp_path)
    rows = np.random.default_rng(3).standard_normal((600, 3)).round(3)
    file = io.BytesIO()
    np.savetxt(file, rows, delimiter=",", fmt="%.3f")
    with running(where=folder) as own:
        body = httpx.post(f"{own.url}/predict", files={"acc": ("walk.csv", file.getvalue())}).raise_for_status().json()
        long = {"acc": ("day.csv", b"1,2,3\n" * 4 * 4097)}
        refused = httpx.post(f"{own.url}/predict", files=long)
        assert (refused.status_code, "4097 windows" in refused.json()["error"]) == (413, True)
    expected = load_bundle(folder).predict({"acc": rows.reshape(150, 4, 3).astype(np.float32)}).probabilities
    (recording,) = body["recordings"]
    assert (recording["windows"], len(body["predictions"])) == (150, 150)
    assert list(recording["probabilities"].values()) == pytest.approx(expected.mean(axis=0).tolist(), abs=1e-5)
    found = [list(one["probabilities"].values()) for one in body["predictions"]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert body["predictions"][149]["id"] == "acc.csv#149"


def test_a_file_without_a_form_says_how(server: Server):
    refused = httpx.post(f"{server.url}/predict", content=b"x", headers={"content-type": "image/png"})
    assert refused.status_code == 415
    assert "curl -F acc=@FILE -F image=@FILE -F text='a text'" in refused.json()["error"]
    refused = httpx.post(f"{server.url}/predict", files={"acc": ("../../etc/passwd", b"x")})
    assert refused.status_code == 400
    assert ".csv" in refused.json()["error"]
    refused = httpx.post(f"{server.url}/predict", files={"acc": ("walk.csv", b"1,2\n")})
    assert refused.json()["error"].startswith("acc.csv: is no sample of these bundles (acc: has shape [1, 2]")


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"inputs": []}, 400, "given nothing"),
        ({"inputs": [{"name": "heart", "shape": [1], "datatype": "FP32", "data": [1]}]}, 400, "no input heart"),
        ({"inputs": [{"name": "acc", "shape": [1, 4, 3], "datatype": "FP32", "data": [1]}]}, 400, "another number"),
        (
            {"inputs": [{"name": "acc", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]},
            400,
            "takes [batch, 4, 3]",
        ),
        ({"inputs": [{"name": "acc", "shape": [1], "datatype": "X", "data": [1]}]}, 400, "datatype 'X'"),
        ({"inputs": [{"name": "acc", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}, 400, "takes numbers"),
        ({"inputs": [{"name": "acc", "shape": [999, 4, 3], "datatype": "FP32", "data": []}]}, 413, "may have 256"),
        ({"inputs": [{"name": "text", "shape": [1, 4], "datatype": "INT64", "data": [1, 2, 3, 400]}]}, 400, "0 to 99"),
        ({"parameters": {"mask": "magic"}}, 400, "does not offer the mask 'magic'"),
        ({"outputs": [{"name": "colour"}]}, 400, "no output colour"),
        ({"inputs": "all"}, 400, "no inference request"),
    ],
)
def test_a_bad_request_names_what_is_wrong(server: Server, change: dict[str, object], status: int, said: str):
    body = {"inputs": json_inputs({"acc": arrays()["acc"]}), **change}
    refused = post(server.url, body)
    assert refused.status_code == status
    assert list(refused.json()) == ["error"]
    assert said in refused.json()["error"]


def test_unknown_places_and_methods_are_json_too(server: Server):
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v2/models/none", 404),
        ("GET", "/v2/models/demo/versions/2", 404),
        ("GET", "/v2/models/demo/infer", 405),
        ("POST", "/v2", 405),
    ):
        answer = httpx.request(method, server.url + path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_host_names_of_others_are_refused(server: Server):
    refused = httpx.get(f"{server.url}/v2", headers={"host": "evil.example"})
    assert (refused.status_code, list(refused.json())) == (403, ["error"])


def test_with_a_token_only_health_is_open():
    with running(environment={"EDGEFL_SERVE_TOKEN": TOKEN}) as server:
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
        for path in ("/v2", "/metrics", "/v2/models/demo"):
            assert httpx.get(server.url + path).status_code == 401
            assert httpx.get(server.url + path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
            assert httpx.get(server.url + path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_it_ends_in_order_and_metrics_count(server: Server):
    with running() as own:
        post(own.url, {"inputs": json_inputs({"acc": arrays(2)["acc"]})}).raise_for_status()
        post(own.url, {"inputs": []})
        text = httpx.get(f"{own.url}/metrics").text
        assert 'edgefl_serve_requests_total{by="http",code="200",model="demo"} 1.0' in text
        assert 'edgefl_serve_requests_total{by="http",code="400",model="demo"} 1.0' in text
        assert 'edgefl_serve_samples_total{given="acc",mask="prototype"} 2.0' in text
        assert "process_resident_memory_bytes" in text
        assert own.stop() == 0
        assert own.process.stderr is not None
        assert own.process.stderr.read() == ""


def test_a_record_as_json_is_a_raw_sample(server: Server):
    record = {"acc": [[1, 2, 3]] * 4, "text": "a cat"}
    body = httpx.post(f"{server.url}/predict", json=record).raise_for_status().json()
    form = {"acc": ("walk.csv", b"1,2,3\n" * 4), "text": (None, "a cat")}
    same = httpx.post(f"{server.url}/predict", files=form).raise_for_status().json()
    assert body["predictions"][0]["probabilities"] == same["predictions"][0]["probabilities"]
    for wrong, said in [
        ([1], "cannot be read"),
        ({}, "the record has no modality; it is of acc, image, text"),
        ({"mass": "3"}, "the record has mass; it is of acc, image, text. Send a sample as a form"),
        ({"acc": 3}, "'acc' is 3; it has to be a text, a row by columns or a list"),
        ({"a/b": "x"}, "cannot name"),
        ({"image": "/etc/passwd"}, "a text is no vision sample"),
        ({"acc": [[1, "x"]]}, "are not numbers"),
    ]:
        refused = httpx.post(f"{server.url}/predict", json=wrong)
        assert refused.status_code == 400
        assert said in refused.json()["error"]

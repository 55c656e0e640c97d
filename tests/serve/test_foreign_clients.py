"""Clients that others wrote: Triton's (in the extra `dev`), and KServe's where an environment has it.

KServe's package replaces pandas, protobuf and psutil by its own choice, so it is never in our environment:
``EDGEFL_KSERVE_PYTHON`` names the Python of another; `make test-kserve` makes one, in the nightly tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from serve_fixture import LABELS, Server, arrays, bundles, running

from edgefl.export.runtime import load_bundle

KSERVE = os.environ.get("EDGEFL_KSERVE_PYTHON", "")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as made:
        yield made


def test_triton_finds_server_and_models(client: triton.InferenceServerClient):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("demo", "1")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata()["name"] == "edgefl"
    assert [one["name"] for one in client.get_model_metadata("demo-acc+image+text")["inputs"]] == [*arrays()]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("given", [("acc",), ("acc", "image", "text")])
def test_triton_infers(client: triton.InferenceServerClient, given: tuple[str, ...], binary: bool):
    some = {m: a for m, a in arrays(5).items() if m in given}
    inputs = []
    for m, a in some.items():
        one = triton.InferInput(m, list(a.shape), "INT64" if a.dtype == np.int64 else "FP32")
        inputs.append(one.set_data_from_numpy(a, binary_data=binary))
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probabilities", "label")]
    answer = client.infer("demo", inputs, request_id="t1", outputs=wanted)
    expected = load_bundle(bundles() / ("acc" if len(given) == 1 else "acc+image+text")).predict(some)
    np.testing.assert_allclose(answer.as_numpy("probabilities"), expected.probabilities, atol=1e-6)
    labels = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("label").tolist()]
    assert labels == list(expected.labels)
    assert set(labels) <= set(LABELS)
    assert answer.get_response()["id"] == "t1"
    assert answer.get_response()["parameters"]["given"] == ",".join(given)


def test_triton_by_default_gets_everything_as_binary_data(client: triton.InferenceServerClient):
    x = arrays(2)["acc"]
    answer = client.infer("demo", [triton.InferInput("acc", [2, 4, 3], "FP32").set_data_from_numpy(x)])
    assert all("binary_data_size" in one["parameters"] for one in answer.get_response()["outputs"])
    assert answer.as_numpy("logits").shape == (2, 3)


def test_triton_sends_texts(client: triton.InferenceServerClient):
    texts = np.array([b"a red cat", "café".encode()], dtype=object)
    answer = client.infer("demo", [triton.InferInput("text", [2], "BYTES").set_data_from_numpy(texts)])
    assert answer.as_numpy("probabilities").shape == (2, 3)


def test_triton_gets_the_reason_of_a_refusal(client: triton.InferenceServerClient):
    wrong = triton.InferInput("acc", [1, 2], "FP32").set_data_from_numpy(np.zeros((1, 2), np.float32))
    with pytest.raises(triton.InferenceServerException, match=r"the bundle takes \[batch, 4, 3\]"):
        client.infer("demo", [wrong])


@pytest.mark.skipif(not KSERVE, reason="no environment with kserve (EDGEFL_KSERVE_PYTHON)")
def test_kserve_infers(server: Server):
    script = Path(__file__).with_name("kserve_client.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([KSERVE, str(script), server.url], capture_output=True, text=True, timeout=100, env=clean)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, True)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 4, 3)
    expected = load_bundle(bundles() / "acc").predict({"acc": x}).probabilities.ravel()
    for kind in ("json", "binary"):
        assert found[kind]["id"] == "k1"
        assert found[kind]["filled"] == "image,text"
        assert found[kind]["probabilities"] == pytest.approx(expected.tolist(), abs=1e-6)

"""KServe's own client against a server, in an environment that has it: python kserve_client.py URL. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(url: str) -> dict[str, object]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
    found: dict[str, object] = {
        "live": await client.is_server_live(url),
        "ready": await client.is_server_ready(url),
        "model_ready": await client.is_model_ready(url, "demo"),
    }
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 4, 3)
    for name, binary in (("json", False), ("binary", True)):
        tensor = InferInput("acc", [1, 4, 3], "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        request = InferRequest("demo", [tensor], request_id="k1", parameters={"binary_data_output": binary})
        answer = await client.infer(url, request, model_name="demo")
        outputs = {one.name: one.as_numpy() for one in answer.outputs}
        found[name] = {
            "id": answer.id,
            "probabilities": outputs["probabilities"].ravel().tolist(),
            "filled": str(answer.parameters["filled"]),
        }
    await client.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(sys.argv[1]))))

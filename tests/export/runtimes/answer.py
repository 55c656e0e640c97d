"""Answers the cases of a file by one runtime, in an environment that has that runtime alone: RUNTIME MODEL CASES.

CASES is JSON: a list of calls, each {input: {dtype, shape, data}}. Prints a list of {output: nested list}.
"""

import json
import sys
from pathlib import Path

import numpy as np

WANTED = ["logits", "probabilities"]


def onnxruntime(model):
    import onnxruntime as ort

    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return ort.__version__, lambda feeds: session.run(WANTED, feeds)


def reference(model):
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    return onnx.__version__, lambda feeds: evaluator.run(WANTED, feeds)


def openvino(model):
    import openvino as ov

    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def answer(feeds):
        found = compiled(feeds)
        return [found[name] for name in WANTED]

    return ov.__version__.split("-")[0], answer


def tract(model):
    import tract

    read = tract.onnx().load(model)
    names = [read.input_name(i) for i in range(read.input_count())]
    runnable = read.into_model().into_runnable()

    def answer(feeds):
        # In the model's order: its names are not those of the values.
        return [one.to_numpy() for one in runnable.run([feeds[name] for name in names])[: len(WANTED)]]

    return tract.version(), answer


RUNTIMES = {one.__name__: one for one in (onnxruntime, reference, openvino, tract)}


def main():
    runtime, model, cases = sys.argv[1:]
    version, answer = RUNTIMES[runtime](model)
    answers = []
    for case in json.loads(Path(cases).read_text()):
        feeds = {name: np.array(one["data"], one["dtype"]).reshape(one["shape"]) for name, one in case.items()}
        answers.append({name: np.asarray(value).tolist() for name, value in zip(WANTED, answer(feeds), strict=True)})
    sys.stdout.write(json.dumps({"version": version, "answers": answers}) + "\n")


main()

"""ONNX bundles and serving."""

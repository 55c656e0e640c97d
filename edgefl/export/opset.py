"""Conversion of ONNX models from operator set 18, torch's oldest, to 17.

onnx's own converter has no way from 18 to 17 for the operator Pad, among others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.errors import ExportError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

#: The oldest that torch's exporter writes.
LEAST = 18


def lower(proto: ModelProto, opset: int) -> None:
    """Convert the model to ``opset`` in place, and set the oldest format version that may hold it.

    Raises ExportError for an operator that 17 lacks.
    """
    import onnx

    (own,) = [one for one in proto.opset_import if one.domain in {"", "ai.onnx"}]
    if opset < own.version:
        writer = _Seventeen(proto)
        odd = [node.op_type for node in proto.graph.node if not writer.same(node)]
        if opset != LEAST - 1 or odd:
            raise ExportError(
                f"the operators {', '.join(sorted(set(odd)))} cannot be written in operator set {opset}",
                remedy=f"Export with --opset {own.version}.",
            )
        own.version = opset
    proto.ir_version = onnx.helper.find_min_ir_version_for(proto.opset_import)


class _Seventeen:
    """Rewriter of nodes from set 18 to 17, in place."""

    def __init__(self, proto: ModelProto) -> None:
        import onnx

        inferred = onnx.shape_inference.infer_shapes(proto).graph
        known = (*inferred.value_info, *inferred.input, *inferred.output)
        self.graph = proto.graph
        self.shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in known}
        self.constants = {one.name: one for one in proto.graph.initializer}

    def same(self, node: NodeProto) -> bool:
        """Rewrite a node; True if it now means the same in set 17."""
        import onnx

        if node.op_type == "Pad":
            return len(node.input) < 4 or not node.input[3]  # axes, which 17 has not
        if node.op_type == "Split":
            return self._sizes_told(node)
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum":  # which takes axes since 13
            return self._axes_told(node)
        return int(onnx.defs.get_schema(node.op_type, LEAST, node.domain).since_version) < LEAST

    def _sizes_told(self, node: NodeProto) -> bool:
        """Give a Split the size of each piece (17) in place of their number (18); False if unknown."""
        import onnx

        counted = [one for one in node.attribute if one.name == "num_outputs"]
        if not counted:
            return True
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        shape = self.shapes.get(node.input[0], [])
        size = shape[axis] if -len(shape) <= axis < len(shape) else 0
        if not size:
            return False
        piece = -(-size // counted[0].i)
        sizes = [min(piece, size - start) for start in range(0, size, piece)]
        name = f"{node.output[0]}.sizes"
        self.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(sizes)], sizes))
        node.input.append(name)
        node.attribute.remove(counted[0])
        return True

    def _axes_told(self, node: NodeProto) -> bool:
        """Turn the axes of a Reduce from an input (18) into an attribute (17); False if not constant."""
        import onnx

        idle = [one for one in node.attribute if one.name == "noop_with_empty_axes"]
        if any(one.i for one in idle):
            return False
        for one in idle:
            node.attribute.remove(one)
        if len(node.input) < 2:
            return True
        if node.input[1] not in self.constants:
            return False
        axes = onnx.numpy_helper.to_array(self.constants[node.input[1]]).tolist()
        del node.input[1:]
        node.attribute.append(onnx.helper.make_attribute("axes", axes))
        return True

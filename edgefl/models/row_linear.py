"""Linear maps computed by blocks of rows: no whole gradient, and weights that may lie in a file.

y = x W^T + b with W [m, n]. In the backward pass, for each block W_k of rows: dx <- dx + dy_k W_k, then the optimiser
changes W_k by its gradient dy_k^T x, which is given back before the next block's comes. LOMO (arXiv 2306.09782) does so
with one parameter at a time; the largest gradient of a head 4096 wide is 64 MiB, a block's 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.storage.file_pages import copied, let_go, new_file

#: Weights of a block. 256 rows of 4096: wide enough for the full speed of a matrix product.
BLOCK_BYTES = 4 * 2**20


class OuterProduct(NamedTuple):
    """A weight's gradient in two factors, dy^T x: ``left`` dy [B, m], ``right`` x [B, n]."""

    left: Tensor
    right: Tensor

    def squared_norm(self) -> Tensor:
        """Squared Frobenius norm of dy^T x, a scalar: the sum of (dy dy^T) * (x x^T), both [B, B]."""
        return ((self.left @ self.left.T) * (self.right @ self.right.T)).sum().clamp(min=0)

    def row_squares(self) -> Tensor:
        """Sum of the squares of each row [m]."""
        return _rounded(((self.right @ self.right.T) @ self.left).mul_(self.left).sum(0))

    def column_squares(self) -> Tensor:
        """Sum of the squares of each column [n]."""
        return _rounded(((self.left @ self.left.T) @ self.right).mul_(self.right).sum(0))

    def scaled(self, by_row: Tensor, by_column: Tensor) -> OuterProduct:
        """Each row times its number [m, 1], each column times its own [1, n]."""
        return OuterProduct(self.left * by_row.T, self.right * by_column)

    def over_rows(self, numbers: Tensor) -> Tensor:
        """Sum of the rows [n], each times its number [m]."""
        return (self.left @ numbers) @ self.right

    def over_columns(self, numbers: Tensor) -> Tensor:
        """Sum of the columns [m], each times its number [n]."""
        return (self.right @ numbers) @ self.left


class WholeGradient(NamedTuple):
    """A weight's gradient [m, n] itself, to be asked as ``OuterProduct`` is."""

    value: Tensor

    def squared_norm(self) -> Tensor:
        """Squared Frobenius norm, a scalar."""
        return self._squares(None)

    def row_squares(self) -> Tensor:
        """Sum of the squares of each row [m]."""
        return self._squares(1)

    def column_squares(self) -> Tensor:
        """Sum of the squares of each column [n]."""
        return self._squares(0)

    def scaled(self, by_row: Tensor, by_column: Tensor) -> WholeGradient:
        """Each row times its number [m, 1], each column times its own [1, n]."""
        return WholeGradient((self.value * by_row).mul_(by_column))

    def over_rows(self, numbers: Tensor) -> Tensor:
        """Sum of the rows [n], each times its number [m]."""
        return numbers @ self.value

    def over_columns(self, numbers: Tensor) -> Tensor:
        """Sum of the columns [m], each times its number [n]."""
        return self.value @ numbers

    def _squares(self, over: int | None) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.value, dim=over)  # without an array of squares
        return norms.square_()


def _rounded(squares: Tensor) -> Tensor:
    """Squares that are sums of products, none below what such a sum is rounded by."""
    return torch.maximum(squares, squares.mean() * torch.finfo(squares.dtype).eps).clamp_(min=0)


Gradient = OuterProduct | WholeGradient
#: Changes the rows of a weight by their gradient: (rows, weights [k, n], gradient [k, n]).
ChangeRows = Callable[[slice, Tensor, Tensor], None]
#: Begins the update of a weight by a gradient in factors.
BeginUpdate = Callable[[nn.Parameter, OuterProduct], ChangeRows]


class FileParameter(nn.Parameter):
    """A parameter with values in a file; a deep copy's are in memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy: nn.Parameter = memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))
        return copy


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """Slices of a matrix' rows. Pages that lie in a file are given back after each."""
    step = max(1, BLOCK_BYTES * len(weight) // max(1, weight.nbytes))
    for first in range(0, len(weight), step):
        rows = slice(first, min(first + step, len(weight)))
        yield rows
        if isinstance(weight, FileParameter):
            let_go(weight.detach()[rows].numpy())


class InFile(nn.Module):
    """A layer whose weights may lie in a file."""

    @property
    def on_disk(self) -> bool:
        """Whether the weights lie in a file."""
        return isinstance(self.weight, FileParameter)

    def release(self, rows: slice = slice(None)) -> None:
        """Give back the memory of rows that lie in a file."""
        if isinstance(weight := self.weight, FileParameter):
            let_go(weight.detach()[rows].numpy())


class RowLinear(nn.Linear, InFile):
    """A linear map by blocks of rows. Made of one in place by ``by_rows``.

    ``begin``: begins the optimiser's update inside the backward pass, of a weight that nothing else reads
    (``read_once``); None: the gradient is left whole, as torch does.
    """

    begin: BeginUpdate | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., m]."""
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        if not self.on_disk and not learns:
            return F.linear(x, self.weight, self.bias)
        result: Tensor = _ByRows.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result


class FileEmbedding(nn.Embedding, InFile):
    """A table of embeddings with weights in a file. Made of one in place by ``by_rows``."""

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of rows [...] -> rows [..., n]."""
        found = super().forward(x)
        self.release()
        return found


class _ByRows(torch.autograd.Function):
    """A linear map and its gradients by blocks of rows.

    The weight is read through the layer, not saved for the backward pass, so that it may change in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.biased = layer, bias is not None
        if not layer.on_disk:
            return F.linear(x, weight, bias)
        flat = x.reshape(-1, layer.in_features)
        result = x.new_empty(len(flat), layer.out_features)
        for rows in row_blocks(layer.weight):
            out, some = result[:, rows], weight[rows].T
            torch.mm(flat, some, out=out) if bias is None else torch.addmm(bias[rows], flat, some, out=out)
        return result.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        factors = OuterProduct(gradients[0].reshape(-1, layer.out_features), x.reshape(-1, layer.in_features))
        weight, change = layer.weight.detach(), None
        if ctx.needs_input_grad[1] and layer.begin is not None:
            change = layer.begin(layer.weight, factors)
        back = torch.zeros_like(factors.right) if ctx.needs_input_grad[0] else None
        for rows in row_blocks(layer.weight):
            if back is not None:
                back.addmm_(factors.left[:, rows], weight[rows])
            if change is not None:
                change(rows, weight[rows], factors.left[:, rows].T @ factors.right)
        whole = factors.left.T @ factors.right if ctx.needs_input_grad[1] and change is None else None
        of_bias = factors.left.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        return None if back is None else back.view_as(x), whole, of_bias, None


def by_rows(module: nn.Module, least_bytes: int, folder: Path | None = None) -> None:
    """Have a part's linear maps with more than ``least_bytes`` of weights computed by rows.

    ``folder``: of files that hold their weights, and those of large embeddings; None: weights stay where they are.
    Raises StoreError when the disk is full.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.nbytes > least_bytes:
            layer.__class__ = RowLinear
        elif type(layer) is nn.Embedding and layer.weight.nbytes > least_bytes and folder is not None:
            layer.__class__ = FileEmbedding
        if folder is not None and isinstance(layer, RowLinear | FileEmbedding) and not layer.on_disk:
            _to_file(layer, folder)


def _to_file(layer: RowLinear | FileEmbedding, folder: Path) -> None:
    weight = layer.weight.detach()
    if weight.is_meta:
        return
    values = np.frombuffer(new_file(weight.nbytes, folder), np.float32).reshape(weight.shape)
    copied(weight.numpy(), values)
    layer.weight = FileParameter(torch.from_numpy(values), requires_grad=layer.weight.requires_grad)


def in_files(module: nn.Module) -> list[RowLinear | FileEmbedding]:
    """The modules inside a module whose weights lie in files, or would but for the meta device."""
    return [one for one in module.modules() if isinstance(one, RowLinear | FileEmbedding)]


def row_maps(module: nn.Module) -> list[RowLinear]:
    """The linear maps of a module that are computed by rows."""
    return [layer for layer in module.modules() if isinstance(layer, RowLinear)]


def read_once(loss: Tensor, layers: Iterable[RowLinear]) -> list[RowLinear]:
    """Those of the layers with a weight that one operation of the loss' graph reads: its gradient is one product."""
    layers = list(layers)
    if not layers:  # most models have none, and their graphs are long
        return []
    edges: Counter[Tensor] = Counter()
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions if node is not None else ():
            if after is not None and hasattr(after, "variable"):
                edges[after.variable] += 1
            elif after not in seen:
                seen.add(after)
                waiting.append(after)
    return [layer for layer in layers if edges[layer.weight] == 1]

"""SGD, AdamW (arXiv 1711.05101), Adafactor (1804.04235) and APOLLO-Mini (2412.05270), with the bare memory they need.

The same arithmetic as torch.optim's (a test compares them step by step; Adafactor's with the paper's eps1). Ours since
the first step of torch's own optimisers imports torch._dynamo and sympy: 67 MiB and two seconds for every device,
measured with torch 2.13 on a CPU, which is a quarter of a warm trainer. One temporary, none kept: as large as the
largest parameter, or as those that are updated together, which together fill ``TOGETHER_BYTES`` at most. Of a parameter
in a file a block is in memory at a time.

    sgd:    m <- mu m + g + wd p;  p <- p - lr m
    adamw:  p <- (1 - lr wd) p;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
            p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    adafactor, of a matrix: r, c <- (1 - s) r + s rowmean(g^2 + 1e-30), the same of columns, s = t^-0.8;
            v = r c / mean(r);  u = g / sqrt(v);  a = max(1e-3, rms(p)) min(lr, 1 / sqrt(t));  p <- (1 - lr wd) p;
            p <- p - a u / max(1, rms(u))
    apollo, of a matrix [m, n], m <= n: r = z g with z [m] drawn again every 200 steps;  u = Adam's step for r;
            c = sqrt(m) |u| / |r|, less where c |g| would grow by more than 1 %;  p <- (1 - lr wd) p - lr c g

APOLLO's factor is sqrt(m), that of its theory for rank 1, where its authors' code has sqrt(128): so a step is as large
as AdamW's, and takes its rates. A gradient that is known as dy^T x may be applied by rows: what Adafactor and APOLLO
ask of the whole follows from the factors (``OuterProduct``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from edgefl.models.row_linear import (
    BeginUpdate,
    ChangeRows,
    FileParameter,
    Gradient,
    OuterProduct,
    RowLinear,
    WholeGradient,
    by_rows,
    read_once,
    row_blocks,
    row_maps,
)
from edgefl.models.spec import is_encoder
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.registry import chosen

BETAS = (0.9, 0.999)
EPS = 1e-8
#: Adafactor's: how fast the weight of the newest gradient falls, the least root mean square a parameter counts with.
FACTOR_DECAY, FACTOR_SMALLEST = 0.8, 1e-3
#: What the paper adds to a matrix' squares, so that their estimate stays a product of a row and a column. torch's floor
#: of 1e-7 under their mean and 1e-14 under the product is above those of a wide map's mean loss.
FACTOR_EPS = 1e-30
#: torch's floor under the squares of a vector.
_TINY_SQUARE = torch.finfo(torch.float32).eps ** 2
#: APOLLO's: steps with one projection; how fast the size of a change may grow; a divisor's least.
_REDRAWN, _GROWTH, _SMALL = 200, 1.01, 1e-30
#: Half the time of one by one, measured on 85 parameters of a small model (130 KiB; 4.7 against 2.7 ms a step).
TOGETHER_BYTES = 2**18


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a weight decay."""

    parameters: tuple[torch.nn.Parameter, ...]
    lr: float
    weight_decay: float = 0.0


class Optimizer(Protocol):
    """Interface of an optimiser to a training step."""

    groups: tuple[Group, ...]

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        ...

    def update(self, parameter: torch.nn.Parameter, group: Group) -> None:
        """Change this one, which has a gradient."""
        ...

    def begin(self, parameter: torch.nn.Parameter, group: Group, gradient: Gradient) -> ChangeRows:
        """Begin the update of a matrix whose gradient comes by rows."""
        ...

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """Have the state of this one in memory, as from its first update on."""
        ...


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Every parameter, in order."""
    return [parameter for group in optimizer.groups for parameter in group.parameters]


@dataclass
class SGD:
    """Stochastic gradient descent; ``momentum`` 0 keeps no state."""

    groups: tuple[Group, ...]
    momentum: float = 0.0
    _mean: dict[torch.nn.Parameter, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> None:
        """p <- p - lr m."""
        for group in self.groups:
            together: list[torch.nn.Parameter] = []
            for parameter in group.parameters:
                if parameter.grad is None:
                    continue
                if group.weight_decay or isinstance(parameter, FileParameter):  # makes a temporary
                    self.update(parameter, group)
                else:
                    self.hold(parameter)
                    together.append(parameter)
            if together:
                means = [self._mean[p] for p in together] if self.momentum else []
                self._change(together, [gradient_of(p) for p in together], means, group)

    @torch.no_grad()
    def update(self, parameter: torch.nn.Parameter, group: Group) -> None:
        """See ``Optimizer.update``."""
        if isinstance(parameter, FileParameter):
            _by_blocks(self, parameter, group)
            return
        self.hold(parameter)
        means = [self._mean[parameter]] if self.momentum else []
        self._change([parameter], [gradient_of(parameter)], means, group)

    def begin(self, parameter: torch.nn.Parameter, group: Group, gradient: Gradient) -> ChangeRows:
        """See ``Optimizer.begin``."""
        self.hold(parameter)
        mean = self._mean.get(parameter)
        return lambda rows, some, by: self._change([some], [by], [] if mean is None else [mean[rows]], group)

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """See ``Optimizer.hold``."""
        if self.momentum and parameter not in self._mean:
            self._mean[parameter] = torch.zeros_like(parameter, requires_grad=False)

    def keep_first(self, count: int) -> None:
        """Keep the first ``count`` devices' state of stacked parameters [K, …]."""
        self._mean = {parameter: mean[:count] for parameter, mean in self._mean.items()}

    def _change(self, parameters: Sequence[Tensor], gradients: list[Tensor], means: list[Tensor], group: Group) -> None:
        values = list(parameters)
        if group.weight_decay:
            gradients = list(torch._foreach_add(gradients, values, alpha=group.weight_decay))  # noqa: SLF001 - as AdamW
        if means:
            torch._foreach_mul_(means, self.momentum)
            torch._foreach_add_(means, gradients)
        torch._foreach_add_(values, means or gradients, alpha=-group.lr)


@dataclass
class AdamW:
    """Adam with decoupled weight decay."""

    groups: tuple[Group, ...]
    _steps: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    _state: dict[torch.nn.Parameter, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, with bias correction by its own number of updates."""
        for group in self.groups:
            for step, parameters in self._together(group):
                states = [self._state[p] for p in parameters]
                self._update(parameters, [gradient_of(p) for p in parameters], states, step, group)

    @torch.no_grad()
    def update(self, parameter: torch.nn.Parameter, group: Group) -> None:
        """See ``Optimizer.update``."""
        if isinstance(parameter, FileParameter):
            _by_blocks(self, parameter, group)
            return
        step = self._next(parameter)
        self._update([parameter], [gradient_of(parameter)], [self._state[parameter]], step, group)

    def begin(self, parameter: torch.nn.Parameter, group: Group, gradient: Gradient) -> ChangeRows:
        """See ``Optimizer.begin``."""
        step, (mean, square) = self._next(parameter), self._state[parameter]
        return lambda rows, some, by: self._update([some], [by], [(mean[rows], square[rows])], step, group)

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """See ``Optimizer.hold``."""
        if parameter not in self._state:
            mean, square = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
            self._state[parameter] = mean, square

    def keep_first(self, count: int) -> None:
        """Keep the first ``count`` devices' state of stacked parameters [K, …]."""
        self._state = {parameter: (mean[:count], square[:count]) for parameter, (mean, square) in self._state.items()}

    def _next(self, parameter: torch.nn.Parameter) -> int:
        """The number of the parameter's next update; its state is there then."""
        self.hold(parameter)
        step = self._steps[parameter] = self._steps.get(parameter, 0) + 1
        return step

    def _together(self, group: Group) -> Iterator[tuple[int, list[torch.nn.Parameter]]]:
        """(number of this update, parameters that are at it), few enough of them; their states are there then."""
        waiting: dict[int, list[torch.nn.Parameter]] = {}
        sizes: dict[int, int] = {}
        for parameter in group.parameters:
            if parameter.grad is None:
                continue
            if isinstance(parameter, FileParameter):
                self.update(parameter, group)
                continue
            step = self._next(parameter)
            size = sizes.get(step, 0) + parameter.nbytes
            if step in waiting and size > TOGETHER_BYTES:
                yield step, waiting.pop(step)
                size = parameter.nbytes
            waiting.setdefault(step, []).append(parameter)
            sizes[step] = size
        yield from waiting.items()

    @staticmethod
    @torch.no_grad()
    def _update(
        parameters: Sequence[Tensor],
        gradients: list[Tensor],
        states: Sequence[tuple[Tensor, Tensor]],
        step: int,
        group: Group,
    ) -> None:
        values = list(parameters)
        means, squares = (list(state) for state in zip(*states, strict=True))
        first, second = BETAS
        torch._foreach_mul_(values, 1 - group.lr * group.weight_decay)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        divisors = torch._foreach_sqrt(squares)  # noqa: SLF001 - public in all but its name: torch.optim's own way
        torch._foreach_div_(divisors, math.sqrt(1 - second**step))
        torch._foreach_add_(divisors, EPS)
        torch._foreach_addcdiv_(values, means, divisors, value=-group.lr / (1 - first**step))


@dataclass
class Adafactor:
    """Adam without momentum; of a matrix' second moments a row and a column are kept.

    torch's defaults, but the paper's FACTOR_EPS.
    """

    groups: tuple[Group, ...]
    _steps: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    _state: dict[torch.nn.Parameter, tuple[Tensor, ...]] = field(default_factory=dict)

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        _each(self)

    @torch.no_grad()
    def update(self, parameter: torch.nn.Parameter, group: Group) -> None:
        """See ``Optimizer.update``."""
        if parameter.ndim == 2:
            _by_blocks(self, parameter, group)
            return
        gradient = gradient_of(parameter)
        rate, weight = self._next(parameter, group)
        parameter.mul_(1 - group.lr * group.weight_decay)
        if gradient.ndim > 1:
            row, column = self._state[parameter]
            for factor, dim in ((row, -1), (column, -2)):
                squares = torch.norm(gradient, dim=dim, keepdim=True).square_()
                factor.lerp_(squares.div_(gradient.shape[dim]).add_(FACTOR_EPS), weight)
            change = (row / row.mean(dim=-2, keepdim=True)).rsqrt_() * column.rsqrt()
        else:
            (square,) = self._state[parameter]
            change = square.lerp_(gradient * gradient, weight).clamp(min=_TINY_SQUARE).rsqrt_()
        change.mul_(gradient)
        size = torch.linalg.vector_norm(change) / math.sqrt(change.numel())
        parameter.sub_(change.mul_(rate / size.clamp_(min=1.0)))

    @torch.no_grad()
    def begin(self, parameter: torch.nn.Parameter, group: Group, gradient: Gradient) -> ChangeRows:
        """See ``Optimizer.begin``. The size of the change follows from the gradient's factors, scaled as it is."""
        rate, weight = self._next(parameter, group)
        (outputs, inputs), (row, column) = parameter.shape, self._state[parameter]
        row.lerp_(gradient.row_squares().div_(inputs).add_(FACTOR_EPS)[:, None], weight)
        column.lerp_(gradient.column_squares().div_(outputs).add_(FACTOR_EPS)[None], weight)
        by_row, by_column = (row / row.mean()).rsqrt_(), column.rsqrt()  # [m, 1], [1, n]
        size = (gradient.scaled(by_row, by_column).squared_norm() / (outputs * inputs)).sqrt_()
        by_row.mul_(rate / size.clamp_(min=1.0))

        def change(rows: slice, some: Tensor, by: Tensor) -> None:
            some.mul_(1 - group.lr * group.weight_decay)
            some.sub_(by.mul_(by_row[rows]).mul_(by_column))

        return change

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """See ``Optimizer.hold``."""
        if parameter not in self._state:
            shapes = factor_shapes(parameter)
            self._state[parameter] = tuple(parameter.new_zeros(shape, requires_grad=False) for shape in shapes)

    def _next(self, parameter: torch.nn.Parameter, group: Group) -> tuple[Tensor, float]:
        """(rate, weight of the newest gradient) of the next update; the state is there then."""
        self.hold(parameter)
        step = self._steps[parameter] = self._steps.get(parameter, 0) + 1
        blocks = row_blocks(parameter) if parameter.ndim == 2 else [...]
        norms = torch.stack([torch.linalg.vector_norm(parameter[some]) for some in blocks])
        size = torch.linalg.vector_norm(norms) / math.sqrt(parameter.numel())
        return size.clamp_(min=FACTOR_SMALLEST).mul_(min(group.lr, 1 / math.sqrt(step))), step**-FACTOR_DECAY


def factor_shapes(parameter: Tensor) -> list[tuple[int, ...]]:
    """Shapes of what Adafactor keeps of a parameter: of a matrix a column and a row."""
    shape = tuple(parameter.shape)
    return [shape] if parameter.ndim < 2 else [(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]


class _Projected(NamedTuple):
    """APOLLO's state of a matrix: Adam's two of the projected gradient, and the size of the last change."""

    mean: Tensor
    square: Tensor
    size: Tensor


@dataclass
class Apollo:
    """APOLLO-Mini: the gradient of a matrix times one number, by Adam on a random projection; AdamW for the rest."""

    groups: tuple[Group, ...]
    _steps: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    _state: dict[torch.nn.Parameter, _Projected] = field(default_factory=dict)

    def __post_init__(self) -> None:
        small = [replace(one, parameters=tuple(p for p in one.parameters if p.ndim < 2)) for one in self.groups]
        self._rest = AdamW(tuple(small))
        self._numbers = {p: number for number, p in enumerate(parameters_of(self))}

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self._rest.step()
        for group in self.groups:
            for parameter in group.parameters:
                if parameter.ndim > 1 and parameter.grad is not None:
                    self.update(parameter, group)

    @torch.no_grad()
    def update(self, parameter: torch.nn.Parameter, group: Group) -> None:
        """See ``Optimizer.update``."""
        if parameter.ndim < 2:
            self._rest.update(parameter, group)
        else:
            _by_blocks(self, parameter, group)

    @torch.no_grad()
    def begin(self, parameter: torch.nn.Parameter, group: Group, gradient: Gradient) -> ChangeRows:
        """See ``Optimizer.begin``."""
        numbers, (rows, columns) = self._drawn(parameter), _sides(parameter)
        projected = gradient.over_rows(numbers) if rows <= columns else gradient.over_columns(numbers)
        rate = self._rate(parameter, group, projected, gradient.squared_norm().sqrt_(), len(numbers))

        def change(_: slice, some: Tensor, by: Tensor) -> None:
            some.mul_(1 - group.lr * group.weight_decay)
            some.sub_(by.mul_(rate))

        return change

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """See ``Optimizer.hold``."""
        if parameter.ndim < 2:
            self._rest.hold(parameter)
        elif parameter not in self._state:
            longer = max(_sides(parameter))
            mean, square = (parameter.new_zeros(longer, requires_grad=False) for _ in range(2))
            self._state[parameter] = _Projected(mean, square, parameter.new_zeros((), requires_grad=False))

    def _drawn(self, parameter: torch.nn.Parameter) -> Tensor:
        """Numbers of a normal distribution, one for each row or column, whichever are fewer."""
        turn = self._steps.get(parameter, 0) // _REDRAWN
        drawn = torch.Generator().manual_seed(turn << 20 | self._numbers[parameter])
        return torch.randn(min(_sides(parameter)), generator=drawn).to(parameter.device)

    def _rate(
        self, parameter: torch.nn.Parameter, group: Group, projected: Tensor, size: Tensor, dropped: int
    ) -> Tensor:
        """Factor of the gradient, whose norm is ``size``; the next step is counted."""
        self.hold(parameter)
        step = self._steps[parameter] = self._steps.get(parameter, 0) + 1
        (mean, square, last), (first, second) = self._state[parameter], BETAS
        mean.lerp_(projected, 1 - first)
        square.mul_(second).addcmul_(projected, projected, value=1 - second)
        adapted = (mean / (1 - first**step)).div_((square / (1 - second**step)).sqrt_().add_(EPS))
        sizes = torch.linalg.vector_norm(adapted), torch.linalg.vector_norm(projected)
        factor: Tensor = sizes[0].mul_(math.sqrt(dropped)).div_(sizes[1].add_(_SMALL))
        change = factor * size
        # A gradient of zero, as a low-rank term has in its first step, limits nothing.
        limited = torch.where(last > 0, torch.minimum(change, last * _GROWTH), change)
        last.copy_(limited)
        return factor.mul_(limited.div_(change.add_(_SMALL))).mul_(group.lr)


def _sides(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix."""
    return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """The gradient, of a parameter that has one."""
    if parameter.grad is None:
        raise ValueError("a parameter without a gradient cannot be updated")
    return parameter.grad


def _by_blocks(optimizer: Optimizer, parameter: torch.nn.Parameter, group: Group) -> None:
    """Update a matrix by its whole gradient, a block of rows at a time; others as the matrix of their first axis."""
    gradient, values = gradient_of(parameter).flatten(1), parameter.view(len(parameter), -1)
    change = optimizer.begin(parameter, group, WholeGradient(gradient))
    for rows in row_blocks(parameter):
        change(rows, values[rows], gradient[rows])


def _each(optimizer: Optimizer) -> None:
    for group in optimizer.groups:
        for parameter in group.parameters:
            if parameter.grad is not None:
                optimizer.update(parameter, group)


def may_update_in_backward(job: Job) -> bool:
    """Whether nothing needs all gradients at once: no limit on their norm, no observer of the steps."""
    return job.hyper.clip_norm == 0 and chosen("repair", job.slots.repair)[0].method.observe is None


class OptimizerInBackward:
    """Large parameters are updated inside the backward pass, as soon as their gradient is whole; then it is given back.

    The same arithmetic in another order: a parameter's gradient is whole when every operation that read it is done with
    it. So gradients of heads, of the encoders and of one layer and the next are never there together. (LOMO, arXiv
    2306.09782, with any optimiser.) Those of ``maps``, after the encoders, are never whole: they are applied by rows.
    Not with a limit on the norm of all gradients, which has to see them all.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        update: Callable[[torch.nn.Parameter], None],
        maps: Sequence[RowLinear] = (),
        begin: BeginUpdate | None = None,
    ) -> None:
        self._update = update
        self._large = [p for p in parameters if p.nbytes > TOGETHER_BYTES]
        self._waiting: set[torch.nn.Parameter] = set()
        self._maps, self._begin = maps, begin

    @contextmanager
    def watching(self, waiting: set[torch.nn.Parameter], loss: Tensor | None = None) -> Iterator[None]:
        """``waiting``: parameters that a later backward pass adds to; they are not whole yet.

        ``loss``: whose graph holds the maps.
        """
        self._waiting = waiting
        maps = [] if loss is None else read_once(loss, self._maps)
        handles = [p.register_post_accumulate_grad_hook(self._whole) for p in self._large]  # type: ignore[no-untyped-call]
        for layer in maps:
            layer.begin = self._begin
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in maps:
                layer.begin = None

    def _whole(self, parameter: Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)  # noqa: S101 - only parameters are watched
        if parameter not in self._waiting and parameter.grad is not None:
            self._update(parameter)
            parameter.grad = None


def optimizer_in_backward(job: Job, optimizer: Optimizer, model: StagedModel) -> OptimizerInBackward | None:
    """Updates in the backward pass by ``optimizer``; None where the job needs all gradients."""
    if not may_update_in_backward(job):
        return None
    group_of = {p: group for group in optimizer.groups for p in group.parameters}
    maps = _updated_by_rows(job, model)

    def begin(parameter: torch.nn.Parameter, gradient: OuterProduct) -> ChangeRows:
        return optimizer.begin(parameter, group_of[parameter], gradient)

    return OptimizerInBackward(list(group_of), lambda p: optimizer.update(p, group_of[p]), maps, begin)


def _updated_by_rows(job: Job, model: StagedModel) -> list[RowLinear]:
    """Trained linear maps after the encoders, which see one row a sample: their gradient has few factors."""
    if job.hyper.precision != "f32":
        return []
    after = [model.part(p) for p in job.stage.trained if p in model.parts_present and not is_encoder(p)]
    for part in after:
        by_rows(part, TOGETHER_BYTES)
    return [layer for part in after for layer in row_maps(part) if layer.weight.requires_grad]

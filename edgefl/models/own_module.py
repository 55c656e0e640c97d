"""Encoders that are a user's own module as a whole: ``edgefl.encoder(factory, input_shape=…, stages=[…])``.

The forward pass is traced symbolically and cut behind the last operation of each stage, where one tensor may pass. What
passes becomes tokens [B, N, D] by moving its channels last; layers may differ in both. The shapes are observed once, on
the meta device (docs/decisions/0081).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from edgefl.encoder_kinds import EncoderKind, Fault
from edgefl.errors import ModelError
from edgefl.models.encoder import Kind, TokenState, first_token
from edgefl.models.recurrent import as_priced
from edgefl.models.sensor import Standardize
from edgefl.models.spec import EncoderSpec
from edgefl.resources.meta_device import meta_device

Factory = Callable[[], nn.Module]
#: How a layer says how wide its outcome is -> the axis of that where it is alone.
_WIDTHS = {"out_channels": 1, "num_features": 1, "num_channels": 1, "out_features": -1, "hidden_size": -1}
#: Fields of a run file that a module settles itself.
_SETTLED = ("heads", "mlp_ratio", "patch", "dropout", "stride", "vocabulary", "positions", "arch", "pretrained")
_FACTORY = "Give a class or function that takes no arguments, such as `def make(): return Net(64)`."
#: What a module's own code may raise.
_RAISED = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, OSError, ImportError)


class Passed(NamedTuple):
    """Activation between two stages: its shape without the batch axis, and the index of its channel axis."""

    shape: tuple[int, ...]
    channels: int

    @property
    def outer(self) -> list[int]:
        """The shape without the channels."""
        return [size for place, size in enumerate(self.shape) if place != self.channels]

    @property
    def tokens(self) -> tuple[int, int]:
        """(tokens, width) of a sample."""
        width = self.shape[self.channels]
        return torch.Size(self.shape).numel() // width, width


class Source(NamedTuple):
    """A module's factory, and the names of the children that each stage holds; None: it is one stage as a whole."""

    factory: Factory
    stages: tuple[tuple[str, ...], ...] | None

    @property
    def name(self) -> str:
        """Name in errors."""
        return f"{self.factory.__module__}:{self.factory.__qualname__}"

    def refused(self, why: str, remedy: str) -> ModelError:
        """The error of a module that cannot be an encoder."""
        return ModelError(f"module {self.name} cannot be an encoder: {why}", remedy=remedy)


def encoder(
    factory: Factory, *, input_shape: Sequence[int], stages: Sequence[Sequence[str]] | None = None
) -> EncoderKind:
    """A kind of encoder from a module of your own, for a run file's mapping or the entry points ``edgefl.encoders``.

    ``factory``: a class or function without arguments that returns it; its first weights stay. It takes float32 samples
    [B, *input_shape] and returns [B, width] or [B, tokens, width], whose mean over tokens is pooled. ``stages``:
    names of the children that each stage trains, in the order in which ``forward`` calls them; all that have weights,
    each once. None: one stage. ``model.stages`` is their number, or a divisor of it.
    Raises ModelError for a module that cannot be used so.
    """
    if not callable(factory) or not hasattr(factory, "__qualname__"):
        raise ModelError(f"{str(factory)[:60]!r} is no class or function", remedy=_FACTORY)
    source = Source(factory, None if stages is None else tuple(tuple(stage) for stage in stages))
    states = _states(source, tuple(input_shape))
    named = {"width": states[-1].tokens[1], "depth": len(states) - 1, "heads": 1, "pool": "mean"}
    return EncoderKind(
        axes=tuple(map(str, input_shape)),
        sizes={"tiny": named},
        tokens=lambda spec: _states(source, spec.input_shape)[-1].tokens[0],
        build=lambda: Kind(
            embed=OwnEmbed,
            block=lambda spec: _blocks(source, spec, range(1))[0],
            norm=partial(_exits, source),
            pool=first_token,
            blocks=partial(_blocks, source),
        ),
        faults=partial(_faults, source, named),
        scaled=1 if len(input_shape) == 2 else None,
        states=lambda spec: [state.tokens for state in _states(source, spec.input_shape)],
        label=factory.__qualname__.rpartition(".")[2],
    )


def _faults(source: Source, named: dict[str, object], spec: EncoderSpec) -> Iterator[Fault]:
    plain = EncoderSpec()
    for field in _SETTLED:
        if getattr(spec, field) != named.get(field, getattr(plain, field)):
            yield field, f"is {getattr(spec, field)!r}, which {source.name} settles itself; leave it out"
    for field in ("width", "depth"):
        if getattr(spec, field) != named[field]:
            yield field, f"is {getattr(spec, field)}, that of {source.name} is {named[field]}; leave it out"
    try:
        states = _states(source, spec.input_shape)
    except ModelError as error:
        yield "input_shape", f"{list(spec.input_shape)}: {error.message}"
        return
    if states[-1].tokens[1] != named["width"]:
        yield "input_shape", f"{list(spec.input_shape)} makes the width {states[-1].tokens[1]}, not {named['width']}"


class OwnEmbed(nn.Module):
    """[B, *input_shape] -> tokens [B, N, C], whose channels come last; without weights."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.scale = Standardize(spec)

    def forward(self, x: Tensor) -> TokenState:
        return TokenState(_tokens(self.scale(x), x.ndim - 2))


class OwnBlock(nn.Module):
    """One stage of the module, between what passes before and after it: tokens [B, N, D] -> tokens [B, N', D']."""

    own_weights = True

    def __init__(self, stage: nn.Module, before: Passed, after: Passed) -> None:
        super().__init__()
        self.stage, self.before, self.after = stage, before, after
        self.recurrent = any(isinstance(layer, nn.RNNBase) for layer in stage.modules())

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """As ``edgefl.models.published.PreNormBlock.forward``."""
        if len(self.before.shape) == 1:
            x = tokens.flatten(1)
        else:
            x = tokens.reshape(-1, *self.before.outer, tokens.shape[-1])
            x = x.movedim(-1, 1 + self.before.channels).contiguous()
        with as_priced() if self.recurrent else nullcontext():
            made = _tokens(self.stage(x), self.after.channels)
        return made[:, :count] if count else made


def _tokens(x: Tensor, channels: int) -> Tensor:
    """[B, …] -> [B, N, C]; ``channels``: place of C behind the batch axis."""
    return x.unsqueeze(1) if x.ndim == 2 else x.movedim(1 + channels, -1).flatten(1, -2)


class Exits(nn.Module):
    """[B, N, D'] -> [B, N, width]: the final norm, and before it a map of each other width that stages end with."""

    def __init__(self, widths: Sequence[int], width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({str(w): nn.Linear(w, width) for w in dict.fromkeys(widths) if w != width})
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        width = str(tokens.shape[-1])
        normed: Tensor = self.norm(self.maps[width](tokens) if width in self.maps else tokens)
        return normed


def _blocks(source: Source, spec: EncoderSpec, places: range) -> list[nn.Module]:
    states, parts = _states(source, spec.input_shape), split(source, made(source))
    return [OwnBlock(parts[place], states[place], states[place + 1]) for place in places]


def _exits(source: Source, spec: EncoderSpec) -> nn.Module:
    return Exits([state.tokens[1] for state in _states(source, spec.input_shape)[1:-1]], spec.width)


def made(source: Source) -> nn.Module:
    """The module, by its factory. Raises ModelError."""
    try:
        module = source.factory()
    except _RAISED as error:
        raise source.refused(
            f"its factory ends with {type(error).__name__}: {str(error)[:200]}",
            _FACTORY,
        ) from error
    if not isinstance(module, nn.Module):
        raise source.refused(f"its factory returns a {type(module).__name__}", "Return an nn.Module.")
    if any(getattr(layer, "proj_size", 0) for layer in module.modules()):
        raise source.refused("it has an LSTM with proj_size", "Put a Linear behind an LSTM without it.")
    return module


@lru_cache(64)
def _states(source: Source, input_shape: tuple[int, ...]) -> tuple[Passed, ...]:
    """Input, the activations between the stages, and output. Raises ModelError."""
    if not input_shape or min(input_shape) < 1:
        raise source.refused(
            f"input_shape {list(input_shape)} is no sample's shape", "Give one sample's, such as (128, 3)."
        )
    with meta_device():
        parts = [part.eval() for part in split(source, made(source))]
    states = [Passed(input_shape, len(input_shape) - 1)]
    for part in parts:
        states.append(_observed(source, part, states[-1], last=part is parts[-1]))
    return tuple(states)


def _observed(source: Source, part: nn.Module, before: Passed, *, last: bool) -> Passed:
    """Output of one stage for the input ``before``, on the meta device. Raises ModelError."""
    ran: list[tuple[int, int]] = []
    for layer in part.modules():
        for name, axis in _WIDTHS.items():
            if isinstance(width := getattr(layer, name, None), int):
                both = 2 if getattr(layer, "bidirectional", False) else 1
                told = axis, width * both
                layer.register_forward_hook(lambda *_, told=told: ran.append(told))
    shapes = []
    for rows in (2, 3):
        try:
            with torch.no_grad():
                outcome = part(torch.zeros(rows, *before.shape, device="meta"))
        except _RAISED as error:
            raise source.refused(
                f"on samples of shape {list(before.shape)} its forward pass ends with {type(error).__name__}: "
                f"{str(error)[:200]}",
                "Memory and FLOPs are planned on shapes alone, so forward may not ask for values or fix a batch size.",
            ) from error
        if not isinstance(outcome, Tensor) or not outcome.is_floating_point():
            what = outcome.dtype if isinstance(outcome, Tensor) else type(outcome).__name__
            raise source.refused(f"it returns {what}", "Return one tensor of floats, such as the first of a GRU's two.")
        shapes.append(tuple(outcome.shape))
    if shapes[0][:1] != (2,) or shapes[1] != (3, *shapes[0][1:]) or len(shapes[0]) < 2:
        raise source.refused(
            f"of 2 and 3 samples it makes {list(shapes[0])} and {list(shapes[1])}", "Keep the batch axis first."
        )
    shape = shapes[0][1:]
    if last and len(shape) > 2:
        raise source.refused(
            f"it returns [batch, {', '.join(map(str, shape))}]",
            "Return [batch, width], or [batch, tokens, width].",
        )
    axis, width = ran[-1] if ran and not last else (-1, 0)
    places = [place % len(shape) for place in (axis if axis < 0 else axis - 1, 0, -1)]
    return Passed(shape, next((place for place in places if shape[place] == width), places[0]))


def split(source: Source, module: nn.Module) -> list[nn.Module]:
    """The stages as modules, each from the one tensor that it takes to the one that it makes. Raises ModelError."""
    if source.stages is None:
        return [module]
    owner = _owners(source, module)
    nodes, stage_of = _traced(source, module, owner)
    stages = []
    cuts = [_cut(source, nodes, stage_of, stage) for stage in range(len(source.stages))]
    for stage, (entry, end) in enumerate(pairwise([nodes[0], *cuts])):
        graph = fx.Graph()
        env = {entry: graph.placeholder("x")}
        for node in nodes:
            if stage_of[node] == stage:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(env[end])
        stages.append(fx.GraphModule(module, graph))
    return list(stages)


def _owners(source: Source, module: nn.Module) -> dict[str, int]:
    """Path of a child, or of a parameter, -> its stage."""
    owner: dict[str, int] = {}
    shared: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), set()).add(name)
    tensors = [*chain.from_iterable(shared.values()), *dict(module.named_buffers())]
    known = {*dict(module.named_modules()), *tensors} - {""}
    children = ", ".join(name for name, _ in module.named_children())
    for stage, names in enumerate(source.stages or ()):
        for name in names:
            if name not in known:
                raise source.refused(
                    f"stage {stage + 1} names '{name}', which it has not", f"Its children are: {children}."
                )
            if any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in owner):
                raise source.refused(f"'{name}' is in two places of the stages", "Name each child once.")
            owner[name] = stage
        if not names:
            raise source.refused(f"stage {stage + 1} is empty", "Name the children that it trains.")
    for tensor in tensors:
        if not any(f"{tensor}.".startswith(f"{name}.") for name in owner):
            child = tensor if "." not in tensor else tensor.rpartition(".")[0]
            raise source.refused(f"'{tensor}' is in no stage", f"Name '{child}' in the stage that trains it.")
    for tied in shared.values():
        places = {stage for name, stage in owner.items() for tensor in tied if f"{tensor}.".startswith(f"{name}.")}
        if len(places) > 1:
            raise source.refused(f"{' and '.join(map(repr, sorted(tied)))} are one tensor", "Put both into one stage.")
    return owner


class _Tracer(fx.Tracer):
    """Enters only what has named children inside: everything else is one operation."""

    def __init__(self, owner: Sequence[str]) -> None:
        super().__init__()
        self.owner = owner

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self.owner)


def _traced(source: Source, module: nn.Module, owner: dict[str, int]) -> tuple[list[fx.Node], dict[fx.Node, int]]:
    """The operations of the forward pass in order, input first and outcome last, and the stage of each."""
    remedy = "Name a child that holds this code as a whole, or leave stages out: then it is one stage."
    modes = []
    for mode in (True, False):
        try:
            modes.append(_Tracer(list(owner)).trace(module.train(mode)))
        except (*_RAISED, fx.proxy.TraceError) as error:
            raise source.refused(f"its forward pass cannot be cut: {str(error)[:200]}", remedy) from error
    module.train()
    if str(modes[0]) != str(modes[1]):
        raise source.refused("its forward pass reads self.training", "Use a child, such as nn.Dropout, in its place.")
    nodes, current, stage_of, called = list(modes[0].nodes), 0, {}, set()
    for node in nodes:
        path = str(node.target) if node.op in {"call_module", "get_attr"} else ""
        name = next((name for name in owner if f"{path}.".startswith(f"{name}.")), "")
        if name:
            called.add(name)
            if owner[name] < current:
                raise source.refused(
                    f"forward calls '{name}' of stage {owner[name] + 1} after stage {current + 1} has begun",
                    "Name the stages in the order in which forward calls their children.",
                )
            current = owner[name]
        stage_of[node] = -1 if node.op == "placeholder" else current
    if missing := [name for name in owner if name not in called]:
        raise source.refused(f"forward never calls '{missing[0]}'", "Leave it out of the module.")
    if [node.op for node in nodes].count("placeholder") != 1:
        raise source.refused("its forward takes more than one tensor", "Take the samples of one modality alone.")
    return nodes, stage_of


def _cut(source: Source, nodes: list[fx.Node], stage_of: dict[fx.Node, int], stage: int) -> fx.Node:
    """The one operation whose outcome is read behind ``stage``."""
    outcome = nodes[-1]
    behind = [node for node in nodes if stage_of[node] > stage or node is outcome]
    read = dict.fromkeys(one for node in behind for one in node.all_input_nodes if stage_of[one] <= stage)
    read = {one: None for one in read if one is not outcome}
    if len(read) != 1 or stage_of[next(iter(read))] != stage:
        names = ", ".join(one.name for one in read)
        raise source.refused(
            f"behind stage {stage + 1} its forward pass reads {len(read)} values of before ({names}), and one tensor "
            "may pass",
            "Put the children that need them into one stage.",
        )
    return next(iter(read))

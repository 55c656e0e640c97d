"""Encoders that run the library's own modules: any of `transformers` whose longest list of blocks is all its depth.

What the library computes before the first block is the embedding, the blocks are the stages, the norm behind the last
one is the norm. How the library calls its blocks is observed once, on shapes alone. The configuration is data: only a
``model_type`` that the library itself knows is built, never code from a checkpoint (docs/decisions/0065).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from edgefl.errors import MissingDependencyError, ModelError
from edgefl.models.encoder import Kind, TokenState, first_token
from edgefl.models.spec import EncoderSpec
from edgefl.resources.meta_device import meta_device

#: A block's argument that depends on a sample -> how ``LibraryBlock`` makes it.
_MASK, _BAND, _ROTARY, _BIAS = "mask", "band", "rotary", "bias"
_MADE = {"attention_mask": _BAND, "position_embeddings": _ROTARY, "position_bias": _BIAS}
#: What the library does to inputs and to whole blocks at random while it trains; parts that train apart cannot.
_UNLIKE_STAGES = ("apply_spec_augment", "layerdrop", "encoder_layerdrop")


class Cut(NamedTuple):
    """Where a library's encoder is cut into parts, and how it calls its blocks.

    ``blocks``: path of their list; ``calls``: of each call the block's place, constant arguments, and those that are
    made of the tokens (name -> how); ``tokens``: name of the argument that takes them; ``inner``: their sizes between
    batch and width; ``norm``: path of the norm, "": none; ``used``: the modules that run before the first block.
    """

    blocks: str
    calls: tuple[tuple[int, Mapping[str, Any], Mapping[str, str]], ...]
    tokens: str
    inner: tuple[int, ...]
    norm: str
    used: frozenset[str]


class _Stop(Exception):  # noqa: N818 - no error: the end of the embedding
    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens


class _End:
    """In place of the first block: ends the library's forward pass with the tokens."""

    def __init__(self, tokens: str, first: nn.Module) -> None:
        self.tokens = tokens
        self.attention_type = getattr(first, "attention_type", "")  # by which the library chooses a block's arguments

    def __call__(self, *positional: Tensor, **named: Tensor) -> Tensor:
        raise _Stop(positional[0] if positional else named[self.tokens])


class _Ended:
    """The result of a module that ended early: ends its caller where that looks at it.

    Exceptions must not leave a module, because torch's exporter keeps a stack of those that run.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.__dict__["tokens"] = tokens

    def _end(self, *_: object) -> Any:
        raise _Stop(self.__dict__["tokens"])

    __getattr__ = __getitem__ = __iter__ = __len__ = _end


def _ending(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*positional: Any, **named: Any) -> Any:
        try:
            return forward(*positional, **named)
        except _Stop as end:
            return _Ended(end.tokens)

    return run


def library_config(spec: EncoderSpec) -> Any:
    """The library's configuration object of an encoder. Raises ModelError for a type that the library does not know."""
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        raise MissingDependencyError("transformers", "train") from None
    try:
        values = json.loads(spec.config)
        model_type = values.pop("model_type")
        values.pop("pixels", None)
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"an encoder's config is no configuration of transformers: {error!r}") from error
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model type {model_type!r:.60}",
            remedy="Install the version of transformers that the run's other machines have.",
        )
    refused = sorted(name for name in values if name.startswith(("_", "backbone", "auto_map", "use_timm")))
    if refused:
        raise ModelError(f"an encoder's config has the field {refused[0]!r:.60}, which could load other code")
    values |= {name: type(values[name])(0) for name in _UNLIKE_STAGES if name in values}
    return transformers.AutoConfig.for_model(model_type, **values)


def library_model(spec: EncoderSpec, *, drawn: bool = True) -> Any:
    """The library's encoder of a specification; without ``drawn`` its weights are whatever memory holds."""
    import transformers
    from transformers import initialization

    config = library_config(spec)
    quick: AbstractContextManager[None] = nullcontext() if drawn else initialization.no_init_weights()
    try:
        with quick:
            model = transformers.AutoModel.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"transformers cannot build a {config.model_type!r:.60}: {error}") from error
    return encoder_of(model)


def encoder_of(model: Any) -> Any:
    """The encoder half of a model that has two; any other model as it is."""
    return model.get_encoder() if model.config.is_encoder_decoder else model


def library_inputs(spec: EncoderSpec, name: str, x: Tensor) -> dict[str, Tensor]:
    """Our samples [B, *input_shape] as the library's main input ``name``."""
    if name == "input_ids":
        padding = _padding(spec)
        # Everywhere here 0 is padding: ids 0 and the checkpoint's own padding have changed places.
        x = torch.where(x == 0, padding, torch.where(x == padding, 0, x)) if padding else x
    elif name == "pixel_values":
        mean, deviation = _values(spec).get("pixels", ((0.5,), (0.5,)))
        x = (x - x.new_tensor(mean)) / x.new_tensor(deviation)
        x = x.permute(0, 3, 1, 2)
    elif name == "input_features":
        x = x.transpose(1, 2)
    elif name == "input_values":
        x = x.flatten(1)
    elif name != "past_values":
        raise ModelError(f"the library's encoder takes {name!r}, which no kind of modality here gives")
    return {name: x}


@lru_cache(64)
def _parsed(config: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config)
    return values


def _values(spec: EncoderSpec) -> dict[str, Any]:
    return _parsed(spec.config)


def _padding(spec: EncoderSpec) -> int:
    return int(_values(spec).get("pad_token_id") or 0)


def cut_of(spec: EncoderSpec) -> Cut:
    """Where the encoder is cut. Raises ModelError with the reason when it cannot be."""
    return _cut(msgspec.structs.replace(spec, pretrained="", pool="token", mean=(), std=()))


@lru_cache(16)
def _cut(spec: EncoderSpec) -> Cut:
    with meta_device():
        model = library_model(spec, drawn=False).eval()
    # Not inside "meta" as well: what the library keeps of one pass for all others would be of shapes alone.
    dtype = torch.int64 if spec.kind == "text" else torch.float32
    sample = torch.zeros((2, *spec.input_shape), dtype=dtype, device="meta")
    try:
        with torch.no_grad():
            return _observed(model, spec, library_inputs(spec, model.main_input_name, sample))
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        told = f"its forward pass ends with {type(error).__name__}: {str(error)[:200]}"
        if "meta tensor" in str(error):
            told = "its forward pass asks for values, and the cost of a run is planned on shapes alone"
        raise _uncut(spec, told) from error


def _uncut(spec: EncoderSpec, reason: str) -> ModelError:
    return ModelError(f"a {_values(spec)['model_type']!r} encoder cannot be cut into stages: {reason}")


def _observed(model: Any, spec: EncoderSpec, inputs: Mapping[str, Tensor]) -> Cut:
    """The cut of a model by what it calls in one forward pass."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [(path, m) for path, m in lists if len({type(block) for block in m}) == 1]
    if not lists:
        raise _uncut(spec, "it has no list of blocks")
    depth = max(len(m) for _, m in lists)
    path, blocks = next((path, m) for path, m in lists if len(m) == depth)
    order: list[tuple[str, tuple[Any, ...]]] = []  # modules in the order of their calls, blocks as ""
    calls: list[tuple[int, dict[str, Any]]] = []
    for place, block in enumerate(blocks):
        parameters = inspect.signature(type(block).forward).parameters

        def called(
            module: nn.Module, given: Any, named: Any, place: int = place, names: Any = tuple(parameters)[1:]
        ) -> None:
            calls.append((place, {**dict(zip(names, given, strict=False)), **named}))
            order.append(("", ()))

        block.register_forward_pre_hook(called, with_kwargs=True)
    for name, module in model.named_modules():
        if name and not f"{name}.".startswith(f"{path}."):
            module.register_forward_pre_hook(lambda _, given, name=name: order.append((name, given)))
    model(**inputs)
    return _described(model, spec, path, calls, order)


def _described(
    model: Any, spec: EncoderSpec, path: str, calls: list[tuple[int, dict[str, Any]]], order: list[Any]
) -> Cut:
    blocks = model.get_submodule(path)
    if any(getattr(module, "is_causal", False) for module in blocks.modules()):
        raise _uncut(spec, "its attention looks back only, so no token stands for a sample")
    if not calls or {place for place, _ in calls} != set(range(len(blocks))):
        raise _uncut(spec, f"it does not run every block of {path}")
    names = list(calls[0][1])
    tokens = names[0]
    shapes = {tuple(call[tokens].shape) for _, call in calls}
    same = [module for name, module in model.named_modules() if type(module) is type(blocks[0])]
    if len(shapes) > 1 or len(same) > len(blocks) or calls[0][1][tokens].shape[-1] != spec.width:
        raise _uncut(spec, "its stages change the number and the width of tokens, so that no list holds all its blocks")
    first, last = next(i for i, (name, _) in enumerate(order) if not name), _last(order)
    used = {name for name, _ in order[:first]}
    found: list[tuple[int, Mapping[str, Any], Mapping[str, str]]] = []
    for place, call in calls:
        made = {name: _MADE.get(name, "") for name, value in call.items() if name != tokens and _holds_tensor(value)}
        if odd := [name for name, how in made.items() if not how]:
            raise _uncut(spec, f"its blocks take {odd[0]!r}, which is made outside of them")
        if "attention_mask" in call and "attention_mask" not in made:
            made["attention_mask"] = _MASK
        constant = {name: value for name, value in call.items() if name != tokens and name not in made}
        found.append((place, constant, made))
    norm = _norm_after(model, order[last + 1 :])
    inner = tuple(calls[0][1][tokens].shape[1:-1])
    return Cut(path, tuple(found), tokens, inner, norm, frozenset(used | _owners(used)))


def _last(order: list[Any]) -> int:
    return max(i for i, (name, _) in enumerate(order) if not name)


def _owners(paths: Iterable[str]) -> set[str]:
    return {path.rsplit(".", cut)[0] for path in paths for cut in range(1, path.count(".") + 1)} | {""}


def _holds_tensor(value: object) -> bool:
    return torch.is_tensor(value) or (isinstance(value, tuple | list) and any(map(torch.is_tensor, value)))


def _norm_after(model: Any, order: list[Any]) -> str:
    """Path of the norm that runs first behind the last block, and not inside a pooling."""
    name = next((name for name, _ in order if name), "")
    return name if "norm" in type(model.get_submodule(name)).__name__.lower() and "pool" not in name else ""


class LibraryEmbed(nn.Module):
    """The library's encoder up to its first block: input [B, *shape] -> tokens [B, N, D]."""

    def __init__(self, model: Any, spec: EncoderSpec, cut: Cut) -> None:
        super().__init__()
        owner, _, name = cut.blocks.rpartition(".")
        end = _End(cut.tokens, model.get_submodule(cut.blocks)[0])
        del model.get_submodule(owner)._modules[name]  # noqa: SLF001
        setattr(model.get_submodule(owner), name, [end])
        for path in _owners([cut.blocks]):
            module = model.get_submodule(path)
            module.forward = _ending(module.forward)
        _keep(model, "", cut.used | _owners([cut.blocks]))
        self.model, self.spec = model, spec

    def forward(self, x: Tensor) -> TokenState:
        name = self.model.main_input_name
        mask = None
        if name == "input_ids":
            # A text that is all padding (an absent sample's row of zeros) keeps its first token.
            mask = torch.cat((torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != 0), dim=1)
        ended = self.model(**library_inputs(self.spec, name, x))
        if not isinstance(ended, _Ended):
            raise ModelError("the library's encoder ended before its first block")
        return TokenState(ended.__dict__["tokens"].flatten(1, -2), mask)


def _keep(module: nn.Module, path: str, used: Iterable[str]) -> None:
    """Take out everything that does not run before the first block."""
    for name, child in list(module._modules.items()):  # noqa: SLF001
        inside = f"{path}.{name}" if path else name
        if child is not None and inside in used:
            _keep(child, inside, used)
        else:
            module._modules[name] = None  # noqa: SLF001


class LibraryBlock(nn.Module):
    """One block of the library, called as the library calls it: tokens [B, N, D], mask [B, N] -> tokens."""

    bias: Tensor  # [buckets, heads]

    def __init__(self, model: Any, cut: Cut, place: int) -> None:
        super().__init__()
        self.block = model.get_submodule(cut.blocks)[place]
        self.calls = [(constant, made) for at, constant, made in cut.calls if at == place]
        self.cut = cut
        self.eager = model.config._attn_implementation == "eager"  # noqa: SLF001
        self.window = getattr(model.config, "sliding_window", None) or 0
        made = {how for _, ways in self.calls for how in ways.values()}
        if _ROTARY in made:
            self.rotary = _module_of(model, "RotaryEmbedding")
        if _BIAS in made:
            owner = _bias_owner(model)
            self.bias_of = type(owner)
            # Of the embedding's part; the blocks' own copies stay as the checkpoint has them.
            self.register_buffer("bias", owner.relative_attention_bias.weight.detach().clone())

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """As ``edgefl.models.published.PreNormBlock.forward``."""
        for constant, made in self.calls:
            shaped = tokens.view(tokens.shape[0], *self.cut.inner, -1) if len(self.cut.inner) > 1 else tokens
            ways = {name: self._made(how, tokens, mask) for name, how in made.items()}
            result = self.block(**{self.cut.tokens: shaped, **constant, **ways})
            tokens = (result[0] if isinstance(result, tuple) else result).reshape(tokens.shape)
        return tokens[:, :count] if count else tokens

    def _made(self, how: str, tokens: Tensor, mask: Tensor | None) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if how == _ROTARY:
            kinds = [self.block.attention_type] if hasattr(self.block, "attention_type") else []
            return self.rotary(tokens, places[None], *kinds)
        if how == _BIAS:
            return self._bias(tokens)
        real = None if mask is None else mask[:, None, None, :]
        if how == _BAND and self.window:
            near = ((places[:, None] - places[None]).abs() <= self.window)[None, None]
            real = near.expand(tokens.shape[0], 1, -1, -1) if real is None else real & near
        if real is None or not self.eager:
            return real
        return torch.zeros_like(real, dtype=tokens.dtype).masked_fill(~real, torch.finfo(tokens.dtype).min)

    def _bias(self, tokens: Tensor) -> Tensor:
        owner: Any = nn.Module()  # the library's own formula, on this block's copy of its table
        owner.relative_attention_bias = lambda places: nn.functional.embedding(places, self.bias)
        owner.relative_position_bucket = self.bias_of.relative_position_bucket
        made: Tensor = self.bias_of.compute_position_bias(owner, tokens)
        return made


def _module_of(model: Any, ending: str) -> nn.Module:
    module: nn.Module = next(m for m in model.modules() if type(m).__name__.endswith(ending))
    return module


def _bias_owner(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "compute_position_bias"))


def runs(cut: Cut, tensor: str) -> bool:
    """Whether a tensor of the library's encoder is in one of our parts."""
    owner = tensor.rpartition(".")[0]
    return f"{tensor}.".startswith((f"{cut.blocks}.", f"{cut.norm or cut.blocks}.")) or owner in cut.used


def blocks_of(model: Any, cut: Cut) -> list[nn.Module]:
    """The blocks of a library's encoder, in the order of their first calls."""
    return [LibraryBlock(model, cut, place) for place in dict.fromkeys(place for place, _, _ in cut.calls)]


def norm_of(model: Any, cut: Cut) -> nn.Module:
    """The norm behind the last block of a library's encoder."""
    norm: nn.Module = model.get_submodule(cut.norm) if cut.norm else nn.Identity()
    return norm


def _fresh(spec: EncoderSpec) -> tuple[Any, Cut]:
    """An encoder of the library with its own first weights, and its cut."""
    return library_model(spec), cut_of(spec)


def _embed(spec: EncoderSpec) -> nn.Module:
    model, cut = _fresh(spec)
    return LibraryEmbed(model, spec, cut)


def _blocks(spec: EncoderSpec, places: range) -> list[nn.Module]:
    model, cut = _fresh(spec)
    return [LibraryBlock(model, cut, place) for place in places]


def _norm(spec: EncoderSpec) -> nn.Module:
    return norm_of(*_fresh(spec))


KIND = Kind(embed=_embed, block=lambda spec: _blocks(spec, range(1))[0], norm=_norm, pool=first_token, blocks=_blocks)

"""Linear maps by rows: the same products and updates as whole ones, no whole gradient, weights in a file."""

from __future__ import annotations

import itertools
import os
import re
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from training_fixture import SHAPE, dataset, job, model_spec, parts_of, random_batch, stages_of, with_hyper

from edgefl.errors import StoreError
from edgefl.models import row_linear
from edgefl.models.check import encoder_of_size
from edgefl.models.parts import load_part, module_tensors, part_tensors
from edgefl.models.row_linear import (
    OuterProduct,
    RowLinear,
    WholeGradient,
    by_rows,
    in_files,
    read_once,
    row_maps,
)
from edgefl.models.spec import is_encoder
from edgefl.models.staged import build
from edgefl.plan.job import Job
from edgefl.pricing.round_price import price_step
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.resources.process_memory import status_bytes
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, train_round
from edgefl.training.optimizers import SGD, Adafactor, AdamW, Apollo, Group, Optimizer
from edgefl.training.prefix_cache import PrefixCache
from edgefl.training.step import make_optimizer, prepare, train_step
from edgefl.training.weights_on_disk import on_disk

WIDTH, ROWS = 48, 40


def optimizer(name: str, parameters: list[nn.Parameter], decay: float = 0.0) -> Optimizer:
    groups = (Group(tuple(parameters), 0.02, decay),)
    made = {"adamw": AdamW, "adafactor": Adafactor, "apollo": Apollo}.get(name)
    return made(groups) if made else SGD(groups, 0.9 if name == "momentum" else 0.0)


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    """Four rows of WIDTH numbers a block."""
    monkeypatch.setattr(row_linear, "BLOCK_BYTES", 4 * 4 * WIDTH)


def two(where: Path | None, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A linear map, and the same by rows."""
    plain = nn.Linear(WIDTH, ROWS, bias=bias)
    other = nn.Linear(WIDTH, ROWS, bias=bias)
    other.load_state_dict(plain.state_dict())
    by_rows(other, 0, where)
    assert isinstance(other, RowLinear)
    assert other.on_disk == (where is not None)
    return plain, other


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(6, WIDTH), (3, 5, WIDTH)])
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_same_outputs_and_gradients(on_disk, shape, frozen, tmp_path):
    plain, other = two(tmp_path if on_disk else None)
    x = torch.randn(shape)
    found = []
    for layer in (plain, other):
        layer.weight.requires_grad_(not frozen)
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        found.append([given.grad, layer.weight.grad, layer.bias.grad])
    torch.testing.assert_close(plain(x), other(x), rtol=1e-5, atol=1e-5)
    assert (found[1][1] is None) == frozen
    for a, b in zip(*found, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_without_a_gradient_for_what_comes_in():
    plain, other = two(None)
    for layer in (plain, other):
        layer(torch.ones(2, WIDTH)).sum().backward()
    torch.testing.assert_close(plain.weight.grad, other.weight.grad)


@pytest.mark.parametrize(("decay", "size"), [(0.0, 1.0), (0.1, 1.0), (0.0, 1e-5), (0.0, 1e-8)])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adafactor", "apollo"])
def test_an_update_by_rows_is_that_of_the_whole_gradient(name, on_disk, decay, size, tmp_path):
    torch.manual_seed(0)
    plain, other = two(tmp_path if on_disk else None, bias=False)
    whole, mine = (optimizer(name, [layer.weight], decay) for layer in (plain, other))
    for _ in range(5):
        x, wanted = torch.randn(7, WIDTH) * torch.logspace(-1, 1, WIDTH), size * torch.randn(7, ROWS)
        for layer in (plain, other):
            layer.weight.grad = None
        loss = (plain(x) * wanted).sum()
        loss.backward()
        whole.step()
        loss = (other(x) * wanted).sum()
        other.begin = lambda weight, factors: mine.begin(weight, mine.groups[0], factors)
        loss.backward()
        other.begin = None
        assert other.weight.grad is None
        torch.testing.assert_close(plain.weight, other.weight, rtol=2e-4, atol=2e-5)


def test_what_factors_say_of_a_gradient_is_what_the_gradient_says():
    factors = OuterProduct(torch.randn(9, 5), torch.randn(9, 4))
    whole = factors.left.T @ factors.right
    by = torch.rand(5, 1), torch.rand(1, 4)
    for gradient in (factors, WholeGradient(whole)):
        torch.testing.assert_close(gradient.squared_norm(), whole.square().sum())
        torch.testing.assert_close(gradient.row_squares(), whole.square().sum(1))
        torch.testing.assert_close(gradient.column_squares(), whole.square().sum(0))
        torch.testing.assert_close(gradient.over_rows(by[0][:, 0]), (whole * by[0]).sum(0))
        torch.testing.assert_close(gradient.over_columns(by[1][0]), (whole * by[1]).sum(1))
        torch.testing.assert_close(gradient.scaled(*by).squared_norm(), (whole * by[0] * by[1]).square().sum())


def test_weights_that_are_read_twice_or_by_the_loss_itself_keep_a_whole_gradient():
    _, first = two(None)
    _, second = two(None)
    _, third = two(None)
    x = torch.randn(3, WIDTH)
    loss = first(x).sum() + second(x).sum() + second(2 * x).sum() + third(x).sum() + third.weight.square().sum()
    assert read_once(loss, [first, second, third]) == [first]


def wide(**changes: object) -> Job:
    """Heads 320 wide, whose middle map has 400 KiB."""
    plain = model_spec()
    spec = type(plain)(plain.encoders, 3, type(plain.head)(320, 16), 10, 3, plain.label_names)
    return job(spec, stages_of(spec)[-1], **changes)


def deep(**changes: object) -> Job:
    """Encoders 256 wide, whose maps have up to 1 MiB, trained with heads as in ``wide``."""
    plain = model_spec()
    encoder = encoder_of_size("sensor", "tiny", SHAPE, width=256, depth=3, patch=4, dropout=0.1)
    spec = type(plain)({"a": encoder, "b": encoder}, 3, type(plain.head)(320, 16), 10, 3, plain.label_names)
    return job(spec, stages_of(spec, "end_to_end")[-1], **changes)


def after(made: Job, folder: Path | None = None, steps: int = 3) -> dict[str, torch.Tensor]:
    model = build(made.model, made.stage.present, seed=1)
    if folder is not None and (settle := on_disk(made, folder)) is not None:
        settle(model)
    prepare(model, made.stage.trained)
    updates = make_optimizer(model, made.stage.trained, made.hyper)
    torch.manual_seed(5)
    for i in range(steps):
        train_step(model, made, random_batch(seed=i), updates, Auxiliary())
        large = [layer.weight for layer in row_maps(model) if layer.weight.nbytes > 2**18]
        assert all(weight.grad is None for weight in large if weight.requires_grad)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("micro", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "apollo"])
def test_a_step_with_weights_on_disk_is_the_step_with_weights_in_memory(name, micro, tmp_path):
    made = wide(optimizer=name, micro_batch=micro)
    plain = after(with_hyper(made, clip_norm=1e9))  # a limit never reached: every gradient is whole
    for weights in ("memory", "disk"):
        found = after(with_hyper(made, weights=weights), tmp_path)
        for part, value in plain.items():
            if part.endswith("qkv.bias"):  # keys' have no gradient but rounding, which these optimisers take for one
                continue
            assert (found[part] - value).double().norm() <= 1e-3 * value.double().norm(), part


@pytest.mark.parametrize("changes", [{"clip_norm": 1.0}, {"micro_batch": 2}])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "apollo"])
def test_with_maps_of_one_block_a_round_on_disk_is_that_in_memory_bit_for_bit(name, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(row_linear, "BLOCK_BYTES", 2**22)
    made, data = deep(optimizer=name, epochs=2, **changes), dataset(12, {"a": [1], "b": [2]})
    rounds = []
    for weights in ("memory", "disk"):
        local = LocalState(holdout=dataset(6, seed=3), cache=PrefixCache(tmp_path / "rows"))
        rounds.append(train_round(with_hyper(made, weights=weights), data, parts_of(made), local))
    assert rounds[0].metrics == rounds[1].metrics
    for part, tensors in rounds[0].parts.items():
        for tensor, values in tensors.items():
            assert np.array_equal(rounds[1].parts[part][tensor], values), f"{part} {tensor}"


def test_the_price_knows_that_no_gradient_is_whole_and_what_lies_on_disk():
    made = wide()
    late, early, disk = (
        price_step(one, {"a": 8, "b": 8})
        for one in (with_hyper(made, clip_norm=1.0), made, with_hyper(made, weights="disk"))
    )
    middle = 320 * 320 * 4
    assert late.peak - early.peak > 1.5 * middle  # of two heads
    assert disk.in_files >= 2 * middle
    assert early.peak - disk.peak == disk.in_files
    assert early.flops == disk.flops


def resident(path: str) -> int:
    """Bytes of a mapping in memory, by /proc/self/smaps."""
    text = Path("/proc/self/smaps").read_text()
    found = [block for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if path in block.split("\n", 1)[0]]
    return sum(1024 * int(re.search(r"^Rss:\s+(\d+)", block, re.MULTILINE)[1]) for block in found)


def test_a_weight_in_a_file_takes_no_memory_after_its_use_and_its_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(row_linear, "BLOCK_BYTES", 2**18)
    layer = nn.Linear(1024, 2048, bias=False)  # 8 MiB
    before = layer.weight.detach().clone()
    by_rows(layer, 0, tmp_path)
    assert not list(tmp_path.iterdir())
    most = 0
    for _ in range(2):
        layer(torch.ones(4, 1024, requires_grad=True)).sum().backward()
        most = max(most, resident(str(tmp_path)))
        layer.weight.grad = None
    assert most <= 2 * 2**18
    assert torch.equal(layer.weight, before)
    assert resident(str(tmp_path)) >= 8 * 2**20  # what has just been compared
    layer.release()
    assert resident(str(tmp_path)) == 0


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "apollo"])
def test_a_step_holds_a_block_of_what_lies_in_files(name, changes, tmp_path, monkeypatch):
    """Of trained encoders, too, whose gradients are whole, and of gradients that wait for a limit on their norm."""
    monkeypatch.setattr(row_linear, "BLOCK_BYTES", 2**17)
    made = deep(optimizer=name, weights="disk", **changes)
    model = build(made.model, made.stage.present, seed=1, settle=on_disk(made, tmp_path))
    assert any(is_encoder(part) and in_files(model.part(part)) for part in made.stage.trained)
    assert resident(str(tmp_path)) == 0
    prepare(model, made.stage.trained)
    for part in made.stage.present:
        load_part(model, part, part_tensors(build(made.model, [part]), part))
    assert resident(str(tmp_path)) == 0
    updates = make_optimizer(model, made.stage.trained, made.hyper)
    train_step(model, made, random_batch(), updates, Auxiliary())  # what is loaded by a first step
    before, sizes, let_go = status_bytes("RssFile"), [], row_linear.let_go
    monkeypatch.setattr(row_linear, "let_go", lambda rows: (sizes.append(status_bytes("RssFile")), let_go(rows)))
    train_step(model, made, random_batch(), updates, Auxiliary())
    in_all = sum(layer.weight.nbytes for layer in in_files(model))
    # A block, and the maps that the last layer of an encoder reads without calling them.
    assert max(sizes) - before <= 3 * 2**20 < in_all / 5


def test_what_is_sent_leaves_no_pages(tmp_path):
    layer = nn.Linear(1024, 4096, bias=False)  # 16 MiB
    by_rows(layer, 0, tmp_path)
    tensors = module_tensors(layer, copy=False)
    data = encode_part(tensors)
    assert resident(str(tmp_path)) == 0
    assert torch.equal(torch.from_numpy(decode_part(data)["weight"]), layer.weight)


def test_a_copy_of_a_layer_has_weights_of_its_own_in_memory(tmp_path):
    _, layer = two(tmp_path)
    copy = deepcopy(layer)
    x = torch.randn(3, WIDTH)
    assert (copy.on_disk, layer.on_disk) == (False, True)
    torch.testing.assert_close(copy(x), layer(x))
    with torch.no_grad():
        layer.weight.zero_()
    assert copy.weight.any()
    assert not torch.equal(copy(x), layer(x))


def test_a_full_disk_is_an_error_that_names_it(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="No space left"):
        by_rows(nn.Linear(8, 8), 0, tmp_path)


@pytest.mark.parametrize("can", [True, False])
def test_the_folder_is_made_and_holds_no_name(can, tmp_path, monkeypatch):
    if not can:
        monkeypatch.delattr(os, "O_TMPFILE")
    layer = nn.Linear(8, 8)
    by_rows(layer, 0, tmp_path / "state" / "rows")
    assert layer.on_disk
    assert not list((tmp_path / "state" / "rows").iterdir())


def test_apollo_s_step_is_the_one_of_its_algorithm():
    """By hand, two steps of algorithm 1 of arXiv 2412.05270 with rank 1 and the factor sqrt(m)."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(6, 10))
    mine, start = optimizer("apollo", [weight]), weight.detach().clone()
    z = torch.randn(6, generator=torch.Generator().manual_seed(0))
    mean, square, last = torch.zeros(10), torch.zeros(10), None
    expected = start
    for step in (1, 2):
        gradient = torch.randn(6, 10)
        weight.grad = gradient.clone()
        mine.step()
        r = z @ gradient
        mean, square = 0.9 * mean + 0.1 * r, 0.999 * square + 0.001 * r * r
        adam = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        change = gradient * 6**0.5 * adam.norm() / r.norm()
        if last is not None:
            change *= min(1.0, 1.01 * last / change.norm())
        last = change.norm()
        expected = expected - 0.02 * change
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zero_does_not_stop_apollo_for_good():
    weight = nn.Parameter(torch.ones(4, 4))
    mine = optimizer("apollo", [weight])
    for gradient in (torch.zeros(4, 4), torch.ones(4, 4)):
        weight.grad = gradient.clone()
        mine.step()
    assert (weight < 0.99).all()


def test_apollo_keeps_one_number_a_row_or_column(monkeypatch):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((30, 20), (20, 30), (4, 3, 2), (7,))]
    mine = optimizer("apollo", parameters)
    for parameter, kept in itertools.zip_longest(parameters, (60, 60, 12)):
        mine.hold(parameter)
        if kept:
            assert sum(t.numel() for t in mine._state[parameter]) == kept + 1

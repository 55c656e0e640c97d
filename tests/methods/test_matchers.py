"""Training of the small networks that guess an absent modality, and what the mask then finds by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from torch import nn

from edgefl.errors import DataError, ModelError, RunError
from edgefl.methods.fedmml.clip import clip_loss
from edgefl.methods.pmcmfl.matcher_networks import (
    MatcherSettings,
    _batches,
    train_classifier,
    train_prior,
)
from edgefl.prototypes.mask import Matcher, in_torch, stand_in
from edgefl.prototypes.table import ClassMeans

torch.set_num_threads(1)


def table(means) -> ClassMeans:
    rows = np.array(means, np.float32)
    return ClassMeans(rows, np.ones(len(rows), np.float32))


def gen(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def guessed(r: torch.Tensor, prototypes: ClassMeans, metric: str, module: nn.Module) -> torch.Tensor:
    """Stand-ins of b by the best class that ``module`` finds for projections ``r`` of a."""
    matcher, networks = Matcher(metric, k=1), {"a": [(1.0, lambda h, absent: module(h))]}
    found = stand_in("b", {"a": r}, {}, in_torch({"b": prototypes}), matcher, networks)
    assert found is not None
    return found.values.detach()


def toy(samples: int = 60, seed: int = 0):
    """Three separable classes in a of width 4; b is a linear map of a, of width 5."""
    generator = gen(seed)
    labels = np.arange(samples) % 3
    r_a = 2 * np.eye(4)[labels] + 0.1 * generator.normal(size=(samples, 4))
    r_b = r_a @ gen(9).normal(size=(4, 5))
    return (torch.tensor(r, dtype=torch.float32) for r in (r_a, r_b)), torch.from_numpy(labels)


def small(out: int, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, out))


QUICK = MatcherSettings(batch_size=16, lr=1e-2)


def test_a_classifier_learns_separable_classes_and_the_mask_then_finds_the_true_prototype():
    (r_a, r_b), labels = toy()
    module = small(3).requires_grad_(False)  # as a part that no schedule trains
    loss = train_classifier(module, r_a, labels, QUICK, gen())
    assert loss < 0.05
    assert loss == pytest.approx(float(F.cross_entropy(module(r_a), labels).detach()))
    assert not module.training
    assert all(p.grad is None for p in module.parameters())
    prototypes = table(np.stack([r_b[labels == c].mean(0).numpy() for c in range(3)]))
    (fresh, _), classes = toy(seed=3)
    found = guessed(fresh, prototypes, "classifier", module)
    np.testing.assert_allclose(found, prototypes.means[classes.numpy()], atol=1e-6)


def test_a_prior_learns_the_other_modality_and_the_mask_then_finds_the_true_prototype():
    (r_a, r_b), labels = toy()
    module = small(5)
    before = float(F.mse_loss(module(r_a), r_b).detach())
    loss = train_prior(module, r_a, r_b, QUICK, gen())
    assert loss < 0.1 * before
    assert loss == pytest.approx(float(F.mse_loss(module(r_a), r_b).detach()))
    prototypes = table(np.stack([r_b[labels == c].mean(0).numpy() for c in range(3)]))
    (fresh, _), classes = toy(seed=3)
    found = guessed(fresh, prototypes, "prior", module)
    np.testing.assert_allclose(found, prototypes.means[classes.numpy()], atol=1e-6)


def test_a_prior_takes_a_clip_step_and_then_a_squared_error_step_as_by_torch():
    (r_a, r_b), _ = toy(samples=6)
    settings = MatcherSettings(epochs=1, lr=0.02, weight_decay=0.3, temperature=0.2)
    module, reference = small(5), small(5)
    train_prior(module, r_a, r_b, settings, gen())
    for phase in ("clip", "error"):  # one batch holds them all, and neither loss minds the order
        optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.3)
        made = reference(r_a)
        unit = F.normalize(made, dim=1), F.normalize(r_b, dim=1)
        loss = clip_loss(*unit, 0.2) if phase == "clip" else F.mse_loss(made, r_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_training_follows_its_generator_alone():
    (r_a, _), labels = toy(samples=30)
    modules = [small(3, dropout=0.5) for _ in range(3)]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for seed, module in zip((1, 1, 2), modules, strict=True):
        train_classifier(module, r_a, labels, MatcherSettings(epochs=2, batch_size=8), gen(seed))
        assert torch.equal(torch.get_rng_state(), state)  # and nobody else's draw is changed
        torch.rand(3)
        state = torch.get_rng_state()
    plain = small(3)
    train_classifier(plain, r_a, labels, MatcherSettings(epochs=2, batch_size=8), gen(1))
    first, again, other, whole = (module[0].weight for module in (*modules, plain))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, whole)  # its dropout was on


def test_chance_inside_a_network_is_seeded_by_the_generator() -> None:
    class Noting(nn.Linear):
        def forward(self, r: torch.Tensor) -> torch.Tensor:
            seeds.append(torch.initial_seed())
            return super().forward(r)

    (r_a, _), labels = toy(samples=12)
    seeds: list[int] = []
    for seed in range(3):
        train_classifier(Noting(4, 3), r_a, labels, MatcherSettings(epochs=1), gen(seed))
    # one batch, and all rows once more at the end, when what chance did before is restored
    assert seeds[::2] == [int(gen(seed).integers(2**31)) for seed in range(3)]


def test_samples_without_a_label_are_left_out_and_projections_get_no_gradient():
    (r_a, _), labels = toy(samples=12)
    one, two = small(3), small(3)
    settings = MatcherSettings(epochs=3, batch_size=4)
    more = torch.cat([r_a, torch.full((2, 4), 50.0)]).requires_grad_()
    loss = train_classifier(one, r_a, labels, settings, gen())
    assert loss == train_classifier(two, more, torch.cat([labels, torch.tensor([-1, -1])]), settings, gen())
    assert more.grad is None


def test_batches_are_even_and_hold_every_row_once_an_epoch():
    def sizes(count: int) -> list[int]:
        batches = list(_batches(count, MatcherSettings(epochs=2, batch_size=4), gen()))
        half = len(batches) // 2
        for epoch in (batches[:half], batches[half:]):
            assert sorted(torch.cat(epoch).tolist()) == list(range(count))
        return [len(rows) for rows in batches[:half]]

    assert sizes(11) == [6, 5]
    assert sizes(3) == [3]
    assert sizes(12) == [4, 4, 4]
    first, second = _batches(30, MatcherSettings(epochs=2), gen())
    assert first.tolist() != second.tolist() != list(range(30))


def test_too_little_to_learn_from_and_wrong_settings_are_errors():
    (r_a, r_b), labels = toy(samples=6)
    with pytest.raises(DataError, match="no sample with this modality has a label"):
        train_classifier(small(3), r_a, torch.full_like(labels, -1), QUICK, gen())
    with pytest.raises(DataError, match="two complete samples"):
        train_prior(small(5), r_a[:1], r_b[:1], QUICK, gen())
    with pytest.raises(DataError, match="6 and 5 rows"):
        train_prior(small(5), r_a, r_b[:5], QUICK, gen())
    for settings in (MatcherSettings(epochs=0), MatcherSettings(batch_size=1)):
        with pytest.raises(ModelError, match="batches of 2"):
            train_prior(small(5), r_a, r_b, settings, gen())
    with pytest.raises(RunError, match="became nan"):
        train_classifier(small(3), torch.full((4, 4), torch.inf), labels[:4], QUICK, gen())
    assert train_prior(small(5), r_a[:2], r_b[:2], MatcherSettings(epochs=1, batch_size=2), gen()) > 0

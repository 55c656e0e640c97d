"""Who is asked next: what the server remembers of the devices, and selection by it."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from extra_fixture import extra
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from edgefl.aggregation import history as coalition
from edgefl.aggregation.history import RETURNS_KEPT, Memory, Track, note_round
from edgefl.errors import ModelError
from edgefl.methods import select
from edgefl.methods.mmic import banzhaf

sampled = extra("banzhaf_sampled")
ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "oracles.json").read_text())
CASES = {case["id"]: case for case in ORACLES["cases"]}
NEAR = ORACLES["tolerance"]


def named(values) -> dict:
    return dict(zip("abcdefgh", values, strict=False))


# The coalition's return and its core


def test_oracle_banzhaf_1_the_return_of_a_coalition_and_without_each_member():
    case = CASES["banzhaf-1"]
    weights, returns = named(case["inputs"]["weights"]), named(case["inputs"]["returns"])
    assert coalition.coalition_return(weights, returns) == pytest.approx(case["expect"]["all"], abs=NEAR)
    for left, expected in zip(returns, case["expect"]["without"], strict=True):
        others = {name: value for name, value in returns.items() if name != left}
        assert coalition.coalition_return(weights, others) == pytest.approx(expected, abs=NEAR)


def test_core_is_who_turns_the_coalition():
    """A = 0.21; without a 0.02, b 0.343, c 0.2125: at alpha* 0.1 and 0.21 a turns it; 0.215 is lost."""
    weights, returns = named([0.5, 0.3, 0.2]), named([0.4, -0.1, 0.2])
    assert coalition.core_members(weights, returns, 0.1) == {"a"}
    assert coalition.core_members(weights, returns, 0.21) == {"a"}
    assert coalition.core_members(weights, returns, 0.215) == set()
    assert coalition.core_members(weights, returns, 0.01) == set()  # everyone can leave


def test_several_can_be_core():
    """A = (0.6 + 0.6 + 0) / 3 = 0.4; without a or b 0.3, without c 0.6."""
    assert coalition.core_members(named([1, 1, 1]), named([0.6, 0.6, 0.0]), 0.4) == {"a", "b"}


def test_alone_a_device_is_core_when_its_return_reaches_the_gain():
    # Rounding must not decide.
    assert 0.7 * 0.1 / 0.7 < 0.1
    assert coalition.core_members({"a": 0.7}, {"a": 0.1}, 0.1) == {"a"}
    assert coalition.core_members({"a": 0.7}, {"a": 0.1}, 0.11) == set()
    assert coalition.core_members({"a": 0.3, "b": 0.0}, {"a": 0.1, "b": 9.0}, 0.1) == {"a"}
    assert coalition.core_members({}, {}, 0.0) == set()


def test_equal_returns_make_nobody_core():
    weights = named([0.1, 0.2, 0.7])
    assert coalition.core_members(weights, dict.fromkeys(weights, 0.1), 0.1) == set()


def test_a_coalition_that_weighs_nothing_is_named():
    with pytest.raises(ModelError, match="a, b weigh nothing"):
        coalition.coalition_return(named([0, 0]), named([1, 2]))


# Selection


def probabilities(core: dict, selected: dict, temperature: float) -> dict[str, float]:
    """device -> probability to be drawn first: what a draw by score + Gumbel noise gives."""
    scores = banzhaf.scores_of(core, selected, temperature)
    return dict(zip(scores, softmax(list(scores.values())).tolist() if scores else [], strict=True))


@pytest.mark.parametrize("case", ["banzhaf-2", "banzhaf-3"])
def test_oracle_selection_probability(case):
    inputs, expected = CASES[case]["inputs"], CASES[case]["expect"]
    got = probabilities(named(inputs["core"]), named(inputs["selected"]), inputs["temperature"])
    assert list(got.values()) == pytest.approx(expected, abs=NEAR)


def test_probabilities_of_the_unknown_of_nobody_and_of_a_hot_index():
    assert probabilities(named([0, 0]), named([0, 5]), 2.0) == {"a": 0.5, "b": 0.5}
    assert probabilities({}, {}, 2.0) == {}
    assert list(probabilities({"b": 1, "a": 0}, {"b": 1, "a": 0}, 2.0)) == ["a", "b"]
    assert probabilities(named([1, 0]), named([1, 1]), 1e6) == {"a": 1.0, "b": 0.0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.floats(0, 50))
def test_probabilities_sum_to_one_and_rise_with_the_share_of_core_rounds(pairs, temperature):
    core, selected = named([c for c, _ in pairs]), named([c + more for c, more in pairs])
    got = probabilities(core, selected, temperature)
    assert sum(got.values()) == pytest.approx(1)
    ratio = {name: core[name] / selected[name] if selected[name] else 0 for name in core}
    for one, other in itertools.combinations(core, 2):
        assert (got[one] - got[other]) * (ratio[one] - ratio[other]) >= 0


def remembered(rounds: int = 4, **tracks: Track) -> Memory:
    return Memory(rounds=rounds, devices=tracks)


HISTORY = remembered(a=Track(core=2, selected=4), b=Track(core=0, selected=3), c=Track(core=1, selected=1))


def test_the_draw_follows_the_probabilities_without_replacement():
    """p = 0.245, 0.090, 0.665 (banzhaf-3); of two of three, c is in with p_c + sum_i p_i p_c / (1 - p_i) = 0.9464."""
    p = dict(zip("abc", CASES["banzhaf-3"]["expect"], strict=True))
    rng = np.random.default_rng(0)
    drawn = [
        banzhaf.banzhaf(["c", "a", "b"], rng, memory=HISTORY, share=share, warmup_rounds=4, temperature=2.0)
        for share in (0.1, 0.6)
        for _ in range(4000)
    ]
    first, pairs = drawn[:4000], drawn[4000:]
    for name in "abc":
        assert first.count([name]) / 4000 == pytest.approx(p[name], abs=0.03)
        inside = p[name] + sum(q * p[name] / (1 - q) for other, q in p.items() if other != name)
        assert sum(name in pair for pair in pairs) / 4000 == pytest.approx(inside, abs=0.03)
    assert all(pair == sorted(set(pair)) and len(pair) == 2 for pair in pairs)


def test_before_the_warm_up_ends_the_draw_is_the_uniform_one():
    options = {"share": 0.5, "temperature": 1e9}
    for seed in range(5):
        uniform = select.at_random(list("abc"), np.random.default_rng(seed), share=0.5)
        early = banzhaf.banzhaf(list("abc"), np.random.default_rng(seed), memory=HISTORY, warmup_rounds=5, **options)
        early_sampled = sampled.banzhaf_sampled(
            list("abc"), np.random.default_rng(seed), memory=HISTORY, warmup_rounds=5, **options
        )
        assert early == early_sampled == uniform
        late = banzhaf.banzhaf(list("abc"), np.random.default_rng(seed), memory=HISTORY, warmup_rounds=4, **options)
        assert late == ["a", "c"]  # shares of core rounds: a 0.5, c 1


@pytest.mark.parametrize("method", [banzhaf.banzhaf, sampled.banzhaf_sampled])
def test_a_draw_depends_on_names_not_on_order_and_takes_strangers_and_nobody(method):
    def draw(devices, share=0.5):
        rng = np.random.default_rng(3)
        return method(devices, rng, memory=HISTORY, share=share, warmup_rounds=0, temperature=2.0)

    assert draw(["new", "c", "a", "b"]) == draw(["a", "b", "c", "new"])
    assert draw(["new", "c", "a", "b"], share=1.0) == ["a", "b", "c", "new"]
    assert draw([]) == []
    assert len(draw(["new"], share=0.01)) == 1


def test_banzhaf_values_by_hand_and_over_all_coalitions():
    """Equal weights, returns 0.4 and 0: a adds 0.4 - 0 alone and 0.2 - 0 to b, mean 0.3; b adds 0 and 0.2 - 0.4."""
    everything = np.array(list(itertools.product([False, True], repeat=2)))
    assert sampled.banzhaf_values(named([1, 1]), named([0.4, 0.0]), everything) == pytest.approx(named([0.3, -0.1]))

    weights, returns = named([5, 3, 2, 7]), named([0.4, -0.1, 0.2, 0.05])
    some = np.array([[True, False, False, False], [True, True, False, True]])
    backwards = dict(reversed(returns.items()))
    assert sampled.banzhaf_values(weights, backwards, some) == sampled.banzhaf_values(weights, returns, some)
    everything = np.array(list(itertools.product([False, True], repeat=4)))
    for name, value in sampled.banzhaf_values(weights, returns, everything).items():
        others = [other for other in returns if other != name]
        added = []
        for size in range(4):
            for group in itertools.combinations(others, size):
                before = coalition.coalition_return(weights, {n: returns[n] for n in group}) if group else 0.0
                added.append(coalition.coalition_return(weights, {n: returns[n] for n in (*group, name)}) - before)
        assert value == pytest.approx(sum(added) / 8)


def test_the_sampled_selector_prefers_who_added_to_the_last_round():
    """Values 0.3 and -0.1 as above for the last round; c's return is of an earlier one and d weighs nothing: 0."""
    memory = remembered(
        rounds=4,
        a=Track(returns={4: 0.4}, weight=1),
        b=Track(returns={3: 9.0, 4: 0.0}, weight=1),
        c=Track(returns={3: 9.0}, weight=1),
        d=Track(returns={4: 9.0}, weight=0),
    )
    options = {"memory": memory, "warmup_rounds": 4, "temperature": 1e4, "samples": 64}
    rng = np.random.default_rng(0)
    assert sampled.banzhaf_sampled(list("abcd"), rng, share=0.25, **options) == ["a"]
    assert sampled.banzhaf_sampled(list("abcd"), rng, share=0.75, **options) == ["a", "c", "d"]


def test_the_sampled_selector_draws_by_the_banzhaf_value():
    """Returns 0.6, 0, 0: a adds 0.6, 0.3, 0.3, 0.2, mean 0.35; b adds 0, -0.3, 0, -0.1, mean -0.1, and so does c.
    At temperature 4 a comes first with e^1.4 / (e^1.4 + 2 e^-0.4) = 0.7515.
    """
    memory = remembered(rounds=4, **{name: Track(returns={4: 0.6 * (name == "a")}, weight=1) for name in "abc"})
    options = {"memory": memory, "warmup_rounds": 4, "temperature": 4, "samples": 256, "share": 0.1}
    rng = np.random.default_rng(0)
    drawn = [sampled.banzhaf_sampled(list("abc"), rng, **options)[0] for _ in range(2000)]
    assert drawn.count("a") / 2000 == pytest.approx(0.7515, abs=0.03)


def test_the_selectors_defaults_are_the_papers():
    def defaults(method):
        return {name: p.default for name, p in inspect.signature(method).parameters.items() if p.default is not p.empty}

    expected = {"share": 0.5, "warmup_rounds": 100, "warmup": "clusters", "temperature": 2.0}
    assert defaults(banzhaf.banzhaf) == expected
    assert defaults(sampled.banzhaf_sampled) == {**expected, "samples": 128}


# Selection inside clusters


def grouped(**clusters: int) -> Memory:
    return Memory(rounds=9, devices={name: Track(cluster=cluster, selected=1) for name, cluster in clusters.items()})


FOUR_BY_THREE = grouped(**{f"{m}{i}": m_number for m_number, m in enumerate("pqrs") for i in range(3)})


@pytest.mark.parametrize("method", [select.at_random, banzhaf.banzhaf, sampled.banzhaf_sampled])
def test_two_or_more_of_a_cluster_train_together(method):
    """4 of 12 in four clusters of three: two of each of two clusters; one draw for all does so in 54 of 495."""
    options = {} if method is select.at_random else {"warmup_rounds": 0}
    times = dict.fromkeys(FOUR_BY_THREE.devices, 0)
    for seed in range(200):
        drawn = method(sorted(times), np.random.default_rng(seed), FOUR_BY_THREE, share=1 / 3, **options)
        sizes = [sum(name[0] == m for name in drawn) for m in "pqrs"]
        assert sorted(sizes) == [0, 0, 2, 2]
        for name in drawn:
            times[name] += 1
    assert all(40 <= count <= 95 for count in times.values())  # 67 each, deviation 7


def test_a_uniform_draw_of_the_warm_up_is_inside_clusters_too():
    options = {"share": 1 / 3, "warmup_rounds": 100}
    drawn = banzhaf.banzhaf(sorted(FOUR_BY_THREE.devices), np.random.default_rng(5), FOUR_BY_THREE, **options)
    assert len({name[0] for name in drawn}) == 2


def test_the_softmax_is_over_a_clusters_own_devices():
    """In cluster 0 a and c are ahead of b, in cluster 1 all are behind: two of each take part."""
    tracks = {name: Track(core=4 * (name in "ac"), selected=4, cluster=int(name in "def")) for name in "abcdef"}
    memory = Memory(rounds=9, devices=tracks)
    options = {"share": 4 / 6, "warmup_rounds": 0, "temperature": 500.0}
    drawn = banzhaf.banzhaf(list("abcdef"), np.random.default_rng(1), memory, **options)
    assert drawn[:2] == ["a", "c"]
    assert len(drawn) == 4


def test_devices_whose_cluster_is_not_known_yet_are_a_group_of_their_own():
    memory = grouped(a=0, b=0)
    for seed in range(20):
        drawn = select.at_random(list("abcd"), np.random.default_rng(seed), memory, share=0.5)
        assert drawn in (["a", "b"], ["c", "d"])
    nothing_known = select.at_random(list("abcd"), np.random.default_rng(3), grouped(a=-1), share=0.5)
    assert nothing_known == select.at_random(list("abcd"), np.random.default_rng(3), share=0.5)


# Memory


def test_two_rounds_by_hand():
    """Round 1: returns a .25, b .15 on alpha* 0, which either reaches alone: none is core.

    Round 2: returns a 0.2, b -0.1; alpha* = (3 x 0.15 - 0.05) / 4 = 0.1; A = (0.6 - 0.1) / 4 = 0.125, by a.
    """
    first = note_round(Memory(), {"a": 0.5, "b": 0.6}, {"a": 0.25, "b": 0.45}, {"a": 3, "b": 1})
    assert (first.rounds, first.gains) == (1, {-1: 0.0})
    assert first.devices["a"] == Track(metric=0.5, received=0.25, returns={1: 0.25}, selected=1, weight=3)

    second = note_round(first, {"a": 0.7, "b": 0.5, "c": 0.9}, {"a": 0.4, "b": 0.4}, {"a": 3, "b": 1, "c": 2})
    assert second.gains == {-1: pytest.approx(0.1)}
    assert second.devices["a"].returns == pytest.approx({1: 0.25, 2: 0.2})
    assert second.devices["b"].returns == pytest.approx({1: 0.15, 2: -0.1})
    assert second.devices["c"].returns == {}  # it measured nothing on the model it was sent
    assert {name: (track.core, track.selected) for name, track in second.devices.items()} == {
        "a": (1, 2),
        "b": (0, 2),
        "c": (0, 1),
    }


def test_a_return_reaches_back_to_the_last_time_and_the_rest_stays():
    memory = note_round(Memory(), {"a": 0.5, "b": 0.1}, {"b": 0.5}, {"a": 1, "b": 1})
    memory = note_round(memory, {"b": 0.2}, {"b": 0.6}, {"b": 1})
    assert memory.gains == {-1: pytest.approx(0.1)}
    memory = note_round(memory, {"a": 0.8}, {}, {"a": 2})
    assert memory.devices["a"].returns == pytest.approx({3: 0.3})
    assert memory.devices["b"].returns == pytest.approx({1: -0.4, 2: 0.1})
    assert (memory.devices["b"].core, memory.devices["b"].selected) == (1, 2)
    assert memory.gains == {}  # no device measured what it was sent
    assert memory.devices["a"].core == 0  # alpha* was unknown in round 3


def test_coalitions_are_of_clusters():
    """Cluster 0: returns a .2, b .1, alpha* 0: either alone reaches it, and neither is core.

    Cluster 1: returns c .3, d -.1, alpha* .05: A = .1 reaches it, without c -.1 does not, without d .3 does: c is core.
    As one coalition: A = .125, alpha* = .025; without any one of them the others still reach it: nobody would be core.
    """
    clusters, ones = {"a": 0, "b": 0, "c": 1, "d": 1}, dict.fromkeys("abcd", 1)
    memory = note_round(Memory(), dict.fromkeys("abcd", 0.5), dict.fromkeys("abcd", 0.4), ones, clusters)
    trained = {"a": 0.7, "b": 0.6, "c": 0.8, "d": 0.4}
    received = {"a": 0.4, "b": 0.4, "c": 0.45, "d": 0.45}
    apart = note_round(memory, trained, received, ones, clusters)
    assert apart.gains == {0: pytest.approx(0.0), 1: pytest.approx(0.05)}
    assert {name for name, track in apart.devices.items() if track.core} == {"c"}
    together = note_round(memory, trained, received, ones)
    assert not any(track.core for track in together.devices.values())


def test_a_device_alone_in_its_cluster_is_core_when_it_reaches_what_it_was_sent():
    clusters, ones = {"a": 0, "b": 1, "c": 1}, dict.fromkeys("abc", 1)
    memory = note_round(Memory(), dict.fromkeys("abc", 0.5), dict.fromkeys("abc", 0.5), ones, clusters)
    memory = note_round(memory, {"a": 0.6, "b": 0.2, "c": 0.2}, dict.fromkeys("abc", 0.55), ones, clusters)
    assert {name: track.core for name, track in memory.devices.items()} == {"a": 2, "b": 0, "c": 0}
    assert {name: track.cluster for name, track in memory.devices.items()} == clusters


def test_a_memory_from_before_coalitions_were_of_clusters_is_read():
    old = b'{"rounds":2,"metric":0.4,"gain":0.1,"devices":{"a":{"metric":0.5,"core":1,"selected":2,"cluster":3}}}'
    memory = msgspec.json.decode(old, type=Memory)
    assert memory == Memory(rounds=2, devices={"a": Track(metric=0.5, core=1, selected=2, cluster=3)})
    memory = note_round(memory, {"a": 0.7}, {"a": 0.6}, {"a": 1}, {"a": 3})
    assert memory.devices["a"].returns == pytest.approx({3: 0.2})
    assert memory.gains == {}  # what it was sent before is not known


def test_who_reports_first_does_not_matter():
    values, weights = named([0.1, 0.2, 0.3, 0.7]), named([0.1, 0.7, 0.3, 0.9])
    memory = Memory(devices={"d": Track(metric=0.1, received=0.2, returns={-1: 0.5, -3: 0.4})})
    one = note_round(memory, values, values, weights)
    other = note_round(memory, *(dict(reversed(x.items())) for x in (values, values, weights)))
    assert one == other
    assert list(one.devices) == list(other.devices) == ["d", "a", "b", "c"]
    assert list(one.devices["d"].returns) == [-3, -1, 1]


def test_what_is_known_of_nobody_and_that_it_cannot_be_changed():
    assert Track() == Track(metric=None, received=None, returns={}, core=0, selected=0, weight=0.0, cluster=-1)
    assert Memory() == Memory(rounds=0, gains={}, devices={}, networks={})
    with pytest.raises(AttributeError):
        Track().core = 1
    with pytest.raises(AttributeError):
        Memory().rounds = 1


def test_devices_without_metrics_or_weight_are_only_counted():
    memory = note_round(Memory(), {"a": 0.5, "c": 0.5}, {"a": 0.5, "c": 9.0}, {"a": 1, "b": 1, "c": 0})
    assert memory.devices["b"] == Track(selected=1, weight=1)
    memory = note_round(memory, {"c": 9.0}, {"c": 9.0}, {"c": 0})
    assert (memory.rounds, memory.gains) == (2, {})
    assert memory.devices["c"].core == 0
    assert note_round(memory, {}, {}, {}) == msgspec.structs.replace(memory, rounds=3)


def test_the_cluster_stays_and_returns_do_not_grow_without_bound():
    memory = Memory(devices={"a": Track(metric=0.0, cluster=3)})
    for value in range(RETURNS_KEPT + 5):
        memory = note_round(memory, {"a": value + 1.0}, {}, {"a": 1})
    track = memory.devices["a"]
    assert track.cluster == 3
    assert sorted(track.returns) == list(range(6, RETURNS_KEPT + 6))
    assert (RETURNS_KEPT, memory.rounds) == (200, 205)


def test_memory_survives_json():
    memory = note_round(HISTORY, {"a": 0.5}, {"a": 0.4}, {"a": 1})
    memory = note_round(memory, {"a": 0.75}, {"a": 0.5}, {"a": 1})
    assert memory.devices["a"].returns == pytest.approx({5: 0.1, 6: 0.25})
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory
    plain = json.loads(json.dumps(msgspec.to_builtins(memory)))
    assert msgspec.convert(plain, Memory, str_keys=True) == memory


@pytest.mark.parametrize(
    ("metrics", "received", "weights", "names"),
    [
        ({"b": math.nan, "a": math.nan}, {}, {"a": 1, "b": 1}, "metric of device 'a' is nan"),
        ({}, {"a": math.inf}, {"a": 1}, "received of device 'a' is inf"),
        ({}, {}, {"a": -1}, "weight of device 'a' is -1"),
        ({"b": 0.5}, {}, {"a": 1}, "'b' reports a metric, but took no part"),
        ({}, {"b": 0.5}, {"a": 1}, "'b' reports a metric of the model it received, but took no part"),
    ],
)
def test_what_cannot_be_noted_is_named(metrics, received, weights, names):
    with pytest.raises(ModelError, match=names):
        note_round(Memory(), metrics, received, weights)

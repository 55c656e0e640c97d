"""Run, recipe and device files: every problem at once, with path, line and choices; overrides; what ships."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl import registry
from edgefl.config.profiles import budget_overrides, find, fleet_profile, load_device, load_recipe, load_run, shipped
from edgefl.config.settings import RunConfig
from edgefl.config.slots import conflicts, parse_slot
from edgefl.config.yaml_files import MAX_FIELDS, MAX_FILE_BYTES, _Loader, override, parse_bytes, read_yaml
from edgefl.errors import ConfigError
from edgefl.plan.compile import compile_run
from edgefl.records import RESERVED
from edgefl.registry import default, methods
from edgefl.roles import ROLES, Objective

RUN = """\
name: mine
recipe: lw-prototypes
model:
  stages: 2
  encoders:
    acc: {kind: sensor}
    gyro: {kind: sensor}
training:
  rounds: [1, 1]
fleet:
  - {name: a}
  - {name: b}
"""

#: Six anchors of nine aliases each: some half a million fields in 200 characters.
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


def problems(load, *arguments) -> dict[str, tuple[int, str]]:
    with pytest.raises(ConfigError) as raised:
        load(*arguments)
    return {problem.path: (problem.line, problem.message) for problem in raised.value.problems}


def test_a_good_run_file_is_read_with_its_defaults(tmp_path):
    run, recipe = load_run(write(tmp_path, RUN))
    assert (run.name, recipe.name, run.seed) == ("mine", "lw-prototypes", 0)
    assert run.training.lr.model_dump() == {"encoder": 1e-3, "head": 1e-3}
    assert recipe.slots["objective"]["modality_contrast"] == {"weight": 1.0, "temperature": 0.1}


def test_every_problem_of_a_file_is_told_at_once_with_path_line_and_choices(tmp_path):
    bad = """\
        name: "no good"
        seed: -1
        recipe: lw-prototypes
        slots: {missing: protoype, objectiv: clip}
        model:
          stages: 2
          encoders:
            label: {kind: sensor}
            acc: {kind: sensr, widht: 3}
        training:
          rounds: [1, x]
          lr: {encoder: fast}
        data:
          source: 5
          partition: dirichlt
        fleet:
          - {name: a, profile: cpuu}
          - {name: b, budget: {memory_byte: 3}}
          - 7
    """
    found = problems(load_run, write(tmp_path, bad))
    assert {path: line for path, (line, _) in found.items()} == {
        "name": 1,
        "seed": 2,
        "slots.missing": 4,
        "slots.objectiv": 4,
        "model.encoders.label": 8,
        "model.encoders.acc.kind": 9,
        "model.encoders.acc.widht": 9,
        "training.rounds.1": 11,
        "training.lr.encoder": 12,
        "data.source": 14,
        "data.partition": 15,
        "fleet.0.profile": 17,
        "fleet.1.budget": 18,
        "fleet.2": 19,
    }
    told = {path: message for path, (_, message) in found.items()}
    assert "did you mean 'prototype'? valid: zero, completion, ignore, prototype, random" in told["slots.missing"]
    assert "did you mean 'objective'?" in told["slots.objectiv"]
    assert (
        "'sensr'; did you mean 'sensor'? valid: sensor, table, vision, text, audio" in told["model.encoders.acc.kind"]
    )
    assert "did you mean 'width'?" in told["model.encoders.acc.widht"]
    assert "'natural', 'uniform', 'dirichlet', 'shards' or 'drawn'" in told["data.partition"]
    assert "did you mean 'cpu'?" in told["fleet.0.profile"]
    assert "did you mean 'memory_bytes'?" in told["fleet.1.budget"]
    assert "or should be" in told["data.source"]  # one fault of a union is one problem
    assert told["fleet.2"] == "should be a mapping of fields, not 7"


def test_contradictions_between_fields_are_told_at_the_field_to_mend(tmp_path):
    text = RUN.replace("[1, 1]", "[0, 0, 0]\n  lr: {head: [0.1]}") + "  - {name: a}\n"
    text += "data:\n  missing:\n    devices: {c: [acc, gyr]}\n"
    with pytest.raises(ConfigError) as raised:
        load_run(write(tmp_path, text))
    assert [(p.line, p.path) for p in raised.value.problems] == [
        (9, "training.rounds"),
        (10, "training.lr.head"),
        (9, "training.rounds"),
        (11, "fleet"),
        (17, "data.missing.devices.c"),
        (17, "data.missing.devices.c"),
    ]
    assert "did you mean 'gyro'?" in raised.value.message
    assert raised.value.exit_code == 10
    assert "`edgefl recipes` lists the methods" in raised.value.remedy


def test_rounds_that_are_no_list_and_a_broken_line_have_remedies_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one number a stage, such as \[1, 1, 1, 1, 1, 1\] for six stages"):
        load_run(write(tmp_path, RUN.replace("rounds: [", "rounds: 6 #[")))
    with pytest.raises(ConfigError, match="line 2, YAML") as broken:
        load_run(write(tmp_path, "data: {source: a.npz\nmodel: 3\n"))
    assert "brackets closed" in broken.value.remedy
    assert "docs/" not in broken.value.remedy


@pytest.mark.parametrize(
    ("slots", "path", "words"),
    [
        ({"missing": "prototype"}, "missing", "needs class prototypes"),
        ({"objective": ["cross_entropy", "modality_contrast"]}, "objective", "needs class prototypes"),
        ({"prototypes": "class_mean", "objective": "clip"}, "prototypes", "needs labels"),
    ],
)
def test_slots_that_need_one_another(slots, path, words):
    found = problems(load_recipe, "end_to_end", slots)
    assert words in found[path][1]


@pytest.mark.parametrize("name", [*sorted(RESERVED), "1acc", "a.b", "a/b", "", "x" * 33])
def test_a_modality_can_not_have_a_name_that_means_something_else(tmp_path, name):
    text = RUN.replace("acc: {", f'"{name}": {{')
    found = problems(load_run, write(tmp_path, text))
    assert [path for path in found if path.startswith("model.encoders")]
    assert "beginning with a letter" in next(iter(found.values()))[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [", "line 1"),
        ("- 1\n- 2", "mapping of fields"),
        ("", "mapping of fields"),
        ("name: a\nname: b", "line 2, name: is given twice, first on line 1"),
        ("name: 2026-13-45", "month must be in 1..12"),
        ("name: \x00", "YAML"),
        ("a: " + "[" * 5000, "YAML"),
        ("a: &a [1, *a]", "YAML"),
        (LAUGHS, str(MAX_FIELDS)),
    ],
)
def test_malformed_yaml_is_a_message_not_a_traceback(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_yaml(file)
    assert words in raised.value.message


def test_an_alias_of_a_large_mapping_costs_what_one_of_a_number_does():
    """Fifty thousand of them would take a minute if the mapping's keys were looked at again for each."""
    head = "a: &a {" + "".join(f"k{i}: 1, " for i in range(300)) + "}\nb: &b 1\nc:\n"

    def looked(alias: str) -> int:
        loader, count = _Loader(head + f"- *{alias}\n" * 300), 0

        def note(frame: object, event: str, called: object) -> None:
            nonlocal count
            count += called is isinstance

        sys.setprofile(note)
        try:
            loader.get_single_node()
        finally:
            sys.setprofile(None)
        return count

    assert looked("a") == looked("b")


def test_files_that_can_not_be_read(tmp_path):
    for name in ("missing.yaml", "."):
        with pytest.raises(ConfigError, match=r"cannot be read|mapping"):
            read_yaml(tmp_path / name)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(binary)
    binary.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(binary)


def test_overrides_reach_any_depth_and_are_not_blamed_on_the_file(tmp_path):
    file = write(tmp_path, RUN)
    given = ["training.epochs=3", "fleet.1.profile=gpu-box", "training.lr={head: [1e-3, 0.5]}", "round.join_s=1e1"]
    run, _ = load_run(file, given)
    assert (run.training.epochs, run.fleet[1].profile, run.round.join_s) == (3, "gpu-box", 10.0)
    assert run.training.lr.head == [0.001, 0.5]
    assert run.training.lr.encoder == 1e-3  # the default, not the file's whole table
    found = problems(load_run, file, ["training.rounds=[1, 2, 3]", "model.stages=two"])
    assert {path: line for path, (line, _) in found.items()} == {"model.stages": 0}
    assert problems(load_run, file, ["training.rounds=[1, 2, 3]"])["training.rounds"][0] == 0


@pytest.mark.parametrize("wrong", ["seed", "=3", "seed=[", "seed=2026-13-45", "fleet.7.name=x", "fleet.x.name=y"])
def test_wrong_overrides_name_themselves(tmp_path, wrong):
    with pytest.raises(ConfigError) as raised:
        load_run(write(tmp_path, RUN), [wrong])
    assert raised.value.file == "--set"


def test_an_override_changes_nothing_in_place():
    values = {"a": {"b": [1, {"c": 2}]}}
    assert override(values, ["a.b.1.c=3", "x.y=null"]) == {"a": {"b": [1, {"c": 3}]}, "x": {"y": None}}
    assert values == {"a": {"b": [1, {"c": 2}]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("600 MiB", 629145600), ("1.5GiB", 1610612736), ("2 kb", 2000), ("1048576", 1048576), (7, 7), (" 1 B ", 1)],
)
def test_amounts_of_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["3 furlongs", "-1 MiB", "MiB", "1,5 GiB", "9" * 400, "1e9"])
def test_what_is_no_amount_of_bytes(text):
    with pytest.raises(ValueError, match="600 MiB"):
        parse_bytes(text)


def test_a_device_of_local_mode_may_lift_or_set_a_limit_of_its_profile():
    assert fleet_profile("single-stage", {"step_memory_bytes": None}).budget.step_memory_bytes is None
    assert fleet_profile("single-stage", {"step_memory_bytes": "1 MiB"}).budget.step_memory_bytes == 2**20
    assert budget_overrides({"flops": None, "disk_bytes": "1 GiB"}) == [
        "budget.flops=null",
        'budget.disk_bytes="1 GiB"',
    ]


def test_a_date_may_be_written_as_yaml_understands_it(tmp_path):
    assert load_device(write(tmp_path, "name: mine\ndate: 2026-11-30\n", "d.yaml")).date == "2026-11-30"


@pytest.mark.parametrize("role", ROLES)
def test_every_choice_of_every_role_is_read_alone_and_with_each_of_its_options(role):
    for choice, method in methods(role).items():
        options = method.options
        defaults = {name: option.default for name, option in options.items()}
        assert parse_slot(role, choice) == {choice: defaults}
        assert parse_slot(role, {choice: None}) == {choice: defaults}
        assert parse_slot(role, {choice: defaults}) == {choice: defaults}
        for name, option in options.items():
            free = isinstance(option.default, str) and not option.choices
            text = () if free else ("nonsense",)
            for wrong in (None, True, *text, float("nan"), option.least - 1, option.most + 1):
                with pytest.raises(ValueError, match=f"{choice}.{name}"):
                    parse_slot(role, {choice: {name: wrong}})
        with pytest.raises(ValueError, match="has no option"):
            parse_slot(role, {choice: {"nonsense": 1}})
        for wrong in (0, [], "x", False):
            with pytest.raises(ValueError, match="options"):
                parse_slot(role, {choice: wrong})


@given(VALUES)
def test_whatever_fills_a_slot_it_is_read_or_refused_in_words(value):
    with contextlib.suppress(ValueError):
        assert parse_slot("objective", value)


@given(st.text(max_size=40))
def test_whatever_an_override_says_it_is_applied_or_refused_in_words(text):
    with contextlib.suppress(ConfigError):
        assert override({"a": {"b": [1]}}, [text])


def test_everything_shipped_loads():
    devices, recipes, runs = shipped("devices"), shipped("recipes"), shipped("runs")
    assert (len(devices), len(recipes), len(runs)) == (14, 24, 2)
    for name in devices:
        assert load_device(name).name == name
    for name in recipes:
        assert load_recipe(name).name == name
    for name in runs:
        assert load_run(name)[0].name == name


def test_profiles_say_where_a_trainer_finds_its_memory():
    """Jetsons: one pool and one budget; cards: memory of their own, beside the machine's."""
    found = {name: load_device(name) for name in shipped("devices")}
    assert {n for n, one in found.items() if one.unified} == {n for n in found if n.startswith("jetson")}
    cards = {n: one.gpu_memory_bytes for n, one in found.items() if one.gpu_memory_bytes}
    assert cards == {"rtx-4090": 24 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}
    assert {found[name].torch_device for name in cards} == {"cuda"}
    for one in found.values():
        allowed = one.budget.record()
        for limit, there in (
            (allowed.memory_bytes, one.memory_bytes),
            (allowed.gpu_memory_bytes, one.gpu_memory_bytes),
        ):
            assert limit is None or there is None or limit <= there
        assert not (one.unified and (one.gpu_memory_bytes or allowed.gpu_memory_bytes))
    assert (found["jetson-nano"].budget.memory_bytes, found["rtx-4090"].budget.gpu_memory_bytes) == (
        2 * 2**30,
        20 * 2**30,
    )


def test_unified_memory_is_not_told_twice():
    for field in ("gpu_memory_bytes", "budget.gpu_memory_bytes"):
        _, told = problems(load_device, "jetson-nano", [f"{field}=1 GiB"])[field]
        assert "budget.memory_bytes limits processor and GPU together" in told


def test_a_card_that_does_not_train_is_not_told():
    for device in ("auto", "cpu"):
        _, told = problems(load_device, "rtx-4090", [f"torch_device={device}"])["gpu_memory_bytes"]
        assert f"torch_device is {device}: set cuda" in told


def test_a_name_that_is_neither_shipped_nor_a_file(tmp_path, monkeypatch):
    assert "did you mean 'demo'?" in problems(find, "runs", "dmo")["runs"][1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").write_text(RUN)
    assert load_run("own")[0].name == "mine"


def test_a_run_file_of_the_wrong_shape_everywhere_is_still_only_a_message(tmp_path):
    for field in ("recipe", "slots", "model", "data", "training", "round", "transfer", "fleet", "broker", "evaluate"):
        for value in ("3", "[1]", "{a: {b: 1}}", "null", "[{name: x, budget: [1]}]", "[{profile: 3}]"):
            with pytest.raises(ConfigError):
                load_run(write(tmp_path, RUN), [f"{field}={value}", "seed=-1"])


@pytest.mark.parametrize("way", ["rounds=async", "round.late=keep"])
@pytest.mark.parametrize(
    ("recipe", "roles"),
    [
        ("mmic", {"cluster", "select", "repair", "optimise"}),
        ("apromfl", {"prototypes", "weight"}),
        ("fedmvp", {"weight"}),
        ("local", {"weight"}),
        ("lw-fedmml", set()),
        ("prog-fedmml", set()),
        ("lw-prototypes", set()),
        ("lw-zeros", set()),
        ("fedadam", set()),
    ],
)
def test_recipes_that_need_a_rounds_devices_together_are_refused_late_updates(way, recipe, roles):
    chosen = ["recipe=" + recipe, "model.head.kind=mlp", way]  # har's models have no heads, which AproMFL needs
    if not roles:
        config, _ = load_run("har", chosen)
        assert config.rounds == "async" or config.round.late == "keep"
        return
    with pytest.raises(ConfigError) as caught:
        load_run("har", chosen)
    told = {problem.message.split(":")[0]: problem for problem in caught.value.problems}
    assert told.keys() - {"select"} == roles - {"select"}
    for role in roles:
        assert told[role].path == way.partition("=")[0]
        assert f"set slots.{role} to " in told[role].message


def test_without_lockstep_the_devices_of_a_round_are_not_drawn_at_random():
    load_run("har", ["recipe=pmcmfl", "round.late=keep"])
    load_run("har", ["recipe=pmcmfl", "rounds=async", "slots.select=all"])
    with pytest.raises(ConfigError, match=r"select: random chooses the devices of a round; set slots\.select to all"):
        load_run("har", ["recipe=pmcmfl", "rounds=async"])


def test_the_buffer_is_half_of_the_devices_unless_it_is_given():
    for overrides, buffer in (([], 15), (["round.buffer=4"], 4), (["round.devices=5"], 3)):
        config, recipe = load_run("har", ["rounds=async", *overrides])
        plan = compile_run(config, recipe, run="r", shapes={"acc": (128, 3), "gyro": (128, 3)}, label_names=("a", "b"))
        assert (plan.policy.mode, plan.policy.buffer) == ("async", buffer)


def test_rules_ask_for_traits_so_that_a_task_from_outside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> list[str]:
        chosen = {role: parse_slot(role, default(role)) for role in ROLES}
        terms = {"objective": {name: {}, "gmc": {}}, "prototypes": {"class_mean": {}}}
        return [problem.message for problem in conflicts({**chosen, **terms})]

    methods("objective")
    monkeypatch.setitem(
        registry._methods["objective"], "elsewhere", Objective("elsewhere", "a test's task", labels=True)
    )
    assert found("elsewhere") == []
    assert any("gmc needs the joint representation" in text for text in found("proximal"))


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="objective: gmc is registered twice"):
        registry.register(Objective("gmc", "another"))


def test_a_kind_of_method_of_a_role_s_kind_fills_that_role(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Objective):
        """An outside package's own kind of term."""

    methods("objective")
    monkeypatch.setitem(registry._methods, "objective", dict(registry._methods["objective"]))
    registry.register(Mine("mine", "a test's term", loss=lambda forward: forward.nothing()))
    assert methods("objective")["mine"].name == "mine"


def test_a_fleet_by_its_number(tmp_path: Path) -> None:
    def fleet(text: str) -> RunConfig:
        return load_run(write(tmp_path, RUN.partition("fleet:")[0] + f"fleet: {text}\n"))[0]

    config = fleet("{devices: 12, kinds: [{profile: cpu}, {profile: jetson-nano, weight: 3, budget: {flops: 5}}]}")
    assert list(config.device_names)[::11] == ["device-00", "device-11"]
    assert Counter(one.profile for one in config.fleet) == {"cpu": 3, "jetson-nano": 9}
    assert {one.profile: one.budget for one in config.fleet}["jetson-nano"] == {"flops": 5}
    assert config.groups == {}
    for text, path, told in (
        ("{devices: 0}", "fleet.devices", "greater than or equal to 1"),
        ("{devices: 2, kind: []}", "fleet.kind", "did you mean 'kinds'? valid: devices, kinds"),
        ("{devices: 2, kinds: [{wieght: 2}]}", "fleet.kinds.0.wieght", "valid: profile, weight, budget"),
        ("{devices: 2, kinds: [{profile: jetson-mano}]}", "fleet.kinds.0.profile", "jetson-mano"),
    ):
        with pytest.raises(ConfigError) as caught:
            fleet(text)
        assert {problem.path: problem.message for problem in caught.value.problems}.keys() == {path}
        assert told in caught.value.problems[0].message

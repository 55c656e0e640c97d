"""From a run file and the data's shapes to a resolved run: model, stages, hyper-parameters, policies, warnings.

The heads' normalisation follows from the recipe. Batch norm evaluates with running means and variances. Averaged like
the weights, over the same models, they describe the averaged model well enough (FedAvg). Where the server moves the
weights elsewhere they do not (Reddi et al. 2021, arXiv 2003.00295, use group norm for that reason).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgefl.config.settings import RatesConfig, RunConfig, TrainingConfig
from edgefl.config.slots import RecipeConfig
from edgefl.config.yaml_files import valid_names
from edgefl.encoder_kinds import encoder_kind
from edgefl.errors import ConfigError, Problem
from edgefl.groups import members, unknown_groups
from edgefl.models.check import spec_problems
from edgefl.models.spec import (
    EncoderSpec,
    HeadSpec,
    ModelSpec,
    Norm,
    fused_width,
    is_encoder,
    is_lora,
    modality_of,
    shares_projection,
)
from edgefl.plan.checkpoint_fields import checkpoint_problems, told
from edgefl.plan.declared import declared_model
from edgefl.plan.job import Hyper, LowMemoryOptimizer, RateFall, RoundPolicy, RunPlan, Slots, Stage, Transfer
from edgefl.plan.label_problems import label_problems
from edgefl.plan.lora import lora_problems, with_adaptation
from edgefl.plan.periods import period_of
from edgefl.plan.preparation import encoder_spec, out_of_place, out_of_step
from edgefl.plan.privacy import spending, uncompared, uncovered, with_upload
from edgefl.plan.stages import default_holdout, exchange_of, is_closing, later_heavy, planned, unmeasured
from edgefl.plan.training_samples import LABEL_THEM, LEAST
from edgefl.registry import Recipe, choose, chosen

#: The size of batch for which scaled rates are meant.
RATES_FOR = 256
SERVER_ROLES = ("pace", "cluster", "select", "prototypes", "repair", "weight", "combine", "optimise")


def compile_run(
    config: RunConfig,
    recipe: RecipeConfig,
    *,
    run: str,
    shapes: Mapping[str, tuple[int, ...]],
    label_names: tuple[str, ...] = (),
    test: str = "",
) -> RunPlan:
    """The run as the coordinator executes it.

    ``shapes``: modality -> shape of one sample, as found in the data. Raises ConfigError for a model that does not fit
    the data or a recipe that does not fit the model.
    """
    model = model_spec(config, recipe, shapes, label_names)
    problems = _period_problems(config, recipe, model) + _pace_problems(config, recipe) + _upload_problems(recipe)
    if problems := problems + uncovered(config, recipe.slots, model):
        raise ConfigError(config.name, problems)
    schedule = choose("schedule", recipe.slots)
    stages = planned(model, schedule.bind(schedule.method.stages)(model, config.training.rounds))
    plan = RunPlan(
        run=run,
        name=config.name,
        recipe=recipe.name,
        seed=config.seed,
        model=model,
        stages=stages,
        hypers=tuple(_hyper(config.training, recipe, stage, _place(stage, stages), config.seed) for stage in stages),
        lr_fall=_fall(config.training),
        slots=Slots(
            objective=recipe.slots["objective"],
            missing=recipe.slots["missing"],
            prototypes=recipe.slots["prototypes"],
            repair=recipe.slots["repair"],
            upload=recipe.slots["upload"],
            exchange=exchange_of(recipe.slots["weight"]),
        ),
        server={role: recipe.slots[role] for role in SERVER_ROLES},
        policy=_policy(config, recipe),
        evaluate_every=config.evaluate,
        test=test,
        chunk_bytes=config.transfer.chunk_bytes or 0,
        credit=config.transfer.credit,
        transfer=Transfer(
            _rules(config.transfer.up),
            _rules(config.transfer.down),
            config.transfer.top,
            closing=config.transfer.closing,
        ),
        groups=config.groups,
        config={"run": config.model_dump(mode="json"), "recipe": recipe.model_dump(mode="json")},
    )
    plan = with_upload(_with_statistics(plan))
    if problems := lora_problems(plan):
        raise ConfigError(config.name, problems)
    return plan


def _policy(config: RunConfig, recipe: RecipeConfig) -> RoundPolicy:
    who = RoundPolicy(eligible=tuple(config.round.eligible), excluded=tuple(config.round.excluded))
    taken = RunPlan(policy=who, groups=config.groups).takes
    names = config.device_names
    present = sum(map(taken, names)) if who.eligible or who.excluded else len(names)
    devices = config.round.devices or max(1, present)
    given = config.round.model_dump(exclude={"devices", "buffer", "eligible", "excluded"}) | uncompared(recipe.slots)
    buffer = config.round.buffer or (devices + 1) // 2
    return msgspec.structs.replace(who, devices=devices, mode=config.rounds, buffer=buffer, **given)


def model_spec(
    config: RunConfig, recipe: RecipeConfig, shapes: Mapping[str, tuple[int, ...]], label_names: tuple[str, ...]
) -> ModelSpec:
    """The model with every size resolved. Raises ConfigError."""
    if config.model.own:
        return declared_model(config, recipe.slots)
    problems = checkpoint_problems(config)
    if problems:
        raise ConfigError(config.name, problems)
    encoders: dict[str, EncoderSpec] = {}
    for modality, encoder in config.model.encoders.items():
        path = f"model.encoders.{modality}"
        if shapes and modality not in shapes:
            problems.append(Problem(path, f"the data has no modality {modality!r}; it has: {', '.join(shapes)}"))
            continue
        if encoder.size not in encoder_kind(encoder.kind).sizes:
            known = valid_names(encoder.size, list(encoder_kind(encoder.kind).sizes))
            problems.append(Problem(f"{path}.size", f"kind {encoder.kind} has no size {encoder.size!r}; {known}"))
            continue
        problems += [Problem(f"{path}.{field}", text) for field, text in out_of_place(encoder)]
        encoders[modality] = encoder_spec(encoder, shapes.get(modality, ()))
        fixed = told(encoder).fields.get("input_shape", ())
        if fixed and tuple(fixed) != tuple(encoders[modality].input_shape):
            has, takes = list(encoders[modality].input_shape), list(fixed)
            problems.append(Problem(path, f"samples are {has}, and {encoder.pretrained!r} takes {takes}"))
    problems += [Problem(f"model.encoders.{field}", text) for field, text in out_of_step(encoders)]
    problems += _readable(config.training, recipe) + unmeasured(recipe.slots, config.training.holdout)
    terms = chosen("objective", recipe.slots["objective"])
    supervised = any(term.method.labels for term in terms)
    if supervised and shapes and not label_names:
        learned = ", ".join(term.name for term in terms if term.method.labels)
        problems.append(Problem("data", f"objective {learned} needs labels, and no sample has one. {LABEL_THEM}"))
    if len(config.model.encoders) < 2:
        paired = [term.name for term in terms if term.method.modalities > 1]
        problems += [Problem("model.encoders", f"objective {term} needs two modalities or more") for term in paired]
    problems += label_problems(recipe, label_names)
    if problems:
        raise ConfigError(config.name, problems)
    spec = ModelSpec(
        encoders=encoders,
        stages=config.model.stages,
        head=_head(config, recipe, encoders),
        fusion_width=config.model.fusion_width,
        classes=len(label_names) if supervised else 0,
        label_names=label_names if supervised else (),
        label_column=config.data.label,
        **_shape(recipe, encoders),
    )
    spec, unfit = with_adaptation(config.model.lora, spec)
    problems += unfit + _wide_enough(spec, recipe)
    if problems:
        raise ConfigError(config.name, problems)
    if faults := spec_problems(spec):
        raise ConfigError(config.name, [Problem(f"model.{fault.path}", fault.message) for fault in faults])
    return spec


def _readable(training: TrainingConfig, recipe: RecipeConfig) -> list[Problem]:
    """Problems of optimisers without the state read by the recipe's repair."""
    repair = chosen("repair", recipe.slots["repair"])[0]
    if repair.method.unreadable is None:
        return []
    used = {
        "training.optimizer": training.optimizer,
        "training.lean.optimizer": training.lean and training.lean.optimizer,
    }
    why = {field: repair.bind(repair.method.unreadable)(name) for field, name in used.items() if name}
    return [Problem(field, text) for field, text in why.items() if text]


def _period_problems(config: RunConfig, recipe: RecipeConfig, model: ModelSpec) -> list[Problem]:
    """Settings that contradict periods, in which devices go on from their own parts."""
    if period_of(recipe.slots["repair"]).rounds == 1:
        return []
    why = f"repair: {next(iter(recipe.slots['repair']))} exchanges single layers between whole rounds"
    found = []
    if model.head.kind != "none" and model.head.norm == "batch":
        text = f"is batch, and its statistics are not of the weights that a layer is replaced in: {why}; set layer"
        found.append(Problem("model.head.norm", text))
    for term in chosen("objective", recipe.slots["objective"]):
        if "received" in term.method.auxiliaries or term.method.keep is not None:
            text = f"{term.name} compares with the parts received, and {why}, in which a device goes on from its own"
            found.append(Problem("slots.objective", f"{text}; leave {term.name} out, or exchange everything"))
    for direction in ("up", "down"):
        rules = _rules(getattr(config.transfer, direction))
        if any(packing != "f32" for _, packing in rules):
            text = f"packs changes of what the other side holds, and {why}, so that it holds something else; set f32"
            found.append(Problem(f"transfer.{direction}", text))
    return found


def _pace_problems(config: RunConfig, recipe: RecipeConfig) -> list[Problem]:
    """Settings in contradiction to the slot pace, which may restore an earlier round's model."""
    pace, weight = choose("pace", recipe.slots), choose("weight", recipe.slots)
    if pace.method.judge is None:
        return []
    found = []
    if period_of(recipe.slots["repair"]).rounds > 1:
        why = f"repair: {next(iter(recipe.slots['repair']))} exchanges single layers in most"
        found.append(f"judges the model after every round, and {why}; set planned")
    if weight.method.exchange != "all":
        why = f"with weight: {weight.name} devices go on from parts of their own"
        found.append(f"may give the model of an earlier round back, and {why}; set planned")
    if any(packing != "f32" for _, packing in _rules(config.transfer.down)):
        why = "transfer.down packs what a stage's last planned round alone sends whole"
        found.append(f"may end a stage after any round, and {why}; set f32 there, or planned")
    return [Problem("slots.pace", f"{pace.name} {text}") for text in found]


def _upload_problems(recipe: RecipeConfig) -> list[Problem]:
    """Slots that contradict the slot upload."""
    upload, repair, weight = (choose(role, recipe.slots) for role in ("upload", "repair", "weight"))
    if upload.method.send is None:
        return []
    found = []
    if repair.method.mend is not None or repair.method.ask is not None:
        why = f"repair: {repair.name} reads what devices trained, layer by layer"
        found.append(f"changes what devices send, and {why}; set slots.repair: none, or slots.upload: whole")
    if weight.method.exchange == "nothing":
        found.append(f"chooses what devices send, and with weight: {weight.name} they send nothing; set whole")
    return [Problem("slots.upload", f"{upload.name} {text}") for text in found]


def _shape(recipe: RecipeConfig, encoders: Mapping[str, EncoderSpec]) -> dict[str, Any]:
    """``ModelSpec`` fields set by the recipe."""
    fusion, missing = choose("fusion", recipe.slots), choose("missing", recipe.slots)
    fields: dict[str, Any] = {
        "encoder_sharing": next(iter(recipe.slots["sharing"])),
        "fusion": fusion.name,
        "fusion_options": fusion.taken(fusion.method.build),
    }
    if missing.method.build is not None:
        fields["stand_in"] = {missing.name: missing.taken(missing.method.build)}
    for choice in (one for role in recipe.slots for one in chosen(role, recipe.slots[role])):
        if choice.method.shape is not None:
            fields |= choice.bind(choice.method.shape)(encoders)
    return fields


def _wide_enough(spec: ModelSpec, recipe: RecipeConfig) -> list[Problem]:
    """Problem of a fusion width unlike the projections', for terms that compare both."""
    terms = [term.name for term in chosen("objective", recipe.slots["objective"]) if term.method.joint]
    if not terms or fused_width(spec) == spec.head.out or not spec.classes:
        return []
    text = f"{terms[0]} compares it with the projections, which are {spec.head.out} wide; set it to that"
    return [Problem("model.fusion_width", text)]


def _head(config: RunConfig, recipe: RecipeConfig, encoders: Mapping[str, EncoderSpec]) -> HeadSpec:
    given = config.model.head.model_dump()
    head = HeadSpec(**{**given, "norm": given["norm"] or default_norm(recipe.slots)})
    widths = {encoder.width for encoder in encoders.values()}
    if head.kind == "none" and len(widths) == 1:
        return msgspec.structs.replace(head, out=widths.pop())
    return head  # differing widths are a problem that check_spec names


def _rules(chosen: str | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(chosen.items()) if isinstance(chosen, Mapping) else (("*", chosen),)


def _place(stage: Stage, stages: Sequence[Stage]) -> int:
    """Index from 1 into per-stage settings; a single stage and the closing round use the last."""
    alone = sum(not is_closing(one) for one in stages) == 1
    return stage.depth if alone or is_closing(stage) else stage.index


def _hyper(training: TrainingConfig, recipe: RecipeConfig, stage: Stage, place: int, seed: int) -> Hyper:
    """The stage's hyper-parameters; ``place``: of its value in a list, from 1."""
    same = {"epochs", "batch_size", "optimizer", "weight_decay", "momentum", "clip_norm", "precision", "weights"}
    smaller = training.lean
    changed = {
        # What the closing round reads of a frozen prefix, it reads once.
        "cache": "" if training.cache == "none" or is_closing(stage) else training.cache,
        "holdout": default_holdout(recipe.slots) if training.holdout is None else training.holdout,
        "lr": {group: rate * _scale(training) for group, rate in _rates(training.lr, place).items()},
        "lean": smaller and LowMemoryOptimizer(smaller.optimizer, _rates(smaller.lr, place)),
        "seed": seed,
    }
    return msgspec.convert({**training.model_dump(include=same), **changed}, Hyper)


def _scale(training: TrainingConfig) -> float:
    """The factor of all rates for the size of a batch: linear scaling, arXiv 1706.02677."""
    return training.batch_size / RATES_FOR if training.lr_scale == "batch" else 1.0


def _fall(training: TrainingConfig) -> RateFall:
    ((kind, options),) = training.lr_fall.items()
    return RateFall(kind, int(options.get("rounds", 0)), options.get("factor", 1.0), training.lr_warmup)


def _rates(rates: RatesConfig, place: int) -> dict[str, float]:
    given = rates.model_dump().items()
    return {group: (value[place - 1] if isinstance(value, list) else value) for group, value in given}


def moving_slot(server: Recipe) -> str:
    """The slot ("role: choice") that moves weights off the devices' mean; "": none."""
    for role in ("weight", "optimise", "repair", "combine"):
        one = choose(role, server)
        if one.method.moves:
            return f"{role}: {one.name}"
    return ""


def default_norm(server: Recipe) -> Norm:
    """Default normalisation of a recipe's heads: AproMFL's mappings have none; layer norm needs no statistics."""
    slot = moving_slot(server)
    if slot.startswith("weight: "):
        return "none"
    return "layer" if slot else "batch"


def moving(plan: RunPlan) -> str:
    """The slot or round policy that moves weights off the mean of this round's models; "": none."""
    if slot := moving_slot(plan.server):
        return slot
    if plan.policy.keeps:
        return "rounds: async" if plan.policy.mode == "async" else "round.late: keep"
    return ""


def _with_statistics(plan: RunPlan) -> RunPlan:
    """The plan with ``slots.statistics`` set: batch statistics to take again after aggregation."""
    head = plan.model.head
    averaged = head.kind != "none" and head.norm == "batch" and not shares_projection(plan.model)
    wanted = averaged and bool(moving(plan))
    return msgspec.structs.replace(plan, slots=msgspec.structs.replace(plan.slots, statistics=wanted))


def untaken(plan: RunPlan, samples: Mapping[str, int]) -> Problem | None:
    """Problem of a test set too small for batch statistics; ``samples``: modality -> number with it."""
    lacking = [m for m in plan.model.encoders if samples.get(m, 0) < LEAST] if plan.slots.statistics else []
    if not lacking:
        return None
    has = f"{samples.get(lacking[0], 0)} samples of {lacking[0]!r}, {LEAST} are needed"
    why = f"{moving(plan)} moves the weights away from their statistics, which are then taken on data.test"
    text = f"is batch, and {why}; it has {has}: add them, or set layer"
    return Problem("model.head.norm", text)


def ungrouped(plan: RunPlan) -> list[Problem]:
    """Problems of unknown and of empty groups."""
    problems = []
    for field in ("eligible", "excluded"):
        for group in unknown_groups(getattr(plan.policy, field), plan.groups):
            has = f"there are: {', '.join(sorted(plan.groups))}" if plan.groups else "there is none"
            way = "name the fleet's directory (--identity), or give devices of `fleet` in this file `groups`"
            problems.append(Problem(f"round.{field}", f"no group {group!r}; {has}: {way}"))
    if not problems and plan.policy.eligible and not any(map(plan.takes, members(plan.policy.eligible, plan.groups))):
        problems.append(Problem("round.eligible", "no device is left: those groups are empty, or all are excluded"))
    return problems


def warnings_of(plan: RunPlan) -> tuple[str, ...]:
    """Warnings of valid but probably unintended settings, a sentence each, with the way out."""
    found = []
    if names := random_and_frozen(plan.model, plan.stages):
        fields = ", ".join(f"model.encoders.{m}.pretrained" for m in names)
        who, way = f"recipe {plan.recipe}", "set slots.schedule to one that trains them, such as end_to_end"
        if plan.model.lora is not msgspec.UNSET:
            who, way = "model.lora", "leave them out of model.lora.where"
        why = f"{who} never trains encoders, and these start from random weights: {', '.join(names)}"
        way = f"name a checkpoint in {fields}, or {way}"
        found.append(f"{why}; {way}")
    cost = spending(plan)
    if cost is not None and cost.rounds < cost.planned:
        why = f"the budget of epsilon is spent after {cost.rounds} of {cost.planned} rounds"
        found.append(f"{why}; plan no more, or set more noise in slots.combine")
    rounds = [stage.rounds for stage in plan.stages if not is_closing(stage)]
    if all(encoder.pretrained for encoder in plan.model.encoders.values()) and (later := later_heavy(plan.stages)):
        why = f"encoders are pretrained, and training.rounds {rounds} gives the last stage no more than the first"
        found.append(f"{why}; with more it was better in LW-FedMML (arXiv 2407.15426, Table II): try {later}")
    return tuple(found)


def random_and_frozen(model: ModelSpec, stages: Sequence[Stage]) -> list[str]:
    """Modalities with an encoder neither pretrained nor ever trained."""
    every = {part for stage in stages if stage.rounds for part in stage.trained}
    trained = {modality_of(part) for part in every if is_encoder(part) and not is_lora(part)}
    if None in trained:  # the attention that all encoders share
        return []
    return [m for m, encoder in model.encoders.items() if not encoder.pretrained and m not in trained]

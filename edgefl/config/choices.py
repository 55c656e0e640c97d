"""The slots of a recipe: which choices each role has, and the options of each choice. A closed dictionary."""

from __future__ import annotations

import math
from typing import NamedTuple


class Option(NamedTuple):
    """One option of a choice: text is one of ``choices`` (none: any text), a number lies in ``least`` … ``most``."""

    default: float | str
    doc: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf


Options = dict[str, Option]
#: {choice: (what it does, its options)}
Choices = dict[str, tuple[str, Options]]


def _weight(default: float = 1.0) -> Option:
    return Option(default, "factor of the term", least=0)


def _temperature(default: float, doc: str = "softmax temperature") -> Option:
    return Option(default, doc, least=0.001)


def _share(default: float = 0.5) -> Option:
    return Option(default, "share of the eligible devices, rounded up", least=0.01, most=1)


def _count(default: float, doc: str) -> Option:
    return Option(default, doc, least=1)


#: A mean of one sample is that sample.
_MIN_COUNT = Option(2, "fewest samples of a class on a device whose mean it sends; fewer would give them away", least=1)
DROP = Option(0.0, "probability that a complete sample trains with one of its modalities hidden", least=0, most=1)
_LR = Option(0.05, "the server's learning rate", least=0)
_BETA = Option(0.9, "share of the momentum kept from round to round", least=0, most=0.999)
_EPSILON = Option(1e-3, "added to the root of the second moment", least=1e-12)
_BETA2 = Option(0.99, "share of the second moment kept", least=0, most=1)
_ADAPTIVE = {"lr": _LR, "beta": _BETA, "epsilon": _EPSILON}
_MODELS = Option("shared", "whether each cluster has a model of its own", ("shared", "own"))

SCHEDULE: Choices = {
    "end_to_end": ("every stage exists and is trained from the first round", {}),
    "progressive": ("stage s adds encoder stage s; everything present is trained", {}),
    "layerwise": (
        "stage s adds encoder stage s; only it, the heads and the final norms are trained",
        {
            "embed": Option(
                "auto",
                "whether the embeddings are trained in the first stage; auto: yes unless they are pretrained",
                ("auto", "first_stage", "frozen"),
            )
        },
    ),
    "heads": ("whole, frozen encoders; only heads, fusion and task are trained", {}),
    "mixed": (
        "each device the most its budget allows: end to end, or in stage s as in progressive, down to layerwise",
        {},
    ),
}

SHARING: Choices = {
    "separate": ("each modality has an encoder of its own", {}),
    "multiway": ("attention is shared by the modalities, feed-forwards are not (arXiv 2312.13508)", {}),
}

FUSION: Choices = {
    "concat": (
        "concatenation and a two-layer network",
        {
            "bound": Option(
                "none",
                "tanh: it ends in tanh(layer norm / 2), so that no entry is beyond 1 (PmcmFL's published code)",
                ("none", "tanh"),
            )
        },
    ),
    "mean": ("the mean of the projections at hand, no parameters", {}),
    "joint": (
        "cross-attention between the modalities' tokens, then self-attention; one projection for all (FedMVP, eqs 2-3)",
        {
            "width": Option(0, "token width; 0: that of the widest encoder, at most 256, the paper's", least=0),
            "heads": _count(4, "attention heads"),
            "layers": _count(3, "self-attention layers"),
        },
    ),
}

CLUSTER: Choices = {
    "none": ("all devices form one group", {}),
    "lsh": (
        "by sketches of their features: random sign hashes, then K-means (MMiC)",
        {"clusters": _count(8, "number of groups"), "models": _MODELS},
    ),
    "pacfl": (
        "by the smallest principal angle between bases of their classes, average linkage (PACFL)",
        {
            "threshold": Option(30.0, "largest angle within a group, in degrees", least=0, most=90),
            "models": _MODELS,
        },
    ),
}

_BANZHAF = {
    "share": _share(),
    "warmup_rounds": Option(100, "rounds in which the draw is even", least=0),
    "temperature": Option(2.0, "how strongly the index decides: probability ∝ exp(temperature · index)", least=0),
}
SELECT: Choices = {
    "all": ("every eligible device", {}),
    "random": ("a random share of them", {"share": _share()}),
    "banzhaf": (
        "drawn by how often a device decided whether its round's return beat the global model's (MMiC)",
        _BANZHAF,
    ),
    "banzhaf_sampled": (
        "the same by the sampled Banzhaf value of the last round's returns",
        {**_BANZHAF, "samples": _count(128, "random coalitions")},
    ),
}

MISSING: Choices = {
    "ignore": ("samples that lack a modality are left out", {}),
    "zero": ("zeros", {"drop": DROP}),
    "random": ("standard normal noise", {"drop": DROP}),
    "prototype": (
        "a global prototype (arXiv 2312.13508); zeros until there is one",
        {
            "by": Option(
                "label",
                "whose: that of the sample's own class (the paper), or of the classes that the modality at "
                "hand matches, as at inference",
                ("label", "match"),
            ),
            "drop": DROP,
        },
    ),
    "completion": (
        (
            "generated from the modality at hand, once, before training (FedMVP); nothing is generated for the test "
            "set: with one modality, the joint fusion sees that one and the token of an absent one"
        ),
        {
            "generator": Option(
                "nearest",
                "nearest: the complete local sample that is most alike lends its other half; transformers: image to "
                "text; diffusers: text to image",
                ("nearest", "transformers", "diffusers"),
            ),
            "checkpoint": Option("", "the generator's name or folder"),
        },
    ),
    "reconstruction": ("predicted from the modalities at hand by a small network trained along (MMiC)", {"drop": DROP}),
}

PROTOTYPES: Choices = {
    "none": ("none", {}),
    "class_mean": (
        "class means of each modality and of the fused representation (arXiv 2312.13508, eqs 1-3)",
        {
            "weighting": Option(
                "modality",
                "weights of the merge: each device's samples of the modality, or of the class",
                ("modality", "class"),
            ),
            "from": Option(
                "all",
                "samples of a modality's prototypes: all that have it, or pairs: those that have every modality",
                ("all", "pairs"),
            ),
            "match": Option(
                "cosine",
                "how a sample finds its classes at inference: nearest prototype, a small classifier, or a small "
                "network into the other modality's space; the small ones are trained in a closing round by all devices",
                ("cosine", "l1", "l2", "classifier", "prior"),
            ),
            "combine": Option(
                "average",
                "how the devices' small networks become one: their mean, the largest device's, or all of them",
                ("average", "largest", "ensemble"),
            ),
            "min_count": _MIN_COUNT,
            "k": _count(3, "classes mixed at inference"),
            "temperature": Option(
                0.0,
                "of the softmax that weighs them; 0: the match's own, which is 0.01 for cosine and 1 for the others: "
                "the plain softmax of -distances and of a prior's cosines, and a classifier's probabilities themselves",
                least=0,
            ),
        },
    ),
    "adaptive": (
        "class means where there are labels, else K-means; completed and clustered on the server (AproMFL)",
        {
            "min_count": _MIN_COUNT,
            "local_clusters": _count(20, "prototypes of a device without labels"),
            "clusters": _count(10, "global prototypes"),
            "neighbours": _count(10, "multimodal prototypes that complete a unimodal one"),
        },
    ),
}

OBJECTIVE: Choices = {
    "cross_entropy": ("classification of the fused representation", {"weight": _weight()}),
    "clip": (
        "contrast of the modalities' projections, labels unused (arXiv 2407.15426)",
        {"weight": _weight(), "temperature": _temperature(0.05)},
    ),
    "margin": (
        "pairs above one cosine, other pairs below another, labels unused",
        {
            "weight": _weight(),
            "positive": Option(0.8, "cosine that pairs should reach", least=-1, most=1),
            "negative": Option(0.2, "cosine that other pairs should stay below", least=-1, most=1),
        },
    ),
    "modality_contrast": (
        "each modality's projection against that modality's global class prototypes, from the second round on",
        {"weight": _weight(), "temperature": _temperature(0.1)},
    ),
    "prototype_contrast": (
        "the fused representation against the fused prototypes, from the second round on (arXiv 2312.13508, eq. 7)",
        {
            "weight": _weight(),
            "temperature": _temperature(0.07),
            "negatives": Option("samples", "the batch's other samples, or the other classes", ("samples", "classes")),
        },
    ),
    "cluster_contrast": (
        "devices without labels cluster by a private copy of the mapping, taught by those clusters (AproMFL, eqs 3-5)",
        {"weight": _weight(), "temperature": _temperature(0.07)},
    ),
    "prototype_transfer": (
        "a sample, of one modality too, sees both halves of the global prototype pairs alike (AproMFL, eqs 7-8)",
        {"weight": _weight(), "temperature": _temperature(0.07)},
    ),
    "model_transfer": (
        "the mapping received teaches the device's own: Kullback-Leibler divergence of unit vectors (AproMFL, eq. 9)",
        {"weight": _weight(), "temperature": _temperature(1.0)},
    ),
    "regulariser": (
        "the mapping of a device without labels stays near its private copy (AproMFL, eq. 6)",
        {"weight": _weight(0.01)},
    ),
    "mcm": (
        "the joint representation matches each modality's (FedMVP, eqs 4-5)",
        {
            "weight": _weight(),
            "temperature": _temperature(0.07),
            "form": Option("literal", "as printed, or with the positive in the denominator", ("literal", "ntxent")),
        },
    ),
    "ram": (
        "the joint representation follows a modality that classifies better (FedMVP, eqs 6-7)",
        {"weight": _weight()},
    ),
    "gmc": (
        "each modality's projection against the joint one (GMC, arXiv 2202.03390)",
        {"weight": _weight(), "temperature": _temperature(0.1)},
    ),
    "proximal": ("the model stays near the one received (FedProx, arXiv 1812.06127)", {"weight": _weight(0.01)}),
    "reconstruction": ("each modality's projection is predicted from the others'", {"weight": _weight()}),
}

REPAIR: Choices = {
    "none": ("nothing", {}),
    "poverty": (
        "the layer that missing modalities change most comes from devices of the group with complete data (MMiC)",
        {
            "form": Option(
                "optimiser",
                "how the change is had: from copies, or from the optimiser's own step",
                ("exact", "optimiser"),
            ),
            "donors": Option(
                "less_affected",
                "who lends it: devices that trained with complete data in the round (eq. 11); less_affected: in rounds "
                "without any, those whose layers missing modalities changed less",
                ("complete", "less_affected"),
            ),
        },
    ),
}

WEIGHT: Choices = {
    "samples": ("number of samples, per part", {}),
    "fediot": (
        "the same, devices with several modalities counting more (FedIoT)",
        {"factor": Option(100.0, "how many times as much", least=0)},
    ),
    "cka": ("how much a model's view of probe samples agrees with the others' (FedMVP)", {}),
    "relationship": (
        "each device gets its own mean of the mappings, by their cosine; its classifier stays at home (AproMFL)",
        {},
    ),
    "own": ("nothing is exchanged: each device trains alone", {}),
}

COMBINE: Choices = {
    "mean": (
        "streaming weighted mean per part",
        {
            "absent": Option(
                "keep",
                "devices of the round whose stage or budget left out an encoder stage of a modality that they have: "
                "they count as keeping it as it was, or are left out",
                ("keep", "leave_out"),
            )
        },
    ),
}

OPTIMISE: Choices = {
    "plain": ("it replaces it", {}),
    "momentum": ("server momentum (FedAvgM, arXiv 1909.06335)", {"lr": Option(1.0, _LR.doc, least=0), "beta": _BETA}),
    "fedadagrad": ("adaptive (arXiv 2003.00295)", _ADAPTIVE),
    "fedadam": ("adaptive (arXiv 2003.00295)", {**_ADAPTIVE, "beta2": _BETA2}),
    "fedyogi": ("adaptive (arXiv 2003.00295)", {**_ADAPTIVE, "beta2": _BETA2}),
    "fedadagrad_mpo": (
        "Adagrad whose momentum follows the risk of the groups' returns (MMiC, eqs 19-22)",
        {
            **_ADAPTIVE,
            "risk": Option(0.5, "weight of risk against return", least=0, most=1),
            "temperature": Option(
                10.0, "what the correction is divided by; beta + 1/temperature is at most 1", least=1
            ),
        },
    ),
}

#: role -> (what it decides, its choices)
SLOTS: dict[str, tuple[str, Choices]] = {
    "schedule": ("which parts exist and are trained in each stage", SCHEDULE),
    "sharing": ("what the modalities' encoders share", SHARING),
    "fusion": ("how the modalities become one representation", FUSION),
    "cluster": ("how devices are grouped", CLUSTER),
    "select": ("who is asked in a round, among the eligible", SELECT),
    "missing": ("what stands in for an absent modality during training", MISSING),
    "prototypes": ("prototypes, computed on the devices and merged", PROTOTYPES),
    "objective": ("terms of the local loss, summed", OBJECTIVE),
    "repair": ("what is replaced in uploads before they are combined", REPAIR),
    "weight": ("weights of the devices", WEIGHT),
    "combine": ("how uploads become one", COMBINE),
    "optimise": ("how the mean changes the global model", OPTIMISE),
}

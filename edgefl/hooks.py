"""Calls of a method's functions by the core, as types: what a function is given, and what it returns.

Each is given these values by position, and by keyword those of the method's options that it has parameters for
(``edgefl.registry.Choice.bind``). ``edgefl.roles`` describes them where its kinds declare them, and
``edgefl.method_calls`` checks a function when its method registers. For type checks alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Concatenate, TypeVar

    import numpy as np
    from torch import Tensor, nn

    from edgefl.aggregation.history import Memory, UpdateInfo
    from edgefl.aggregation.mean import Layout, Load, Outcome, Tensors, WeightedMean
    from edgefl.aggregation.noise import Noise
    from edgefl.aggregation.pace import StageRound
    from edgefl.aggregation.pieces import Changes
    from edgefl.data.arrays import Array
    from edgefl.data.dataset import Dataset
    from edgefl.models.spec import EncoderSpec, ModelSpec
    from edgefl.models.staged import StagedModel
    from edgefl.plan.job import Candidate, Job, Stage
    from edgefl.prototypes.table import ClassMeans
    from edgefl.records import Manifest
    from edgefl.registry import Account, Member, Observer, Period, Recipe, Screening, Trained, Verdict
    from edgefl.storage.objects import ObjectStore
    from edgefl.training.fill import AtHand
    from edgefl.training.forward import Auxiliary, Forward

    R = TypeVar("R")
    #: A function of the options alone.
    OfOptions = Callable[..., R]

    ScheduleStages = Callable[Concatenate[ModelSpec, Sequence[int], ...], tuple[Stage, ...]]
    PaceJudge = Callable[Concatenate[Sequence[StageRound], ...], Verdict]
    PaceObserve = Callable[Concatenate[Tensors | None, Tensors, Tensors, ...], tuple[dict[str, float], Tensors]]
    PaceFewest = OfOptions[int]
    FusionBuild = Callable[Concatenate[ModelSpec, ...], nn.Module]
    ClusterGroup = Callable[Concatenate[Mapping[str, Mapping[str, Array]], np.random.Generator, ...], dict[str, int]]
    ClusterOwnModels = OfOptions[bool]
    SelectDraw = Callable[Concatenate[Sequence[str], np.random.Generator, Memory, ...], list[str]]
    StandInBuild = Callable[Concatenate[ModelSpec, ...], nn.Module]
    StandInMake = Callable[[str, AtHand], object]
    StandInOffered = Callable[[ModelSpec, Mapping[str, object]], bool]
    StandInCompletedData = Callable[Concatenate[Dataset, Mapping[str, EncoderSpec], ...], object]
    StandInCompletedCounts = Callable[Concatenate[Mapping[str, int], Mapping[str, EncoderSpec], ...], dict[str, int]]
    PrototypesLocal = Callable[
        Concatenate[Job, StagedModel, Auxiliary, Dataset, np.random.Generator, ...], Mapping[str, ClassMeans]
    ]
    PrototypesMerge = Callable[Concatenate[Mapping[str, Load], Load | None, np.random.Generator, ...], Outcome]
    PrototypesStart = Callable[Concatenate[ModelSpec, np.random.Generator, ...], Mapping[str, ClassMeans]]
    PrototypesRows = Callable[Concatenate[ModelSpec, ...], dict[str, tuple[int, int]]]
    PrototypesLocalRows = Callable[Concatenate[Job, Candidate, Sequence[str], ...], dict[str, tuple[int, int]]]
    PrototypesCandidates = OfOptions[tuple[int, ...]]
    ObjectiveKeep = Callable[Concatenate[np.ndarray, np.ndarray, np.ndarray, ...], np.ndarray]
    ObjectiveLoss = Callable[Concatenate[Forward, ...], Tensor]
    RepairMend = Callable[
        Concatenate[Sequence[UpdateInfo], Manifest, ObjectStore, Mapping[str, int], Mapping[str, float], ...],
        tuple[dict[tuple[str, str], Tensors], Mapping[str, object]],
    ]
    RepairUnlikely = Callable[Concatenate[Mapping[str, Mapping[str, int]], Sequence[str], ...], str]
    RepairObserve = Callable[Concatenate[Job, StagedModel, ...], Observer]
    RepairUnreadable = Callable[Concatenate[str, ...], str]
    RepairPeriod = OfOptions[Period]
    RepairAsk = Callable[Concatenate[Mapping[str, Member], ...], dict[str, tuple[str, ...]]]
    RepairLend = Callable[
        Concatenate[Sequence[UpdateInfo], Mapping[str, str], ObjectStore, Mapping[str, int], ...],
        tuple[dict[str, Tensors], Mapping[str, object]],
    ]
    UploadSend = Callable[Concatenate[Trained, np.random.Generator, ...], tuple[Mapping[str, Tensors], Tensors]]
    UploadMost = Callable[Concatenate[Mapping[str, int], ...], int]
    WeightWeigh = Callable[Concatenate[Mapping[str, int], Mapping[str, int], ...], dict[str, float]]
    WeightSimilarity = Callable[Concatenate[Mapping[str, np.ndarray], ...], dict[str, float]]
    WeightPersonal = Callable[Concatenate[Mapping[str, Load], ...], dict[str, dict[str, float]]]
    CombineScreen = Callable[
        Concatenate[Mapping[str, Changes], ...], Screening | tuple[dict[str, float], dict[str, object]]
    ]
    CombineAccumulate = Callable[Concatenate[Layout, ...], WeightedMean]
    CombineMerge = Callable[Concatenate[Mapping[str, Load], Layout, ...], tuple[Tensors, dict[str, float]]]
    CombineKeeps = OfOptions[bool]
    CombineResolve = Callable[Concatenate[int, int, ...], Recipe]
    CombineNoise = OfOptions[Noise]
    CombineAccount = Callable[Concatenate[float, int, ...], Account]
    OptimiseStep = Callable[Concatenate[Tensors | None, Tensors, Tensors, ...], tuple[Tensors, Tensors | None]]
    OptimiseAdjust = Callable[
        Concatenate[Memory, Mapping[str, int], Mapping[str, float], ...], tuple[dict[str, float], dict[str, object]]
    ]

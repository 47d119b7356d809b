"""The dataclasses that calls return.

Each is made from what the command of the same name writes with --json (summary.json, metrics.jsonl,
export.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from foreload.trainer.compute.reports import StepLine, StepsSummary

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class _Result:
    """A dataclass that is made from JSON values."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make the dataclass from JSON values by its fields' names. Other values are left out."""
        given = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class PrepareSummary(_Result):
    """The summary of `prepare`.

    Attributes:
        slots: the slots of each lane.
        minimum_slots: the slots that each lane needs for its largest step.
        fewest_arrivals: the fewest arrivals that these slots allow. If None, a window was given,
            and there is not enough memory to count them.
        bytes: the size of the files.
        malformed: {"column", "value", "rule", "records"} for each cause of malformed records.
        tables: {"name", "rows"} for each table; rows are those that are ever trained.
        data: for each set of samples, its labels, weights, missing and unknown values.
        evaluation_sets: the number of samples of each named evaluation set.
    """

    schedule: str
    checksum: str
    training_samples: int
    evaluation_samples: int
    rejected: int
    epochs: int
    training_steps: int
    lanes: int
    slots: tuple[int, ...]
    minimum_slots: tuple[int, ...]
    rows_used: int
    arrivals: int
    initial: int
    fetched: int
    cache_hit_rate: float
    lookahead: Mapping[str, Any]
    fewest_arrivals: int | None
    bytes: int
    seconds: float
    malformed: tuple[Mapping[str, Any], ...] = ()
    tables: tuple[Mapping[str, Any], ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    evaluation_sets: Mapping[str, int] = field(default_factory=dict)


# The class has no slots, so that it can be one of two bases.
@dataclass(frozen=True, kw_only=True)
class _Metrics(_Result):
    """Metrics of an evaluation set.

    A metric is None if it does not exist for the label, or is not defined for these samples.

    Attributes:
        loss: the loss that is trained, if that is not the log loss.
        labels: if there are several labels, the metrics of each by name. The fields beside it are
            those of the first label.
    """

    log_loss: float | None
    auc: float | None
    normalized_entropy: float | None
    predicted_over_observed: float | None = None
    grouped_auc: float | None = None
    rmse: float | None = None
    mae: float | None = None
    loss: float | None = None
    labels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainSummary(StepsSummary, _Metrics):
    """The run's summary.json, over all calls (docs/run-files.md).

    Times are milliseconds a step, or seconds in total. A value is None if there is nothing to
    report. The metrics are those of the first evaluation set.

    Attributes:
        sets: the metrics of each named evaluation set.
    """

    trainers: int
    store_traffic: Mapping[str, float] = field(default_factory=dict)
    store_shards: tuple[Mapping[str, Any], ...] = ()
    mixed_numerics: tuple[Mapping[str, Any], ...] = ()
    mixed_code: tuple[Mapping[str, Any], ...] = ()
    rates: tuple[Mapping[str, Any], ...] = ()
    inexact: Mapping[str, Any] | None = None
    stopped_early: Mapping[str, Any] | None = None
    rebalanced: tuple[Mapping[str, Any], ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    steps_incomplete: int = 0
    digest: str | None = None
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepMetrics(StepLine, _Result):
    """A training step, a line of metrics.jsonl.

    Attributes:
        loss: the mean loss over the step's samples.
        ms: the milliseconds of the trainer that took longest.
        without: the trainers that were lost before they reported the step. Their times and bytes
            are missing.
    """


@dataclass(frozen=True, slots=True)
class EvaluationMetrics(_Metrics):
    """An evaluation set in an evaluation pass, a line of metrics.jsonl.

    The metrics are those of the first label; if there are several labels, `labels` has those of
    each.

    Attributes:
        step: the training step that the pass follows.
        set: the name of the evaluation set.
        calibration: up to 20 bins of samples by their prediction: [samples, mean prediction, share
            of clicks].
    """

    step: int
    epoch: int
    samples: int
    calibration: tuple[Sequence[float], ...] = ()
    kind: str = "evaluation"
    set: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation(_Metrics):
    """The metrics of a model on the evaluation steps of a schedule, as in EvaluationMetrics.

    The metrics are those of the first evaluation set.

    Attributes:
        step: the training step of the model.
        sets: the metrics of each named evaluation set.
        unknown: by feature, the number of "values", and how many of them are "unknown" to the
            model.
    """

    schedule: str
    step: int
    samples: int
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unknown: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Export(_Result):
    """An export that was written: the contents of its export.json.

    Attributes:
        model: the model's name and options.
        dense: the file of the dense part.
        dense_optimizer_state: the file of the dense optimizer's state.
        tables: the tables, each in a file of its own.
        state: identifies the model and its state after the step.
        inexact: {"since", "bits", "restores"} if weights were rounded.
        since: for an increment, the {"step", "state"} that it follows.
    """

    step: int
    seed: int
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    dense: str
    dense_optimizer_state: str
    tables: tuple[Mapping[str, Any], ...]
    state: str
    inexact: Mapping[str, Any] | None = None
    since: Mapping[str, Any] | None = None
    encoding: str | None = None


@dataclass(frozen=True, slots=True)
class TorchExport(_Result):
    """A model that was written to be served: the contents of its features.json.

    Attributes:
        labels: the "name" and the "kind" of each label.
        tables: for each table, the trained "rows", where they are ("at"), and the "file".
        state: as in Export, like `inexact`.
        program: the file of the dense part as torch.export traced it. If None, it was not written;
            likewise for `onnx` and `weights`.
        onnx: the file of the dense part as ONNX.
        weights: the file of the dense part's parameters.
    """

    step: int
    seed: int
    model: Mapping[str, Any]
    labels: tuple[Mapping[str, Any], ...]
    tables: tuple[Mapping[str, Any], ...]
    state: str
    program: str | None = None
    onnx: str | None = None
    weights: str | None = None
    inexact: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Applied(_Result):
    """The model that is served after an export was applied.

    Attributes:
        step: the training step of the model.
        rows: the rows of the model in all tables.
        kept: the older versions that can still be read. For a folder, their folders; for Redis,
            their steps.
    """

    export: str
    to: str
    step: int
    rows: int
    kept: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Deletion(_Result):
    """A run that was deleted.

    Attributes:
        shards: {"url", "deleted", "why"} for each server. "why" says why the server could not be
            reached.
        local_stores: how many local store shards were deleted. If None, the run had none.
        kept: files that stay in the run's folder because they are not the run's.
        forced: what `force` overruled, in words; None if nothing.
    """

    run: str
    namespace: str
    shards: tuple[Mapping[str, Any], ...]
    local_stores: int | None
    kept: tuple[str, ...]
    forced: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a table, in the order in which the caller asked for them.

    Attributes:
        ids: int64 [n].
        vectors: float32 [n, columns].
        trained: bool [n]. If False, the row was never trained, and its vector is its initial value.
        step: the training step of the rows.
    """

    table: str
    ids: np.ndarray
    vectors: np.ndarray
    trained: np.ndarray
    step: int

"""What calls give: dataclasses, made of what the command of the same name writes with --json (summary.json, metrics.jsonl, export.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from foreload.trainer.compute.reports import StepLine, StepsSummary

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class _Result:
    """A dataclass that is made of JSON values."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From JSON values by the fields' names; what has no field is left out."""
        given = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class PrepareSummary(_Result):
    """`prepare`'s summary. slots, minimum_slots: per lane; bytes: of the files; data: of each set, its labels, weights, missing and unknown values.

    fewest_arrivals: that these slots can have; None where a window was given, and there is no memory to count them.
    tables: {"name", "rows"} of each, rows that are ever trained; malformed: {"column", "value", "rule", "records"} of each cause.
    evaluation_sets: the samples of each that has a name.
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


@dataclass(frozen=True, kw_only=True)  # without slots, so that it can be one of two bases
class _Metrics(_Result):
    """Metrics of an evaluation set. None: there is no such metric, or it is not defined for these samples; loss: of what is trained, where that is
    not the log loss; labels: of several, the metrics of each by name, of which the first one's are these.
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
    """The run's summary.json (docs/operations.md): over all calls, times in milliseconds a step or seconds in all. None: there is nothing to report.

    Metrics are those of the first evaluation set; sets: of each that has a name.
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
    """One training step, a line of metrics.jsonl. loss: mean over its samples; ms: milliseconds of the trainer that took longest; without: trainers
    that were lost before they reported the step, whose times and bytes are missing.
    """


@dataclass(frozen=True, slots=True)
class EvaluationMetrics(_Metrics):
    """One evaluation set of a pass, a line of metrics.jsonl; step: the training step that it follows; set: its name. Of the first label, and of
    several in `labels` by name.

    calibration: of up to 20 bins of samples, by what is predicted of them: [samples, mean prediction, share of clicks].
    """

    step: int
    epoch: int
    samples: int
    calibration: tuple[Sequence[float], ...] = ()
    kind: str = "evaluation"
    set: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation(_Metrics):
    """A model measured on the evaluation steps of a schedule, as EvaluationMetrics has it; step: the training step that the model is of.

    Metrics are those of the first evaluation set; sets: of each that has a name; unknown: by feature, "values", and how many are "unknown" to the
    model.
    """

    schedule: str
    step: int
    samples: int
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unknown: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Export(_Result):
    """What was written: export.json of the folder. model: its name and options; dense, dense_optimizer_state: files; tables: one file each.

    inexact: {"since", "bits", "restores"} where weights were rounded; state: which state of which model it is; since: of an increment, {"step",
    "state"} that it goes on from.
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
    """What was written to be served: features.json of the folder. labels: "name" and "kind" of each; program, onnx, weights: files of the dense part,
    None where it is not there; tables: of each, "rows" trained, "at": where they are, and "file". inexact, state: as Export has them.
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
    """What is served now: the model after a step, with so many rows in all tables; kept: the older versions that can be read, as folders or steps."""

    export: str
    to: str
    step: int
    rows: int
    kept: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Deletion(_Result):
    """What was deleted. shards: {"url", "deleted", "why"} each, why: where one could not be reached; kept: files in the folder that are not its.

    forced: what `force` overruled, in words; None where nothing.
    """

    run: str
    namespace: str
    shards: tuple[Mapping[str, Any], ...]
    local_stores: int | None
    kept: tuple[str, ...]
    forced: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a table, in the order in which they were asked for.

    ids: int64 [n]; vectors: float32 [n, columns]; trained: bool [n], false where the vector is the row's initial value, for it was never trained;
    step: the training step that they are of.
    """

    table: str
    ids: np.ndarray
    vectors: np.ndarray
    trained: np.ndarray
    step: int

"""`foreload predict`: score raw records with a model.

The records are encoded as the schedule specifies on which the model was trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from foreload.base.errors import SettingError
from foreload.base.files import replacing
from foreload.base.progress import Display, ProgressLine
from foreload.base.settings import local, texts
from foreload.pipelines.errors import RecordError, SourceError
from foreload.pipelines.samples.features import FeatureSpec, Label, TextFormat
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources import Source, plan_splits, read_records
from foreload.pipelines.sources.files import match_files
from foreload.pipelines.sources.heads import delimiter_of, first_row
from foreload.pipelines.sources.splits import Format
from foreload.trainer.checkpoints.saved_checkpoint import open_model
from foreload.trainer.commands.evaluate import last_pass
from foreload.trainer.compute import numerics
from foreload.trainer.errors import RunError
from foreload.trainer.saved.model_encoder import encoder_of
from foreload.trainer.saved.saved_model import RowSource, SavedModel, check_fitting
from foreload.trainer.saved.trained_model import DenseForward
from foreload.trainer.saved.unknown_values import UnknownValues
from foreload.trainer.serving.standalone import probabilities

FORMATS = ("criteo", "csv", "tsv", "parquet")
_READ_SAMPLES = 1 << 14  # samples whose rows are read from the store together
# If stderr is no terminal, a line of progress is written this often.
_LINE_SECONDS = 10.0
_SHOWN = 3  # malformed records that a message names


@dataclass(frozen=True, slots=True)
class Records:
    """The records to score.

    With `steps_of`, the records are cut into the evaluation steps and slices of a schedule, so that
    the outputs equal those of `evaluate` bit for bit. Otherwise they are cut in their order into
    batches of the run's size.

    Attributes:
        sources: files or globs.
        format: one of FORMATS. If None, the schedule's format, or the one that the files' names
            indicate.
        steps_of: the folder of a schedule whose evaluation samples the records are, in order.
    """

    sources: tuple[str, ...]
    format: str | None = None
    steps_of: str | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises SettingError, for a URL among others."""
        texts("FILE", self.sources)
        local("--steps-of", self.steps_of or "")


@dataclass(frozen=True, slots=True)
class Predictions:
    """The scores of records.

    Attributes:
        columns: the names of the score columns in a file.
        batches: float32 [n], or [n, labels] if there are several labels.
        unknown: counts the values that the model has never seen, in the batches taken so far.
    """

    columns: tuple[str, ...]
    batches: Iterator[np.ndarray]
    unknown: UnknownValues


@contextmanager
def run(
    path: str,
    store: str | None,
    records: Records,
    schedule: str | None = None,
    logits: bool = False,
    accept_model: bool = False,
) -> Iterator[Predictions]:
    """Score the well-formed records, in their order.

    For a click label, the score is a probability, or a logit with `logits`. For a number label, it
    is the number. Memory is bounded by a batch. Malformed records are left out, at most as many as
    the schedule's --max-rejects allows; their number and the progress are written to stderr.

    Args:
        path: the folder of a run, or of a checkpoint.
        store: the URLs of the run's servers. If None, the run's own.
        schedule: the folder where a checkpoint's schedule is now.
        accept_model: whether the model's code may differ from the code that it was trained with.

    Raises:
        RecordError: too many records are malformed, or an output is not finite.
        SourceError: a file cannot be read.
        RunError: the records are not the evaluation samples of `steps_of`.
    """
    with open_model(path, store, schedule, accept_model) as model:
        numerics.set_up(model.job.threads, cpu_capability=model.job.cpu_capability)
        labels = model.features.labels
        names = tuple(label.name for label in labels) if len(labels) > 1 else ("logit" if logits else "score",)
        unknown = UnknownValues(model.features)
        outputs = _outputs(model, records, unknown)
        yield Predictions(names, outputs if logits else (_scores(batch, labels) for batch in outputs), unknown)


def _outputs(model: SavedModel, records: Records, unknown: UnknownValues) -> Iterator[np.ndarray]:
    samples = _samples(model, records)
    header = model.schedule.header
    if records.steps_of is None:
        cuts = _in_order(header.batch_size, header.lanes)
    else:
        cuts = _evaluated(check_fitting(model, Schedule(records.steps_of)))
    count = 0
    with closing(Display(lambda: ProgressLine(f"predict: {count:,} records"), _LINE_SECONDS)) as display:
        for outputs in _predicted(model, _cut(samples, cuts, records), unknown):
            _check_finite(outputs, model.features.labels, count)
            count += len(outputs)
            display.tick()
            yield outputs
    unknown.warn("predict")


def _check_finite(outputs: np.ndarray, labels: Sequence[Label], before: int) -> None:
    """Check that all outputs are finite.

    Args:
        before: the number of well-formed records before these.

    Raises:
        RecordError: an output is NaN or infinite.
    """
    by_label = outputs.reshape(len(outputs), -1)
    wrong = np.argwhere(~np.isfinite(by_label))
    if len(wrong):
        row, label = wrong[0].tolist()
        raise RecordError(
            f"predict: record {before + row + 1:,}: {labels[label].name}: the model must give a finite number; got "
            f"{by_label[row, label]}; look for numbers in it that are far outside the range of the training data"
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """How to cut a step out of the samples.

    Attributes:
        size: the number of samples in the step.
        slices: per lane, the indices of its samples in the step, int64 [b].
        dense: for an evaluation step, the dense values of each slice, float32 [b, n], which
            identify its records; otherwise None.
    """

    size: int
    slices: tuple[np.ndarray, ...]
    dense: tuple[np.ndarray, ...] | None = None


def _in_order(batch: int, lanes: int) -> Iterator[_Cut]:
    """Yield steps of the training batch size without end, each cut into equal slices in order."""
    bounds = [batch * lane // lanes for lane in range(lanes + 1)]
    while True:
        yield _Cut(batch, tuple(np.arange(start, end) for start, end in pairwise(bounds)))


def _evaluated(schedule: Schedule) -> Iterator[_Cut]:
    """Yield the steps of the evaluation after a schedule's last epoch."""
    for step in last_pass(schedule):
        numbers = [np.asarray(lane.numbers) for lane in step.lanes]
        # Steps take the samples in order. Only the order of the numbers matters, not where they
        # begin.
        order = np.sort(np.concatenate(numbers))
        places = tuple(np.searchsorted(order, lane) for lane in numbers)
        yield _Cut(len(order), places, tuple(lane.dense for lane in step.lanes))


def _cut(samples: Iterator[Samples], cuts: Iterator[_Cut], records: Records) -> Iterator[tuple[Samples, _Cut]]:
    """Cut the samples into steps. If they are cut in order, the last step may be smaller.

    Raises:
        RunError: the samples are not the evaluation samples of `steps_of`.
    """
    held: list[Samples] = []
    exact = records.steps_of is not None

    def filled(size: int) -> int:
        while sum(map(len, held)) < size and (more := next(samples, None)) is not None:
            held.append(more)
        return sum(map(len, held))

    for cut in cuts:
        count = filled(cut.size)
        if not count and not exact:
            return
        if count < cut.size and exact:
            raise _no_evaluation(records, "has fewer records")
        whole = Samples.concat(held)
        step, rest = whole.slice(0, min(count, cut.size)), whole.slice(min(count, cut.size), count)
        held = [rest] if len(rest) else []
        if cut.dense is not None:
            for places, dense in zip(cut.slices, cut.dense, strict=True):
                if not np.array_equal(step.dense[places], dense):
                    raise _no_evaluation(records, "has other records, or in another order")
        slices = tuple(places[places < len(step)] for places in cut.slices)
        yield step, replace(cut, slices=slices)
    if filled(1):
        raise _no_evaluation(records, "has more records")


def _no_evaluation(records: Records, what: str) -> RunError:
    return RunError(
        f"predict: {', '.join(records.sources)}: {what} than the evaluation samples of {records.steps_of}; give the data that it was prepared with, "
        "or leave out --steps-of"
    )


def _predicted(model: SavedModel, steps: Iterator[tuple[Samples, _Cut]], unknown: UnknownValues) -> Iterator[np.ndarray]:
    reader, dense_part = model.row_source(), DenseForward(model)
    dense_part.note_mixing("a score")
    tables = np.array([feature.table for feature in model.features.features], np.int64)
    at_once = max(1, _READ_SAMPLES // model.schedule.header.batch_size)
    while group := list(islice(steps, at_once)):
        known = _rows(reader, len(model.layouts), [samples for samples, _ in group], tables)
        for samples, cut in group:
            unknown.add(samples.ids, samples.offsets, _is_trained(samples, tables, known))
            outputs = np.empty((len(samples), len(model.features.labels)), np.float32)
            for places in cut.slices:
                if len(places):
                    part = samples.take(places)
                    index, rows = _local(part, tables, known)
                    offsets = None if part.offsets is None else part.offsets.astype(np.int32)
                    outputs[places] = dense_part.outputs(rows, index, offsets, part.dense).numpy().reshape(len(places), -1)
            yield outputs if outputs.shape[1] > 1 else outputs[:, 0]


def _lookup_tables(samples: Samples, tables: np.ndarray) -> np.ndarray:
    """Return the table of each lookup, int64 [lookups]."""
    if samples.offsets is None:
        return np.tile(tables, len(samples))
    return np.repeat(np.tile(tables, len(samples)), np.diff(samples.offsets))


_Known = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Rows that were read: per table the ids, int64 [n] ascending, the weights, float32 [n, W], and
whether the rows were trained, bool [n].
"""


def _rows(reader: RowSource, count: int, group: Sequence[Samples], tables: np.ndarray) -> _Known:
    """Read the rows that the samples of a group use, in tables 0 to `count` - 1."""
    of_lookup = np.concatenate([_lookup_tables(samples, tables) for samples in group])
    ids = np.concatenate([samples.ids for samples in group])
    known = {}
    for table in range(count):
        wanted = np.unique(ids[of_lookup == table])
        known[table] = wanted, *reader.read(table, wanted)
    return known


def _is_trained(samples: Samples, tables: np.ndarray, known: _Known) -> np.ndarray:
    """Return whether the row of each lookup was trained, bool [lookups]."""
    of_lookup, trained = _lookup_tables(samples, tables), np.empty(len(samples.ids), bool)
    for table, (ids, _, of_ids) in known.items():
        here = np.flatnonzero(of_lookup == table)
        trained[here] = of_ids[np.searchsorted(ids, samples.ids[here])]
    return trained


def _local(samples: Samples, tables: np.ndarray, known: _Known) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of a slice, and the lookups as indices into them.

    The indices are int32 [lookups], the rows float32 [U, W of the widest table].
    """
    of_lookup = _lookup_tables(samples, tables)
    index = np.empty(len(samples.ids), np.int32)
    width = max((weights.shape[1] for _, weights, _ in known.values()), default=0)
    rows, first = [np.empty((0, width), np.float32)], 0
    for table, (ids, weights, _) in known.items():
        here = np.flatnonzero(of_lookup == table)
        own, inverse = np.unique(samples.ids[here], return_inverse=True)
        wide = np.zeros((len(own), width), np.float32)
        wide[:, : weights.shape[1]] = weights[np.searchsorted(ids, own)]
        rows.append(wide)
        index[here] = first + inverse
        first += len(own)
    return index, np.concatenate(rows)


# -- Raw records -----------------------------------------------------------------------------------


def _samples(model: SavedModel, records: Records) -> Iterator[Samples]:
    """Read and encode the well-formed records, in pieces.

    Raises:
        SettingError: the format is none of FORMATS.
        SourceError: a file cannot be read.
        RecordError: too many records are malformed.
    """
    schedule = model.schedule
    spec, encoder = encoder_of(model)
    kind = records.format or _format(schedule, records.sources)
    if kind not in FORMATS:
        raise SettingError(f"--format: must be one of {', '.join(FORMATS)}; got {kind!r}")
    labelled, spec = spec, spec.unlabelled()
    if kind in ("csv", "tsv") and kind != schedule.made_with("format"):
        spec = replace(spec, text=replace(spec.text, delimiter="\t" if kind == "tsv" else None))
    if kind == "criteo":
        spec = replace(spec, text=replace(FeatureSpec.criteo().text, missing=spec.text.missing))
    if kind != "parquet" and spec.text.columns:
        spec = replace(spec, text=replace(spec.text, columns=_columns(records.sources, spec.text, labelled)))
    # Criteo files are text files whose columns are known.
    source_kind: Format = "parquet" if kind == "parquet" else "csv"
    allowed, rejected = schedule.made_with("max_rejects") or 0, 0
    first: list[str] = []
    for split in plan_splits(Source(source_kind, records.sources), spec):
        for piece in read_records(split, spec, encoder.scales):
            rejected += piece.rejected
            first += [str(reject) for reject in piece.rejects[: _SHOWN - len(first)]]
            if rejected > allowed:
                raise RecordError(
                    f"predict: more than {allowed} records are malformed, as --max-rejects of the schedule allows; correct them: {'; '.join(first)}"
                )
            if len(piece):
                yield encoder.encode(piece)
    if rejected:
        sys.stderr.write(f"foreload: warning: {rejected:,} malformed records are left out: {'; '.join(first)}\n")


def _columns(sources: Sequence[str], text: TextFormat, spec: FeatureSpec) -> tuple[str, ...]:
    """Return the columns of text files that have no header line.

    The files may lack the columns of labels, weights and groups, in this order. The number of
    fields in the first line decides which of them are missing.
    """
    path = match_files(sources)[0].path
    fields = len(first_row(path, replace(text, delimiter=text.delimiter or delimiter_of(path))))
    labels = {label.column for label in spec.labels}
    for left_out in (labels, labels | {spec.weight}, labels | {spec.weight, spec.group}):
        kept = tuple(name for name in text.columns if name not in left_out or name in spec.unlabelled().columns)
        if len(kept) == fields:
            return kept
    return text.columns


def _format(schedule: Schedule, sources: Sequence[str]) -> str:
    made = schedule.made_with("format")
    endings = {Path(source).name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2] for source in sources}
    if endings == {"parquet"} or (made not in ("criteo", "csv", "tsv") and len(endings) == 1 and endings <= {"csv", "tsv"}):
        return endings.pop()
    if made in ("criteo", "csv", "tsv"):
        return str(made)
    raise SourceError(f"{', '.join(sources)}: the name does not show the format; give --format, one of {', '.join(FORMATS)}")


# -- Scores ----------------------------------------------------------------------------------------


def _scores(outputs: np.ndarray, labels: Sequence[Label]) -> np.ndarray:
    """Return the scores of outputs, float32 [n] or [n, labels].

    Outputs for clicks become probabilities; outputs for numbers stay as they are.
    """
    clicks = np.array([label.kind == "click" for label in labels])
    return np.where(clicks if len(labels) > 1 else clicks[0], probabilities(outputs), outputs)


def check_out(out: str) -> None:
    """Check that scores can be written to `out`.

    Raises:
        SettingError: `out` does not end in .csv or .parquet, or its folder does not exist.
    """
    if Path(local("--out", out)).suffix not in (".csv", ".parquet"):
        raise SettingError(f"--out: must end in .csv or .parquet; got {out!r}")
    if not Path(out).absolute().parent.is_dir():
        raise SettingError(f"--out: cannot write {out}: there is no such folder")


@dataclass(frozen=True, slots=True)
class Written:
    """A file of scores that was written.

    Attributes:
        records: the number of scored records.
        unknown: by feature, the number of "values", and how many of them are "unknown" to the
            model.
    """

    out: str
    records: int
    unknown: dict[str, dict[str, int]]


def write(out: str, predictions: Predictions) -> Written:
    """Write scores as CSV or Parquet, whole or not at all."""
    check_out(out)
    names = predictions.columns
    schema, count = pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names]), 0
    with replacing(Path(out)) as temporary:
        kind = pq.ParquetWriter if Path(out).suffix == ".parquet" else arrow_csv.CSVWriter
        with kind(str(temporary), schema) as writer:
            for batch in predictions.batches:
                by_column = batch.reshape(len(batch), len(names)).T
                writer.write_table(pa.table([pa.array(np.ascontiguousarray(column)) for column in by_column], schema=schema))
                count += len(batch)
    return Written(out, count, predictions.unknown.to_dict())

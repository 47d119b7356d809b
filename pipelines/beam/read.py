"""The stages that read the sources: survey, count, and encode into pieces.

Survey and count serve vocabularies and standardisation. Each pass is a ReadStage over tasks (a task
is a split and its set), followed by a CollectStage over the outputs of all tasks.

A source is read once if nothing has to be counted, and twice if something has. It is read three
times if, in addition, a tail is held out: only training data is counted, and which samples these
are is known only when all have been read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from foreload.base.codec import to_stored
from foreload.base.files import read_json, write_atomically, write_json
from foreload.pipelines.beam.stages import (
    GroupStage,
    Stage,
    Wrap,
    each,
    grouped,
)
from foreload.pipelines.errors import RecordError, SourceError
from foreload.pipelines.planning.plan import EVALUATION, REJECTS, TRAINING, TRAINING_ROWS, Plan, ReadTask, names_of, piece_of
from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.column_counts import ColumnCounts
from foreload.pipelines.samples.convert import (
    Rejected,
    TaskRejects,
    add_causes,
    by_frequency,
    header_remedy,
    remedy,
    summed_up,
)
from foreload.pipelines.samples.dense import DenseStatistics, Scale
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.external_sort import first_rows, order_keys, stable_order
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import PieceOrder, PieceRuns, Samples, held_out, write_piece
from foreload.pipelines.samples.records import Cause, RejectedRecord
from foreload.pipelines.samples.vocabulary import (
    COUNTS,
    Vocabulary,
    count_values,
    merge_counts,
)
from foreload.pipelines.schedule.format import REJECTS_FILE
from foreload.pipelines.sources import MOST_REJECTS, Records, read_records

_SHOWN = 3  # malformed records that an error names
_MOST_KEPT = 10 * MOST_REJECTS  # malformed records in the rejects file


class ReadStage(Stage):
    """Reads a task's records, piece by piece.

    The stage writes the task's first malformed records, and all causes, to a file of the task.

    Attributes:
        scales: The scales of dense columns, once they are known.
    """

    scales: Sequence[Scale] = ()

    def name(self, element: ReadTask) -> str:
        return element.name

    def outputs(self, element: ReadTask) -> Iterator[Any]:
        """Yield (name of the task, pieces as (name, rows), number of malformed records)."""
        rejects: list[RejectedRecord] = []
        causes: Counter[Cause] = Counter()
        rejected = 0
        pieces: list[tuple[str, int]] = []
        working: Future[None] | None = None
        # The thread processes one piece while the next one is read.
        with ThreadPoolExecutor(1) as thread:
            for place, records in enumerate(read_records(element.split, self.plan.spec, self.scales)):
                rejects += records.rejects[: MOST_REJECTS - len(rejects)]
                add_causes(causes, records.causes)
                rejected += records.rejected
                if rejected > self.plan.max_rejects or self.plan.over or self.plan.failed():
                    # Enough was read to report too many malformed records, or reading on is
                    # useless.
                    break
                if len(records):
                    name = piece_of(element.name, place)
                    if working is not None:
                        working.result()
                    working = thread.submit(self.piece, name, records)
                    pieces.append((name, len(records)))
            if working is not None:
                working.result()
        if rejected:
            write_json(self.plan.work / REJECTS / f"{element.name}.json", TaskRejects(rejects, by_frequency(causes)))
        self.finish(element.name, pieces)
        yield element.name, pieces, rejected

    def piece(self, name: str, records: Records) -> None:
        """Process some records. Runs in a thread, in the records' order."""
        raise NotImplementedError

    def finish(self, task: str, pieces: list[tuple[str, int]]) -> None:
        """Write the results over all of the task's pieces, which are (name, rows)."""


class CollectStage(GroupStage):
    """The group stage after a ReadStage, which gathers the malformed records of all tasks.

    Raises:
        RecordError: If more records are malformed than allowed.
    """

    def __init__(self, plan: Plan, tasks: Sequence[ReadTask] = ()) -> None:
        super().__init__(plan)
        self.tasks = list(tasks)

    def together(self, values: list[Any]) -> Iterator[Any]:
        rejected = sum(count for _, _, count in values)
        # Training records come first. Within a set, the tasks' names sort in the order in which the
        # user gave the files.
        names = [name for which in self.plan.sets for name, _, count in values if count and name.startswith(which)]
        rejects = [read_json(self.plan.work / REJECTS / f"{name}.json", TaskRejects) for name in names]
        kept = [reject for part in rejects for reject in part.first][:_MOST_KEPT]
        counted: Counter[Cause] = Counter()
        for part in rejects:
            add_causes(counted, dict(part.causes))
        causes = by_frequency(counted)
        if kept:
            lines = "".join(json.dumps(to_stored(reject), sort_keys=True) + "\n" for reject in kept)
            write_atomically(self.plan.written / REJECTS_FILE, lines.encode())
        if rejected > self.plan.max_rejects:
            shown = "; ".join(f"{r.file}:{r.line}: {r.field}: {r.reason}, not {r.value!r}" for r in kept[:_SHOWN])
            more = f"; of those read: {summed_up(causes, rejected)}" if rejected > _SHOWN else ""
            missing_line = remedy(causes, self.plan.spec)
            raise RecordError(
                f"--max-rejects: more than {self.plan.max_rejects} records are malformed; correct them or allow more (see {REJECTS_FILE} in "
                f"--out): {shown}{more}"
                + (f"; if these stand for missing values, write {missing_line}" if missing_line else "")
                + header_remedy(kept[0], self.plan.spec)
            )
        self.plan.save("rejected", Rejected(rejected, causes))
        yield from self.collected([piece for _, pieces, _ in values for piece in pieces])

    def collected(self, pieces: list[tuple[str, int]]) -> Iterator[Any]:
        """Yield the outputs for all pieces, (name, rows) in the order of their names."""
        raise NotImplementedError


class Survey(ReadStage):
    """Training tasks -> the number of samples of each piece.

    With order_by, the stage also writes for each piece a run of its sorted keys, without samples.
    It runs only if a tail is held out and something is counted, because the tail must not be
    counted.
    """

    def piece(self, name: str, records: Records) -> None:
        if records.keys is not None:
            keys = order_keys(records.keys)
            no_samples = Samples(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32), np.empty(0, np.int64))
            write_piece(self.plan.pieces / _keys_name(name), no_samples, keys.take(pa.array(stable_order(keys))), {})


def _keys_name(piece: str) -> str:
    return f"keys-{piece}"


class FindTraining(CollectStage):
    """The survey -> how many samples of each piece, in sort order, are training samples.

    Outputs the training tasks.
    """

    def collected(self, pieces: list[tuple[str, int]]) -> Iterator[Any]:
        order = PieceOrder.whole(pieces)
        count = order.rows - held_out(order.rows, self.plan.evaluation_fraction)
        # The transform `standard` may later show that a held-out record is malformed. The samples
        # counted here stay the training data all the same.
        self.plan.save(TRAINING_ROWS, count)
        if self.plan.spec.order_by is None:
            kept = order.slice(0, count)
            training = dict(zip(kept.names, kept.ends.tolist(), strict=True))
        else:
            keys = PieceRuns(self.plan.pieces, [_keys_name(name) for name in order.names])
            training = dict(zip(order.names, first_rows(keys, count, self.plan.piece_rows).tolist(), strict=True))
        self.plan.save("training", training)
        yield from self.tasks


class Count(ReadStage):
    """Training tasks -> files of vocabulary values with counts, and of dense columns' sums."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._counts: dict[int, pa.Table] = {}
        self._statistics = DenseStatistics.empty(0)
        self._training: dict[str, int] | None = None

    def outputs(self, element: ReadTask) -> Iterator[Any]:
        self._counts = {table: COUNTS.empty_table() for table in self.plan.spec.vocabulary_tables}
        self._statistics = DenseStatistics.empty(len(self.plan.spec.dense))
        self._training = self.plan.load("training", dict[str, int]) if self.plan.evaluation_fraction else None
        yield from super().outputs(element)

    def piece(self, name: str, records: Records) -> None:
        if self._training is not None:
            count = self._training.get(name, 0)
            order = np.arange(len(records)) if records.keys is None else stable_order(order_keys(records.keys))
            is_training = np.zeros(len(records), bool)
            # The held-out samples are the last by key, so the first ones are training samples.
            is_training[order[:count]] = True
            records = records.filter(is_training)
        for table, counts in self._counts.items():
            self._counts[table] = merge_counts([counts, count_values(records, self.plan.spec, table)])
        self._statistics = self._statistics.merge(DenseStatistics.of(records.dense))

    def finish(self, task: str, pieces: list[tuple[str, int]]) -> None:
        for table, counts in self._counts.items():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, COUNTS) as writer:
                writer.write_table(counts)
            write_atomically(self.plan.pieces / _counts_name(table, task), sink.getvalue())
        write_json(self.plan.pieces / _sums_name(task), self._statistics)


def _counts_name(table: int, task: str) -> str:
    return f"counts-{table:05d}-{task}"


def _sums_name(task: str) -> str:
    return f"sums-{task}.json"


class MergeCounts(CollectStage):
    """All counts -> the schedule's encoding state, which is vocabularies and scales.

    Outputs all tasks, including evaluation tasks.
    """

    def __init__(self, plan: Plan, counted: Sequence[str], tasks: Sequence[ReadTask]) -> None:
        """Create the stage.

        Args:
            counted: The names of the tasks that were counted.
            tasks: All tasks.
        """
        super().__init__(plan, tasks)
        self.counted = sorted(counted)

    def collected(self, pieces: list[tuple[str, int]]) -> Iterator[Any]:
        spec = self.plan.spec
        vocabularies = {}
        for table in spec.vocabulary_tables:
            counts = COUNTS.empty_table()
            for task in self.counted:
                with pa.memory_map(str(self.plan.pieces / _counts_name(table, task))) as source:
                    counts = merge_counts([counts, pa.ipc.open_file(source).read_all()])
            vocabularies[table] = Vocabulary.of(counts, spec.min_count(table))
        statistics = DenseStatistics.empty(len(spec.dense))
        for task in self.counted:
            statistics = statistics.merge(read_json(self.plan.pieces / _sums_name(task), DenseStatistics))
        scaled = any(dense.scaled for dense in spec.dense)
        encoding_state.save(self.plan.encoding, vocabularies, statistics.scales(spec.dense) if scaled else ())
        yield from self.tasks


class Encode(ReadStage):
    """Tasks -> encoded pieces. With order_by, each piece is sorted and so is a run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._encoder: Encoder | None = None
        self._columns = ColumnCounts.none(plan.spec)

    def outputs(self, element: ReadTask) -> Iterator[Any]:
        self._columns = ColumnCounts.none(self.plan.spec)
        if self._encoder is None:
            self._encoder = encoding_state.load(self.plan.encoding, self.plan.spec)[1]
            self.scales = self._encoder.scales
        yield from super().outputs(element)

    def piece(self, name: str, records: Records) -> None:
        assert self._encoder is not None
        samples = self._encoder.encode(records)
        if name.startswith("training") and not self.plan.evaluation_fraction:
            # Only evaluation needs groups.
            samples = replace(samples, groups=None)
        self._columns += ColumnCounts.of(records, samples, self.plan.spec)
        keys = None
        if records.keys is not None:
            keys = order_keys(records.keys)
            order = stable_order(keys)
            samples, keys = samples.take(order), keys.take(pa.array(order))
        write_piece(self.plan.pieces / name, samples, keys, {})

    def finish(self, task: str, pieces: list[tuple[str, int]]) -> None:
        write_json(self.plan.pieces / _columns_name(task), self._columns)
        self.plan.save(names_of(task), [name for name, _ in pieces])


def _columns_name(task: str) -> str:
    return f"columns-{task}.json"


class CollectPieces(CollectStage):
    """All encoded pieces -> the orders as read. Outputs their name, "read".

    Raises:
        SourceError: If a set has no well-formed record.
    """

    def collected(self, pieces: list[tuple[str, int]]) -> Iterator[Any]:
        orders = {which: PieceOrder.whole([piece for piece in pieces if piece[0].startswith(which)]) for which in self.plan.sets}
        for task in self.tasks:
            if orders[task.which].rows == 0:
                raise SourceError(f"{self.plan.flag_of(task.which)}: has no well-formed record; check the files and --format")
        columns = {which: ColumnCounts.none(self.plan.spec) for which in (TRAINING, EVALUATION)}
        for task in self.tasks:
            which = TRAINING if task.is_training else EVALUATION
            columns[which] += read_json(self.plan.pieces / _columns_name(task.name), ColumnCounts)
        self._check_labels(columns[TRAINING] + columns[EVALUATION])
        self.plan.save("columns", columns)
        self.plan.save("read", orders)
        yield "read"

    def _check_labels(self, counts: ColumnCounts) -> None:
        """Check that no column of clicks is -1 in some records and 0 in others.

        Raises:
            RecordError: One is.
        """
        for place, label in enumerate(self.plan.spec.labels):
            zeros = counts.samples - int(counts.ones[place]) - int(counts.negatives[place])
            negatives = int(counts.negatives[place])
            if label.kind == "number" or label.at_least is not None or not (zeros and negatives):
                continue
            # By a label of the more frequent kind alone, a record with the other is malformed.
            strict = replace(label, negative=0 if zeros >= negatives else -1)
            # None if only records beyond those kept in full have it.
            reject = next(self._rejects(replace(self.plan.spec, labels=(strict,), weight=None)), None)
            example = "" if reject is None else f", as at {reject.file}:{reject.line}"
            raise RecordError(
                f"label {label.name}: must be 0 and 1, or -1 and 1, in all records; it is 0 in {zeros:,} and -1 in {negatives:,}{example}; "
                f"correct it, or set {'label_negative' if label.plain else 'negative'} = {strict.negative} and "
                "--max-rejects to leave the others out"
            )

    def _rejects(self, spec: FeatureSpec) -> Iterator[RejectedRecord]:
        """Yield the first malformed records of each piece by their labels, with other labels in the spec."""
        column = spec.labels[0].column
        for task in self.tasks:
            for records in read_records(task.split, spec):
                yield from (reject for reject in records.rejects if reject.field == column)


def add_reading(pipeline: beam.Pipeline, plan: Plan, tasks: Sequence[ReadTask], wrap: Wrap) -> beam.PCollection:
    """Add the stages from the tasks to the orders as read.

    Returns:
        A collection whose one element is the name of the orders.
    """
    training = [task for task in tasks if task.is_training]
    # beam.Create spreads its elements over all workers, so the first stage does not have to.
    current = pipeline | "Tasks" >> beam.Create(training if plan.counted else list(tasks))
    spread = False
    if plan.counted and plan.evaluation_fraction:
        surveyed = each(current, Survey(plan), wrap, spread)
        current, spread = grouped(surveyed, FindTraining(plan, training), wrap), True
    if plan.counted:
        counted = each(current, Count(plan), wrap, spread)
        names = [task.name for task in training]
        current, spread = grouped(counted, MergeCounts(plan, names, tasks), wrap), True
    return grouped(each(current, Encode(plan), wrap, spread), CollectPieces(plan, tasks), wrap)

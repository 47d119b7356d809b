"""What is compiled while it is being read: the same samples as from the finished pieces, each as soon as it can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from portable_job import contents
from waiting import wait_until

from foreload.pipelines import prepare
from foreload.pipelines.beam.local import GrowingSource
from foreload.pipelines.beam.read import Encode
from foreload.pipelines.beam.stages import Stage
from foreload.pipelines.planning import work_folder
from foreload.pipelines.planning.options import PrepareOptions
from foreload.pipelines.planning.plan import Plan, ReadTask, make_plan, names_of, piece_of
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.pieces import Abandoned, PieceOrder, Samples, held_out, write_piece
from foreload.pipelines.schedule.format import WORK
from foreload.pipelines.sources import Source, plan_splits

FEATURES = """
label = "clicked"
[[feature]]
name = "left"
encoding = "id"
rows = 100
"""
# Of each task, the samples of the pieces at its places; None: all of that place's records are malformed.
TASKS: tuple[tuple[int | None, ...], ...] = ((5, 3), (None, 4, None, 6), (), (2,))


def planned(tmp_path: Path, fraction: float) -> tuple[Plan, list[ReadTask]]:
    """A plan whose sources have as many splits as there are TASKS."""
    for name in "abcd":
        (tmp_path / f"{name}.csv").write_text("clicked,left\n1,2\n")
    (tmp_path / "features.toml").write_text(FEATURES)
    options = PrepareOptions(
        out=tmp_path / "schedule", sources=(str(tmp_path / "*.csv"),), format="csv", features=tmp_path / "features.toml",
        batch_size=4, eval_fraction=fraction, max_rejects=99,
    )  # fmt: skip
    plan, tasks = make_plan(options, None)
    (plan.out / WORK).mkdir(parents=True)
    work_folder.make(plan)
    return plan, tasks


def samples_of(first: int, count: int) -> Samples:
    """Samples whose ids say which they are."""
    return Samples(np.zeros((count, 1), np.float32), np.zeros((count, 0), np.float32), np.arange(first, first + count))


def together(chunks: list[tuple[Samples, np.ndarray]]) -> tuple[list[int], list[int]]:
    """Ids and numbers of chunks."""
    return [i for samples, _ in chunks for i in samples.ids.tolist()], [n for _, numbers in chunks for n in numbers.tolist()]


def until(
    training: Iterator[tuple[Samples, np.ndarray]], count: int, before: list[tuple[Samples, np.ndarray]]
) -> list[tuple[Samples, np.ndarray]]:
    """Further chunks, until there are so many samples with those before."""
    further: list[tuple[Samples, np.ndarray]] = []
    while sum(len(samples) for samples, _ in (*before, *further)) < count:
        further.append(next(training))
    return further


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_samples_come_as_soon_as_they_are_certain_and_are_those_of_the_finished_order(fraction: float, tmp_path: Path) -> None:
    plan, tasks = planned(tmp_path, fraction)
    total = sum(count or 0 for places in TASKS for count in places)
    source = GrowingSource(plan, tasks, {"training": total, "evaluation": 0}, counted=False)
    chunks: list[tuple[Samples, np.ndarray]] = []
    training = source.training(0)
    pieces: list[tuple[str, int]] = []
    written = 0
    for task, places in zip(tasks, TASKS, strict=True):
        names = []
        for place, count in enumerate(places):
            if count is None:
                continue
            names.append(piece_of(task.name, place))
            write_piece(plan.pieces / names[-1], samples_of(written, count), None, {})
            pieces.append((names[-1], count))
            written += count
            if None not in places[:place]:  # else it is found when all of the task is there
                chunks += until(training, written - held_out(written, fraction), chunks)
        plan.save(names_of(task.name), names)
        chunks += until(training, written - held_out(written, fraction), chunks)
    order, kept = PieceOrder.whole(pieces), total - held_out(total, fraction)
    plan.save("cut", {"training": order.slice(0, kept), "evaluation": order.slice(kept, total)})
    source.finish(whole=True)
    chunks += training
    everything = list(range(total))
    assert together(chunks) == (everything[:kept], everything[:kept])
    assert together(list(source.training(1))) == (everything[:kept], everything[:kept])
    assert together(list(source.evaluation())) == (everything[kept:], list(range(total - kept)))
    assert (source.training_samples, source.evaluation_samples) == (kept, total - kept)


def test_numbers_of_samples_are_known_at_once_where_the_sources_tell_them(tmp_path: Path) -> None:
    plan, tasks = planned(tmp_path, 0.3)
    source = GrowingSource(plan, tasks, {"training": 10, "evaluation": 4}, counted=True)
    assert (source.training_samples, source.evaluation_samples) == (7, 7)


def test_nothing_comes_of_it_once_the_reading_has_failed(tmp_path: Path) -> None:
    plan, tasks = planned(tmp_path, 0.0)
    source = GrowingSource(plan, tasks, {"training": 10, "evaluation": 0}, counted=False)
    write_piece(plan.pieces / piece_of(tasks[0].name, 0), samples_of(0, 5), None, {})
    training = source.training(0)
    assert len(next(training)[0]) == 5
    source.finish(whole=False)
    asked: list[Callable[[], object]] = [
        lambda: next(training), lambda: source.training_samples, lambda: list(source.evaluation()), source.check
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(Abandoned):
            ask()


class Held(beam.DoFn):
    """Encodes the last task only once something is there."""

    def __init__(self, stage: Encode, last: str, there: Callable[[Path], bool]) -> None:
        super().__init__()
        self.stage, self.last, self.there = stage, last, there

    def process(self, element: ReadTask) -> Iterator[Any]:
        if element.name == self.last:
            wait_until(lambda: self.there(self.stage.plan.out), lambda: "nothing was compiled before all was read")
        yield from self.stage.process(element)


# With a window segments are published meanwhile; without one, the samples are written.
@pytest.mark.parametrize(("window", "file"), [(["--window=2000"], "segment-000000.json"), ([], "samples-000000-00.arrow")])
def test_it_is_compiled_while_it_is_read(window: list[str], file: str, tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(FEATURES)
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        columns = {"clicked": generator.integers(0, 2, 4000), "left": generator.integers(0, 100, 4000)}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    sources = [str(tmp_path / "*.parquet"), "--format=parquet", f"--features={tmp_path / 'features.toml'}"]
    command = [*sources, "--batch-size=64", "--slots=70", "--segment-bytes=10000", "--epochs=2", "--eval-fraction=0.1", *window]
    last = ReadTask(
        "training", plan_splits(Source("parquet", (str(tmp_path / "*.parquet"),)), load_features(tmp_path / "features.toml"))[-1]
    )

    def held(stage: Stage) -> beam.DoFn:
        return Held(stage, last.name, lambda out: (out / file).exists()) if isinstance(stage, Encode) else stage

    prepare.run([*command, f"--out={tmp_path / 'held'}"], wrap=held)
    prepare.run([*command, f"--out={tmp_path / 'free'}"])
    assert contents(tmp_path / "held") == contents(tmp_path / "free")

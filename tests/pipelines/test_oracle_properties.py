"""Whatever the accesses, lanes, slots, segments and lookahead: a compiled schedule keeps every invariant of the oracle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from belady import belady_arrivals
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import MemorySource
from oracle_twin import Outcome, Step, Trained, check_program, own_rows, steps_of
from reference_data import Placement, Row, slice_bounds

from foreload.pipelines.compiler import windowed
from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.errors import SlotsError
from foreload.pipelines.samples.features import Feature, FeatureSpec, Label, Table
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after

EVERYTHING = 1 << 40  # accesses: more than any schedule has
SLOTS: tuple[int | str, ...] = ("min", "all", 3, 6, 14)


@dataclass(frozen=True)
class Case:
    """Random accesses and the settings that they are compiled with."""

    features: FeatureSpec
    sources: tuple[MemorySource, ...]
    batch_size: int
    lanes: int
    epochs: int
    slots: int | str
    segment_bytes: int
    window_accesses: int | None
    direct_rows: int
    threads: int
    placement: Literal["order", "locality"]
    eval_every: int | None = None

    def settings(self, **changed: Any) -> CompileSettings:
        values = {
            "features": self.features,
            "batch_size": self.batch_size,
            "lanes": self.lanes,
            "slots": self.slots,
            "epochs": self.epochs,
            "shuffle_seed": self.sources[0].shuffle_seed,
            "segment_bytes": self.segment_bytes,
            "window_accesses": self.window_accesses,
            "direct_rows": self.direct_rows,
            "threads": self.threads,
            "placement": self.placement,
            "eval_every": self.eval_every,
        }
        return CompileSettings(**{**values, **changed})


def random_samples(random: np.random.Generator, features: FeatureSpec, count: int, skew: float) -> Samples:
    """Samples whose ids are skewed towards small ones."""
    ids: list[int] = []
    offsets = [0]
    for _ in range(count):
        for feature in features.features:
            rows = features.tables[feature.table].rows
            assert rows is not None
            values = 1 if feature.pooling == "single" else int(random.integers(1, 4))
            ids += [int(rows * random.random() ** skew) for _ in range(values)]
            offsets.append(len(ids))
    labels = random.integers(0, 2, (count, 1)).astype(np.float32)
    dense = np.zeros((count, 0), np.float32)
    return Samples(labels, dense, np.array(ids, np.int64), np.array(offsets, np.int64) if features.multi_valued else None)


@st.composite
def cases(draw: st.DrawFn, parts: int = 1) -> Case:
    """parts: schedules, each of samples of its own, that continue each other."""
    tables = tuple(
        Table(f"t{k}", draw(st.sampled_from((1, 5, 40)), label=f"rows of t{k}")) for k in range(draw(st.integers(1, 3)))
    )
    pooled = draw(st.booleans(), label="multi-valued")
    used = [*range(len(tables)), *draw(st.lists(st.integers(0, len(tables) - 1), max_size=2))]
    features = FeatureSpec(
        labels=(Label("y", "y"),),
        dense=(),
        features=tuple(
            Feature(f"f{n}", table, f"f{n}", "id", "sum" if pooled and n % 2 == 0 else "single") for n, table in enumerate(used)
        ),
        tables=tables,
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="data seed"))
    skew = draw(st.sampled_from((1.0, 4.0)))
    shuffle_seed = draw(st.sampled_from((None, 3)), label="shuffle seed")
    chunk = draw(st.integers(1, 9), label="chunk")
    held_out = draw(st.integers(0, 12), label="evaluation samples")
    window = draw(st.sampled_from((None, None, 1, 20, 1 << 20)), label="window")
    sources = tuple(
        MemorySource(
            random_samples(random, features, draw(st.integers(1, 60), label="training samples"), skew),
            random_samples(random, features, held_out, skew),
            chunk,
            shuffle_seed,
        )
        for _ in range(parts)
    )
    return Case(
        features,
        sources,
        batch_size=draw(st.integers(1, 9), label="batch size"),
        lanes=draw(st.integers(1, 5), label="lanes"),
        epochs=draw(st.integers(1, 3), label="epochs"),
        slots=draw(st.sampled_from([slots for slots in SLOTS if isinstance(slots, int) or window is None]), label="slots"),
        segment_bytes=draw(st.sampled_from((1, 300, 2000, 1 << 20)), label="segment bytes"),
        window_accesses=window,
        direct_rows=draw(st.sampled_from((0, 10, 1 << 20)), label="direct rows"),
        threads=draw(st.integers(1, 2), label="threads"),
        placement=draw(st.sampled_from(("locality", "order")), label="placement"),
        eval_every=draw(st.sampled_from((None, 1, 2, 5)), label="eval every"),
    )


def rows_of(case: Case, samples: Samples) -> list[list[Row]]:
    """The rows that each sample looks up."""
    features = case.features.features
    offsets = samples.offsets if samples.offsets is not None else np.arange(len(samples) * len(features) + 1)
    return [
        [(feature.table, int(i)) for f, feature in enumerate(features) for i in samples.ids[offsets[n + f] : offsets[n + f + 1]]]
        for n in range(0, len(samples) * len(features), len(features))
    ]


def program_of(case: Case, source: MemorySource, parent: dict[Row, Trained] | None = None) -> list[Step]:
    """All steps of a schedule: after each epoch, and where the case says amid it, a pass over the evaluation samples. parent: the rows that were
    trained before.
    """
    placement = Placement(case.lanes, case.placement, {row: trained.lane for row, trained in (parent or {}).items()})
    program: list[Step] = []
    epochs: list[list[Step]] = []
    for epoch in range(case.epochs):
        if epoch > 0 and not source.shuffled:
            epochs.append(epochs[0])
        else:
            epochs.append(steps_of("train", rows_of(case, source.train.take(source.order(epoch))), case.batch_size, placement))
        evaluation = steps_of("evaluate", rows_of(case, source.held_out), case.batch_size, placement)
        every = case.eval_every or len(epochs[-1])
        for first in range(0, len(epochs[-1]), every):
            program += [*epochs[-1][first : first + every], *evaluation]
    return program


def check(schedule: Schedule, program: list[Step], parent: dict[Row, Trained] | None = None) -> Outcome:
    """Run through a schedule from disk, asserting every invariant and the manifest's counts."""
    header, manifest = schedule.header, schedule.manifest
    outcome = check_program(
        list(schedule.events()),
        schedule.lane,
        program,
        schedule.slots,
        manifest["evaluation_slots"],
        manifest["occupied"],
        header.first_step,
        parent,
    )
    counts = manifest["counts"]
    assert counts["rows_used"] == outcome.rows_used
    assert counts["arrivals"] == outcome.arrivals == outcome.initial + counts["stored"]
    assert counts["initial"] == outcome.initial
    assert counts["write_backs"] == outcome.write_backs == outcome.arrivals, "every residency is written back once"
    return outcome


def compiled(case: Case, folder: Path, part: int = 0, **changed: Any) -> Schedule | None:
    """The schedule of a case's part, or None where a step does not fit its slots."""
    out, work = folder / f"schedule{part}", folder / f"work{part}"
    out.mkdir()
    work.mkdir()
    try:
        Compilation(case.settings(**changed), out).compile(case.sources[part], work)
    except SlotsError:
        return None
    return Schedule(out)


def check_samples(case: Case, source: MemorySource, schedule: Schedule, program: list[Step], first_number: int = 0) -> None:
    """Labels, offsets and numbers of every slice."""
    width = len(case.features.features)
    passed = {"train": 0, "evaluate": 0}
    for event, step in zip(schedule.events(), program, strict=True):
        samples = source.train if event.kind == "train" else source.held_out
        order = source.order(event.epoch) if event.kind == "train" else np.arange(len(samples))
        start = passed[event.kind] % len(samples)
        passed[event.kind] += event.samples
        for lane, (places, (a, b)) in enumerate(zip(step.slices, slice_bounds(event.samples, case.lanes), strict=True)):
            assert len(places) == b - a
            chosen = order[[start + place for place in places]]
            part, expected = schedule.lane(event, lane), samples.take(chosen)
            np.testing.assert_array_equal(part.labels, expected.labels)
            np.testing.assert_array_equal(part.numbers, chosen + (first_number if event.kind == "train" else 0))
            assert part.dense.shape == (b - a, 0)
            if case.features.multi_valued:
                np.testing.assert_array_equal(part.offsets, expected.offsets if b > a else np.zeros(1))
            else:
                assert part.offsets is None
                assert len(part.index) == (b - a) * width


def on_cases(examples: int, parts: int = 1) -> Callable[[Callable[[Case], None]], Callable[[int], None]]:
    """Make a test of a case one of so many drawn ones in the full grid, and of a third of them else."""

    def decorate(test: Callable[[Case], None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("count", [examples // 3, pytest.param(examples, marks=pytest.mark.full)])
        def on_drawn(count: int) -> None:
            settings(max_examples=count)(given(cases(parts=parts))(test))()

        return on_drawn

    return decorate


@on_cases(100)
def test_a_compiled_schedule_keeps_every_invariant(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = compiled(case, Path(folder))
        if schedule is None:
            return
        program = program_of(case, case.sources[0])
        outcome = check(schedule, program)
        check_samples(case, case.sources[0], schedule, program)
        row_table = {
            (int(table), int(row)): (int(lane), int(ordinal), int(tag))
            for batch in schedule.rows(7)
            for table, row, lane, ordinal, tag in zip(*(batch[k] for k in ("table", "id", "lane", "ordinal", "tag")), strict=True)
        }
        assert list(row_table) == sorted(row_table), "the row table is by (table, id)"
        assert row_table == {row: (t.lane, t.ordinal, t.tag) for row, t in outcome.rows.items()}
        per_lane = [own_rows(program, lane, outcome.rows) for lane in range(case.lanes)]
        largest = [max(len(rows) for rows in steps) for steps in per_lane]
        assert schedule.manifest["minimum_slots"] == largest
        fewest = sum(belady_arrivals(steps, n) for steps, n in zip(per_lane, schedule.header.slots, strict=True))
        assert outcome.arrivals >= fewest
        if schedule.manifest["lookahead"]["cover"] is None:
            assert outcome.arrivals == fewest
        if case.slots == "all":
            assert outcome.arrivals == outcome.initial == len(outcome.rows)
        if case.slots == "min":
            assert list(schedule.header.slots) == [max(n, 1) for n in largest]


@pytest.mark.parametrize(
    ("rows", "slots", "lanes", "window_accesses"),
    [
        ((40, 9), 3, 1, 1 << 20),
        ((40, 9), 12, 3, 20),
        ((40, 9), "min", 3, None),
        ((40, 9), 14, 2, None),
        ((40, 9), 14, 2, 1 << 20),
        ((12, 6), 8, 1, 300),
        ((20, 9), 6, 3, 300),
    ],
)
def test_a_schedule_that_its_window_does_not_hold_at_once_keeps_every_invariant(
    rows: tuple[int, int], slots: int | str, lanes: int, window_accesses: int | None, tmp_path: Path
) -> None:
    features = FeatureSpec(
        labels=(Label("y", "y"),),
        dense=(),
        features=(Feature("a", 0, "a", "id"), Feature("b", 1, "b", "id")),
        tables=(Table("t0", rows[0]), Table("t1", rows[1])),
    )
    # 5,200 accesses in up to 2,600 steps, of one sample a lane: the window's rings, of 2,048 accesses and 1,024 steps at first, are gone round
    # several times, or grow.
    samples = random_samples(np.random.default_rng(8), features, 2600, skew=1.2)
    source = MemorySource(samples, samples.slice(0, 5), chunk=100, shuffle_seed=None)
    case = Case(
        features,
        (source,),
        batch_size=lanes,
        lanes=lanes,
        epochs=1,
        slots=slots,
        segment_bytes=20_000,
        window_accesses=window_accesses,
        direct_rows=10,
        threads=1,
        placement="locality",
    )
    schedule = compiled(case, tmp_path)
    assert schedule is not None
    program = program_of(case, source)
    outcome = check(schedule, program)
    per_lane = [own_rows(program, lane, outcome.rows) for lane in range(lanes)]
    fewest = sum(belady_arrivals(steps, n) for steps, n in zip(per_lane, schedule.header.slots, strict=True))
    assert outcome.initial <= fewest <= outcome.arrivals
    if window_accesses is None:
        assert outcome.arrivals == fewest
    elif schedule.manifest["lookahead"]["exact"]:
        assert outcome.arrivals <= 1.001 * fewest


@on_cases(40)
def test_entering_at_any_step_gives_the_state_of_running_through(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = compiled(case, Path(folder))
        if schedule is None:
            return
        outcome = check(schedule, program_of(case, case.sources[0]))
        events = list(schedule.events())
        tables = len(case.features.tables)
        for index, event in enumerate(events):
            if event.row == 0 and schedule.entry(event.segment, 0) is not None:
                segment = schedule.segment(event.segment)
                assert segment is not None
                assert segment.ordinals is not None
                for lane in range(case.lanes):
                    entry = schedule.entry(event.segment, lane)
                    assert entry is not None
                    assert occupants(range(len(entry.table)), entry) == plain(outcome.before[index][lane])
                    assert list(segment.ordinals[lane]) == [outcome.ordinals[index].get((lane, k), 0) for k in range(tables)]
            follows_training = index > 0 and events[index - 1].kind == "train"
            if index == 0 or follows_training:
                step = schedule.header.first_step - 1 if index == 0 else events[index - 1].step
                position = state_after(schedule, step)
                assert position.next_event == event
                for lane, state in enumerate(position.lanes):
                    assert occupants(state.slots, state.occupants) == plain(outcome.before[index][lane])
                    assert list(state.ordinals) == [outcome.ordinals[index].get((lane, k), 0) for k in range(tables)]


def occupants(slots: Any, rows: Any) -> dict[int, tuple[int, ...]]:
    """slot -> (table, id, ordinal, tag, stored tag); rows: columns, as an entry state or `state_after` has them."""
    columns = zip(slots, rows.table, rows.id, rows.ordinal, rows.tag, rows.stored_tag, strict=True)
    return {int(slot): tuple(map(int, values)) for slot, *values in columns}


def plain(partition: Any) -> dict[int, tuple[int, ...]]:
    """The same of a partition as the twin has it: slot -> oracle_twin.Occupant."""
    return {slot: (*o.row, o.ordinal, o.tag, o.stored) for slot, o in partition.items()}


@on_cases(40, parts=2)
def test_a_schedule_after_another_continues_its_rows(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = compiled(case, Path(folder), 0)
        if first is None:
            return
        before = check(first, program_of(case, case.sources[0]))
        second = compiled(case, Path(folder), 1, parent=first.path)
        if second is None:
            return
        assert second.header.first_step == first.header.end_step
        assert second.header.parent == first.checksum
        program = program_of(case, case.sources[1], before.rows)
        check(second, program, before.rows)
        check_samples(case, case.sources[1], second, program, len(case.sources[0].train))


@on_cases(60)
def test_with_all_of_the_future_known_arrivals_are_the_minimum(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = compiled(case, Path(folder), window_accesses=None)
        if schedule is None:
            return
        assert schedule.manifest["lookahead"] == {"bound": 3, "cover": None, "exact": True}
        program = program_of(case, case.sources[0])
        outcome = check(schedule, program)
        steps = [own_rows(program, lane, outcome.rows) for lane in range(case.lanes)]
        fewest = sum(belady_arrivals(rows, n) for rows, n in zip(steps, schedule.header.slots, strict=True))
        assert outcome.arrivals == fewest
        if isinstance(case.slots, int):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(windowed, "TARGET_RATIO", EVERYTHING)
                (Path(folder) / "windowed").mkdir()
                seen = compiled(case, Path(folder) / "windowed", window_accesses=EVERYTHING)
            assert seen is not None
            assert seen.manifest["lookahead"]["exact"]
            assert check(seen, program).arrivals == fewest, "a window that holds everything is as good"


@on_cases(30)
def test_neither_threads_nor_the_form_of_the_row_table_change_a_byte(case: Case) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        first = compiled(case, Path(one), threads=1)
        second = compiled(case, Path(two), threads=2, direct_rows=0)  # every table hashed
        assert (first is None) == (second is None)
        if first is None or second is None:
            return
        assert first.manifest["counts"] == second.manifest["counts"]
        assert [path.name for path in sorted(first.path.iterdir())] == [path.name for path in sorted(second.path.iterdir())]
        for path in sorted(first.path.iterdir()):
            assert path.read_bytes() == (second.path / path.name).read_bytes(), f"{path.name} is the same, byte for byte"


@on_cases(30)
def test_slots_are_refused_exactly_where_a_step_does_not_fit(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def needs(slots: int | str) -> int:
            out = Path(folder) / str(slots)
            out.mkdir()
            window = None if slots == "min" else case.window_accesses
            settings = case.settings(slots=slots, window_accesses=window)
            return max(Compilation(settings, out).compile(case.sources[0], out)["minimum_slots"])

        largest = needs("min")
        assert needs(largest) == largest
        if largest > 1:
            with pytest.raises(SlotsError, match=rf"\b{largest}\b"):
                needs(largest - 1)

"""Increments: what changed between checkpoints, chains that are as good as all rows at once, weights of few bits, and what may be deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clicks import CLICKS_ROWS, Clicks, write_log
from command_line import SMALL, Command, done, flip, refused, run_here
from held import held, stop_after
from small_job import summary

from foreload.base.files import write_sealed
from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.at_work import at_work
from foreload.pipelines.schedule.format import MANIFEST as SCHEDULE
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints import row_files
from foreload.trainer.checkpoints.changed_rows import changed_rows, increment_sizes
from foreload.trainer.checkpoints.contents import DENSE, MANIFEST, Checkpoint, Contents
from foreload.trainer.checkpoints.draft import LOCK
from foreload.trainer.checkpoints.lineage import Increment
from foreload.trainer.checkpoints.row_files import CheckpointRows, newest_rows, write_file, write_rows
from foreload.trainer.checkpoints.saved_checkpoint import digest_of
from foreload.trainer.checkpoints.writer import save
from foreload.trainer.run.directory import Run
from foreload.trainer.saved.stopped_run import open_stopped

STOPS = (10, 30)


@dataclass(frozen=True)
class Case:
    """A run that was stopped twice and trained to its end, and checkpoints of each of these steps, by policy: folders of step-N.

    digests: of the run, by step.
    """

    clicks: Clicks
    run: Path
    saved: Path
    digests: dict[int, str]

    @property
    def steps(self) -> list[int]:
        return list(self.digests)

    def checkpoint(self, policy: str, number: int) -> Path:
        """The one after stop `number`."""
        return self.saved / policy / f"step-{self.steps[number]}"

    def restored(self, checkpoint: Path, run: Path, *schedule: Path) -> str:
        """Make a run of a checkpoint and train it to the end, on another schedule if one is given; returns its digest."""
        where = ["--store", "local:3", "--parity", "2+1", "--trainers", 1]
        status, _, err = Command("train", *schedule, "--from", checkpoint, "--run", run, *where, "--digest").end()
        assert status == 0, err
        return str(summary(run)["digest"])


KINDS: dict[str, tuple[object, ...]] = {
    "full": ("--policy", "full"),
    "consecutive": ("--policy", "consecutive"),
    "default": (),
    "planned": ("--policy", "planned", "--every", 1),
    "bits": ("--policy", "consecutive", "--bits", 2),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("increments")
    clicks = Clicks.prepare(folder, batch_size=20, slots=70)
    run, saved, digests = folder / "run", folder / "saved", {}
    with LocalStores(3, folder / "servers") as servers:
        store = ("--store", ",".join(servers.urls), "--trainers", 1)
        call: tuple[object, ...] = (*SMALL, "--row-optimizer", "rowwise_adagrad", *store)
        for stop in (*STOPS, None):
            words = ["train", clicks.schedule, "--run", run, *call]
            if stop is None:
                done(*words)
            else:
                stop_after(stop, words, folder)
            digests[Run.open(run).saved_status().step] = done("digest", run).strip()
            for policy, options in KINDS.items():
                done("checkpoint", "save", run, "--to", saved / policy, *options)
            call = ("--resume", *store)
        yield Case(clicks, run, saved, digests)


def rows_of(checkpoint: Path) -> dict[tuple[int, int], CheckpointRows]:
    """All rows of a checkpoint by lane and table."""
    opened = Checkpoint.open(checkpoint)
    lanes, tables = len(opened.contents.ordinals), len(opened.contents.tables)
    return {
        (lane, table): CheckpointRows.joined([rows for _, rows in newest_rows(opened, lane, table, 50)])
        for lane in range(lanes)
        for table in range(tables)
    }


def contents_of(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return told


def test_the_schedule_tells_which_rows_were_changed(case: Case) -> None:
    schedule = Schedule(case.clicks.schedule)
    for later in range(len(case.steps)):
        tags = {key: rows.tag for key, rows in rows_of(case.checkpoint("full", later)).items()}
        for since in [-1, *case.steps[: later + 1]]:
            changed = changed_rows(schedule, since, case.steps[later])
            for (lane, table), tag in tags.items():
                assert np.array_equal(changed[lane][table], tag > since + 1), (since, lane, table)
    full, increments = increment_sizes(schedule, case.steps, [1] * 3)
    here = {policy: [Checkpoint.open(case.checkpoint(policy, number)).rows_here for number in range(3)] for policy in KINDS}
    assert full == here["full"]
    assert [full[0], increments[0, 1], increments[1, 2]] == here["consecutive"]
    assert [full[0], increments[0, 1], increments[0, 2]] == here["default"]
    assert 0 < increments[0, 1] < full[1]
    # With so many to come, some of which are large, increments of the first would cost more.
    assert [contents_of(case.checkpoint("planned", number))["base"] is None for number in range(3)] == [True, True, False]


def test_a_schedule_that_grows_tells_it_too(case: Case, tmp_path: Path) -> None:
    growing = case.clicks.copy(tmp_path / "growing")
    whole = Schedule(case.clicks.schedule)
    first = next(segment for segment in whole.segments() if segment.kind == "train" and segment.first > STOPS[1] + 2)
    (growing / SCHEDULE).unlink()
    for path in growing.glob("segment-*.json"):
        if int(path.stem.split("-")[1]) >= first.index:
            path.unlink()
    grown = Schedule(growing, follow=True)
    # Up to the last step that there is: no further one is waited for.
    for since, until in ((3, first.first - 1), (-1, STOPS[0]), (5, 5)):
        for one, other in zip(changed_rows(grown, since, until), changed_rows(whole, since, until), strict=True):
            assert all(np.array_equal(*tables) for tables in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", ["consecutive", "default"])
def test_a_chain_is_the_run_to_the_bit(case: Case, tmp_path: Path, policy: str) -> None:
    for number, (step, digest) in enumerate(case.digests.items()):
        one = case.checkpoint(policy, number)
        bases = [None, f"step-{case.steps[0]}", f"step-{case.steps[1 if policy == 'consecutive' else 0]}"]
        assert (contents_of(one)["base"] or {}).get("name") == bases[number]
        assert contents_of(one)["inexact"] is None
        assert done("digest", one).strip() == digest
        # What is compacted is what saving all rows wrote.
        done("checkpoint", "compact", one, "--to", tmp_path)
        whole = case.checkpoint("full", number)
        assert sorted(path.name for path in (tmp_path / f"step-{step}").iterdir()) == sorted(
            path.name for path in whole.iterdir()
        )
        for path in whole.iterdir():
            assert (tmp_path / f"step-{step}" / path.name).read_bytes() == path.read_bytes(), path.name
    assert f"{Checkpoint.open(one).rows_here:,} of them here, changed since {bases[2]}" in done("checkpoint", "list", one.parent)


@pytest.mark.parametrize("policy", ["consecutive", pytest.param("default", marks=pytest.mark.full)])
def test_what_is_made_of_a_chain_trains_on_to_the_same_bits(case: Case, tmp_path: Path, policy: str) -> None:
    assert case.restored(case.checkpoint(policy, 1), tmp_path / "run") == case.digests[case.steps[2]]
    assert Run.open(tmp_path / "run").manifest.inexact is None
    assert summary(tmp_path / "run")["inexact"] is None


def test_the_schedule_may_have_other_slots_if_its_rows_are_the_same(case: Case, tmp_path: Path) -> None:
    def prepared(name: str, log: Path, **further: object) -> Path:
        options = {"batch_size": 20, "slots": 600, "segment_bytes": 9000} | further
        done("prepare", log, *case.clicks.options(tmp_path / name, **options))
        return tmp_path / name

    checkpoint, many = case.checkpoint("consecutive", 1), prepared("many", case.clicks.log)
    assert case.restored(checkpoint, tmp_path / "run", many) == case.digests[case.steps[2]]
    assert Run.open(tmp_path / "run").manifest.stages[0].path == str(many)
    call = ("--from", checkpoint, "--store", "local:3", "--run", tmp_path / "new")
    other = prepared("other", write_log(tmp_path / "other.csv", CLICKS_ROWS, {(7, "user"): "another"}))
    assert f"its rows are not those that schedule {other} trains up to this point, after step" in refused("train", other, *call)
    longer = prepared("longer", case.clicks.log, epochs=3)
    trained_on = Checkpoint.open(checkpoint).contents.run.stages[-1].path
    assert f"schedule {longer}: does not continue {trained_on}" in refused("train", longer, *call)
    with held(many, tmp_path / "growing", 10) as grows:
        line = refused("train", grows.path, "--follow", *call)
        assert f"other --slots than schedule {grows.path} has, which must be complete first" in line
    # Of one that does not say by what schedules are compared.
    older = shutil.copytree(case.checkpoint("full", 1), tmp_path / "older")
    told = contents_of(older)
    del told["sha256"], told["run"]["stages"][0]["program"]
    write_sealed(older / MANIFEST, told)
    assert f"schedule {many}: does not continue" in refused("train", many, "--from", older, *call[2:])
    assert not (tmp_path / "new").exists()


def test_an_increment_may_begin_in_the_schedule_before(case: Case, tmp_path: Path) -> None:
    more, run = tmp_path / "more", tmp_path / "run"
    further = ("--after", case.clicks.schedule, "--segment-bytes", 3000, "--out", more)
    done("prepare", write_log(tmp_path / "more.csv", 4000), *further)
    call = ["train", more, "--from", case.checkpoint("default", 2), "--run", run, "--store", "local:1", "--trainers", 1]
    step = stop_after(case.steps[2] + 3, call, tmp_path)
    assert case.steps[2] < step < Schedule(more).header.end_step - 1
    folder = shutil.copytree(case.saved / "full", tmp_path / "saved")
    for number in range(2):
        base = Checkpoint.open(folder / f"step-{case.steps[number]}")
        with open_stopped(str(run), None) as saved:
            made = save(saved, folder, lambda rows, total: None, increment=Increment(base, ()))
            assert digest_of(made) == saved.digest()
            assert made.rows_here == sum(
                int(np.count_nonzero(rows.tag > base.contents.step + 1)) for rows in rows_of(made.path).values()
            )
        shutil.rmtree(made.path)
        # As well from what a run keeps of its schedule.
        if more.exists():
            shutil.rmtree(more)


def test_what_is_wrong_in_a_chain_is_named(case: Case, tmp_path: Path) -> None:
    chain = shutil.copytree(case.saved / "consecutive", tmp_path / "chain")
    newest, middle, oldest = (chain / f"step-{step}" for step in reversed(case.steps))
    (name, *_) = sorted(path.name for path in oldest.glob("*.arrow"))
    flip(oldest / name, 500)
    for command in (("checkpoint", "verify"), ("digest",)):
        assert f"checkpoint {oldest}: {name} is damaged: its checksum does not match the manifest" in refused(*command, newest)
    line = refused("train", case.clicks.schedule, "--from", middle, "--run", tmp_path / "new", "--store", "local:1")
    assert f"checkpoint {oldest}: {name} is damaged" in line
    assert not (tmp_path / "new").exists()
    (middle / next(middle.glob("*.parquet")).name).unlink()
    assert f"damaged: No such file or directory, and 1 more: {oldest.name}/{name}" in refused("checkpoint", "verify", newest)
    for path in middle.iterdir():
        path.unlink()
    assert f"is an increment of {middle}, which does not exist" in refused("checkpoint", "verify", newest)
    shutil.rmtree(middle)
    shutil.copytree(case.checkpoint("full", 1), middle)
    assert f"is an increment of {middle}, which is now a different checkpoint" in refused("checkpoint", "verify", newest)
    assert "cannot be used: " in run_here("checkpoint", "list", chain)[1]


def test_a_row_that_is_in_no_file_is_missed(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.saved / "consecutive", tmp_path / "chain")
    newest = tmp_path / "chain" / f"step-{case.steps[2]}"
    told = contents_of(newest)
    del told["sha256"]
    assert any(file["name"].endswith(".parquet") for file in told["rows"])
    told["ordinals"][1][2] += 1
    write_sealed(newest / MANIFEST, told)
    assert "its files must have all rows; 1 of lane 1, table 2 are missing" in refused("digest", newest)


def test_none_is_deleted_that_others_need(case: Case, tmp_path: Path) -> None:
    chain = shutil.copytree(case.saved / "consecutive", tmp_path / "chain")
    newest, middle, oldest = (chain / f"step-{step}" for step in reversed(case.steps))
    with at_work(chain / LOCK):
        assert "another checkpoint is being saved in" in refused("checkpoint", "delete", newest)
    line = refused("checkpoint", "delete", oldest)
    assert f"must not be needed by other checkpoints; {middle.name}, {newest.name} builds on it" in line
    assert done("checkpoint", "delete", middle, "--with-increments").split() == ["deleted", str(newest), "deleted", str(middle)]
    assert done("digest", oldest).strip() == case.digests[case.steps[0]]
    # Of increments of the first, the older go.
    kept = shutil.copytree(case.saved / "default", tmp_path / "kept")
    shutil.rmtree(kept / newest.name)
    done("checkpoint", "save", case.run, "--to", kept, "--keep", 1, "--json", tmp_path / "saved.json")
    assert json.loads((tmp_path / "saved.json").read_text())["deleted"] == [middle.name]
    assert {path.name for path in kept.glob("step-*")} == {oldest.name, newest.name}
    assert done("digest", kept / newest.name).strip() == case.digests[case.steps[2]]


def test_a_base_is_of_the_same_run_and_as_exact(case: Case, tmp_path: Path) -> None:
    two = shutil.copytree(case.saved / "bits", tmp_path / "bits")
    steps = [f"step-{step}" for step in case.steps]
    shutil.rmtree(two / steps[2])
    save = ("checkpoint", "save", case.run, "--to", two)
    assert "has weights of 2 bits, fewer than 32; give another one" in refused(*save, "--base", steps[1])
    assert "has no checkpoint.json" in refused(*save, "--base", "step-7")
    assert "--bits: must be one of auto, 32, 8, 4, 3, 2; got '5'" in refused(*save, "--bits", 5)
    assert "--keep: must be a number, at least 1; got '0'" in refused(*save, "--keep", 0)
    assert "--every: goes with --policy planned" in refused(*save, "--every", 5)
    assert "--failures-a-day: must be a number, at least 0; got 'nan'" in refused(*save, "--failures-a-day", "nan")
    done(*save)
    assert contents_of(two / steps[2])["base"] is None
    shutil.rmtree(two / steps[2])
    # A short job: it is restored once at most, and four bits are enough.
    assert "has weights of 2 bits, fewer than 4; give another one" in refused(*save, "--bits", "auto", "--base", steps[0])
    done(*save, "--bits", 2, "--base", steps[0])
    assert contents_of(two / steps[2])["base"]["name"] == steps[0]
    assert Checkpoint.open(two / steps[2]).bits == 2
    other = contents_of(two / steps[0])
    del other["sha256"]
    other["run"]["run_id"] = "another"
    write_sealed(two / steps[0] / MANIFEST, other)
    shutil.rmtree(two / steps[2])
    assert "belongs to run another, not to this one" in refused(*save, "--bits", 2, "--base", steps[0])


def test_a_run_of_rounded_weights_says_so_wherever_it_goes(case: Case, tmp_path: Path) -> None:
    rounded, run = case.checkpoint("bits", 1), tmp_path / "run"
    step = case.steps[1]
    assert contents_of(rounded)["inexact"] == {"since": step, "bits": 2, "restores": 0}
    assert Checkpoint.open(rounded).own_bytes < Checkpoint.open(case.checkpoint("consecutive", 1)).own_bytes
    exact, read = rows_of(case.checkpoint("full", 1)), rows_of(rounded)
    for key, rows in exact.items():
        assert np.array_equal(rows.id, read[key].id)
        assert np.array_equal(rows.tag, read[key].tag)
        assert np.array_equal(rows.state, read[key].state)
        spread = np.ptp(rows.weights, axis=1, keepdims=True)
        assert (np.abs(rows.weights - read[key].weights) <= 0.5 * spread + 1e-6).all()
    digest = done("digest", rounded)
    assert digest.splitlines()[0] != case.digests[step]
    assert f"inexact since step {step}: 2 bits a weight, restored 0 times" in digest
    done("checkpoint", "compact", rounded, "--to", tmp_path)
    assert done("digest", tmp_path / rounded.name) == digest
    assert case.restored(rounded, run) != case.digests[case.steps[2]]
    now = {"since": step, "bits": 2, "restores": 1}
    assert summary(run)["inexact"] == now
    assert f"inexact since step {step}: 2 bits a weight, restored 1 times" in done("digest", run)
    done("checkpoint", "save", run)
    (saved,) = (run / "checkpoints").glob("step-*")
    assert contents_of(saved)["inexact"] == now
    assert f"; inexact since step {step}" in done("checkpoint", "list", run)


def test_tables_of_many_files_are_as_good(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "FILE_BYTES", 1500)  # some 40 rows
    chain = shutil.copytree(case.saved / "consecutive", tmp_path / "chain")
    newest = chain / f"step-{case.steps[2]}"
    shutil.rmtree(newest)
    done("checkpoint", "save", case.run, "--to", chain, "--policy", "consecutive")
    assert (
        max(file["rows"] for file in contents_of(newest)["rows"]) == 1500 // Checkpoint.open(newest).contents.tables[0].row_bytes
    )
    assert done("digest", newest).strip() == case.digests[case.steps[2]]
    done("checkpoint", "save", case.run, "--to", tmp_path / "full", "--policy", "full")
    done("checkpoint", "compact", newest, "--to", tmp_path / "compact")
    for path in (tmp_path / "full" / newest.name).iterdir():
        assert (tmp_path / "compact" / newest.name / path.name).read_bytes() == path.read_bytes(), path.name


# -- Files of rows --------------------------------------------------------------------------------------------------------------------


def test_files_with_gaps_written_in_any_order_have_all_rows_together(case: Case, tmp_path: Path) -> None:
    whole = Checkpoint.open(case.checkpoint("full", 2))
    contents = whole.contents
    dense, files = write_file(tmp_path, DENSE, whole.read(contents.dense)), []
    for (lane, table), rows in reversed(rows_of(whole.path).items()):
        for odd in (1, 0):
            ordinals = np.arange(odd, len(rows.id), 2)
            files.append(write_rows(tmp_path, lane, contents.tables[table], ordinals, rows.part(ordinals)))
    encoded, ordinals = (contents.features, contents.encoding), np.array(contents.ordinals)
    made = Contents.made(contents.run, *encoded, contents.step, contents.totals, contents.tables, ordinals, files, dense)
    made.write(tmp_path)
    assert done("digest", tmp_path).strip() == case.digests[case.steps[2]]
    done("checkpoint", "compact", tmp_path, "--to", tmp_path / "compact")
    assert (tmp_path / "compact" / whole.path.name / MANIFEST).read_bytes() == (whole.path / MANIFEST).read_bytes()

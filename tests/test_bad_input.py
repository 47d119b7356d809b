"""Bad data, bad options, damaged schedules, full disks, Ctrl-C: one clear line, status 2, nothing left running, nothing taken for whole."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clicks import COLUMNS, Clicks, click_columns, write_features, write_log
from command_line import SMALL, Command, done, error_of, fill, flip, refused, refused_apart, run_here
from held import Hold
from injection import CallFault

from foreload.cache.client.local import LocalStores
from foreload.pipelines.beam import pipeline as beam_run
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import FAILED, WORK
from foreload.pipelines.schedule.reader import Schedule


def digest_of(run: Path) -> str:
    """That in the run's summary.json."""
    return str(json.loads((run / "summary.json").read_text())["digest"])


def checksum_of(schedule: Path) -> str:
    """The identity of a whole schedule; every file of it is read."""
    whole = Schedule(schedule)
    for event in whole.events():
        for lane in range(whole.header.lanes):
            whole.lane(event, lane)
            whole.entry(event.segment, lane)
    list(whole.rows())
    return whole.checksum


@pytest.fixture(scope="module")
def undisturbed(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over the schedule that nothing happened to."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", "--digest", *SMALL)
    return run


# -- What is prepared -----------------------------------------------------------------------------------------------------------


def test_a_truncated_parquet_file_is_named_and_what_stands_beside_it_not_taken_for_the_whole(
    clicks: Clicks, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "out"
    pq.write_table(pa.table(click_columns(500)), whole)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    # The file beside it is good: what it would give must not be taken for the whole.
    line = refused_apart("prepare", whole, tmp_path / "cut.parquet", *clicks.options(out, format="parquet"))
    assert "cut.parquet: not a readable Parquet file" in line
    assert "truncated" in line
    with pytest.raises(ScheduleError):
        Schedule(out)


def test_a_parquet_file_with_a_damaged_page_is_named(clicks: Clicks, tmp_path: Path) -> None:
    path, out = tmp_path / "pages.parquet", tmp_path / "out"
    pq.write_table(pa.table(click_columns(500)), path, write_page_checksum=True, compression="snappy", use_dictionary=False)
    data = bytearray(path.read_bytes())
    # Within the first page: the footer, which is read first, stays good.
    data[100:2000] = bytes(1900)
    path.write_bytes(bytes(data))
    assert "pages.parquet: " in refused("prepare", path, *clicks.options(out, format="parquet"))
    assert "preparing it failed: " in refused("train", out, "--run", tmp_path / "run", "--store", "local:1")


def test_a_column_that_is_missing_is_named(clicks: Clicks, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", 50, columns=tuple(name for name in COLUMNS if name != "user"))
    line = refused("prepare", log, *clicks.options(tmp_path / "out"))
    assert f"{log}: " in line
    assert "'user'" in line
    assert not (tmp_path / "out").exists()


def test_a_dense_value_that_is_no_number_is_located_and_may_be_left_out(clicks: Clicks, tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "log.csv", 300, {(6, "price"): "cheap", (250, "price"): "nan"}), tmp_path / "out"
    line = refused("prepare", log, *clicks.options(out))
    # The first record stands in line 2.
    assert f"{log}:8: price: a dense value must be a finite number within float32, not 'cheap'" in line
    with pytest.raises(ScheduleError, match=r"preparing it failed: --max-rejects: more than 0 records are malformed"):
        Schedule(out)
    assert "--max-rejects: more than 1 records" in refused("prepare", log, *clicks.options(out, max_rejects=1))
    assert "2 malformed left out" in done("prepare", log, *clicks.options(out, max_rejects=2))
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"], r["field"], r["value"]) for r in rejects] == [
        (str(log), 8, "price", "cheap"),
        (str(log), 252, "price", "nan"),
    ]
    header = Schedule(out).header
    assert header.training_samples + header.evaluation_samples == 298


def test_a_quote_that_never_closes_is_located_where_it_opens(clicks: Clicks, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", 2000, {(999, "site"): '"s7'})
    features = tmp_path / "features.toml"
    features.write_text(clicks.features.read_text() + "[text]\nnewlines_in_values = 10000\n")
    line = refused("prepare", log, *clicks.options(tmp_path / "out", features=features))
    assert f"{log}:1001: the quote that opens here is never closed" in line


def test_an_id_outside_its_table_is_located(clicks: Clicks, tmp_path: Path) -> None:
    # A call tells three at most where they stand.
    for bad in (("300",), ("-1", "3.5", "x")):
        logs = [write_log(tmp_path / f"{len(bad)}-{number}.csv", 20, {(3, "ad"): value}) for number, value in enumerate(bad)]
        line = refused("prepare", *logs, *clicks.options(tmp_path / "out"))
        for log, value in zip(logs, bad, strict=True):
            assert f"{log}:5: ad: an id must be a whole number in 0 .. 299, not {value!r}" in line


def test_too_few_slots_for_a_step_are_refused_with_the_least_that_do(clicks: Clicks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refused_apart("prepare", clicks.log, *clicks.options(out, slots=3))
    assert line.startswith("--slots: must hold every row of a step; got 3")
    needed = int(line.partition("give --slots ")[2].split()[0])
    least = Schedule(clicks.schedule).manifest["minimum_slots"]
    assert needed == max(least)
    assert "preparing it failed: --slots" in refused("train", out, "--run", tmp_path / "run", "--store", "local:1")
    done("prepare", clicks.log, *clicks.options(out, slots=needed))
    assert checksum_of(out)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("none/*.csv", {}, "no file matches; check the path"),
        ("folder.csv", {}, "folder.csv"),
        (None, {"format": "parquet"}, "log.csv: is text, not a readable Parquet file; check --format"),
        (None, {"lanes": 65}, "--lanes: must be at most 64; got 65"),
        (None, {"batch_size": 0}, "--batch-size: must be at least 1; got 0"),
        (None, {"batch_size": "ten"}, "--batch-size: must be a whole number; got 'ten'"),
        (None, {"frobnicate": 3}, "--frobnicate: is not an option"),
        (None, {"features": "none.toml"}, "none.toml"),
        (None, {"eval_source": "x.csv"}, "--eval-fraction: cannot be given with --eval-source"),
    ],
)
def test_what_prepare_cannot_do_is_refused(
    clicks: Clicks, tmp_path: Path, source: str | None, options: dict[str, object], words: str
) -> None:
    (tmp_path / "folder.csv").mkdir()
    log = clicks.log if source is None else tmp_path / source
    assert words in refused("prepare", log, *clicks.options(tmp_path / "out", **options))
    assert not (tmp_path / "out" / "schedule.json").exists()


def test_a_file_that_may_not_be_read_is_named(clicks: Clicks, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    log = write_log(tmp_path / "log.csv", 20)
    log.chmod(0)
    assert f"{log}: cannot be opened (Permission denied)" in refused("prepare", log, *clicks.options(tmp_path / "out"))


def test_outputs_that_are_there_already_are_not_harmed(clicks: Clicks, tmp_path: Path) -> None:
    before = checksum_of(clicks.schedule)
    assert "--overwrite" in refused("prepare", clicks.log, *clicks.options(clicks.schedule))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert "other files in it" in refused("prepare", clicks.log, *clicks.options(other), "--overwrite")
    assert (other / "thesis.txt").read_text() == "years of work"
    assert "other files" in refused("train", clicks.schedule, "--run", other, "--store", "local:1", "--overwrite", *SMALL)
    assert (other / "thesis.txt").read_text() == "years of work"
    # A damaged source is noticed before what is there goes.
    copy = clicks.copy(tmp_path / "copy")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    refused("prepare", tmp_path / "cut.parquet", *clicks.options(copy, format="parquet"), "--overwrite")
    assert checksum_of(copy) == checksum_of(clicks.schedule) == before


# -- Disks ----------------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(small_disk: Path) -> None:
    options = ("--format", "synthetic", "--rows", 300_000, "--batch-size", 100, "--out", small_disk / "out")
    line = refused("prepare", *options)
    assert re.search(r"about [\d.,]+ MB are needed, 1\d\.\d MB are free", line), line
    assert [path.name for path in (small_disk / "out").iterdir()] == ["failed.json"]


STAGES = {"pieces": "foreload.pipelines.beam.read:write_piece", "compile": "foreload.pipelines.compiler.segments:write_segment"}
"""Of `prepare`, the function that it is about to call the first time: samples that were read, and a segment that was compiled, are written."""


@pytest.mark.parametrize(("stage", "leave_bytes"), [("pieces", 0), ("compile", 100_000)])
def test_a_disk_that_gets_full_while_preparing_is_told_and_leaves_no_schedule(
    clicks: Clicks, tmp_path: Path, small_disk: Path, stage: str, leave_bytes: int
) -> None:
    out = small_disk / "out"
    log = write_log(tmp_path / "log.csv", 30_000)
    command = Command("prepare", log, *clicks.options(out), faults=[CallFault(STAGES[stage])])
    command.stand()
    fill(small_disk, leave_bytes)
    command.process.send_signal(signal.SIGCONT)
    status, _, err = command.end()
    assert "the disk is full" in error_of(status, err)
    (small_disk / "ballast").unlink()
    with pytest.raises(ScheduleError):
        Schedule(out)
    if stage == "compile":
        done("prepare", clicks.log, *clicks.options(out))
        assert checksum_of(out) == checksum_of(clicks.schedule)


def test_where_not_even_the_reason_can_be_written_the_work_folder_shows_whose_the_files_are(
    clicks: Clicks, small_disk: Path, tmp_path: Path
) -> None:
    out = small_disk / "out"
    log = write_log(tmp_path / "log.csv", 30_000)
    faults = [CallFault(STAGES["compile"]), CallFault("foreload.pipelines.prepare:write_json")]
    command = Command("prepare", log, *clicks.options(out), faults=faults)
    for _ in faults:
        command.stand()
        fill(small_disk, 0)
        command.process.send_signal(signal.SIGCONT)
    status, _, err = command.end()
    assert "the disk is full" in error_of(status, err)
    assert not (out / FAILED).exists()
    # On a cluster, whose workers write elsewhere, a list of malformed records may be all that is there otherwise.
    assert (out / WORK).is_dir()
    (small_disk / "ballast").unlink()
    done("prepare", clicks.log, *clicks.options(out))
    assert checksum_of(out) == checksum_of(clicks.schedule)
    assert not (out / WORK).exists()


def test_a_disk_that_gets_full_while_training_is_waited_for(clicks: Clicks, tmp_path: Path, small_disk: Path, hold: Hold) -> None:
    run = small_disk / "run"
    # The rows are elsewhere: local stores without room to save would be left running, for they hold the only copy.
    with LocalStores(1, tmp_path / "stores") as stores:
        command = hold(["train", clicks.schedule, "--run", run, "--store", stores.urls[0], *SMALL])
        fill(small_disk, 0)
        command.schedule.release()
        # It goes on to its end without metrics, and then waits for room for the dense part, which is nowhere else.
        command.until(lambda: "foreload retries until there is some" in command.said)
        (small_disk / "ballast").unlink()
        status, _, err = command.end()
        assert status == 0, err
        assert re.search(r"dense-\d+\.safetensors: cannot be written, the disk is full", err)
        done("digest", run)


@pytest.mark.full
def test_a_disk_without_room_for_the_rows_of_a_local_store(clicks: Clicks, small_disk: Path, hold: Hold) -> None:
    run = small_disk / "run"
    wide = ("--dim", 256, "--model-options", "bottom=8-256", "top=8-1")
    command = hold(["train", clicks.schedule, "--run", run, "--store", "local:1", *wide], 100)
    try:
        # Room for the dense part, and not for some hundred rows of 256 columns.
        fill(small_disk, 200_000)
        command.interrupt(lambda: True)
        _, err = command.communicate()
        command.schedule.release()
        assert command.process.returncode == 2, err
        assert "store local: shard 0 " in err
        assert "could not save its rows" in err
        assert "Traceback" not in err
        # The server still runs, with all rows: they are read from it, and trained on.
        assert len(done("digest", run).strip()) == 64
        (small_disk / "ballast").unlink()
        done("train", clicks.schedule, "--run", run, "--resume")
        assert LocalStores.find(run / "stores") is None
        assert (run / "stores" / "shard-0.rdb").exists()
    finally:
        command.clear()


# -- Ctrl-C ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "number", "expected"),
    [
        ("pieces", signal.SIGINT, 130),
        pytest.param("compile", signal.SIGINT, 130, marks=pytest.mark.full),
        ("compile", signal.SIGTERM, 143),
        ("compile", signal.SIGKILL, -9),
    ],
)
def test_a_prepare_that_is_stopped_leaves_no_schedule_and_can_be_called_again(
    clicks: Clicks, tmp_path: Path, stage: str, number: int, expected: int
) -> None:
    out = tmp_path / "out"
    log = write_log(tmp_path / "log.csv", 60_000)
    command = Command("prepare", log, *clicks.options(out), faults=[CallFault(STAGES[stage])])
    command.stand()
    os.killpg(command.process.pid, number)
    command.process.send_signal(signal.SIGCONT)
    if number == signal.SIGKILL:
        command.communicate()
        assert command.remains.processes() == []
        command.remains.remove()
    else:
        status, _, err = command.end()
        assert (status, err.splitlines()[-1:]) == (expected, ["foreload: stopped"])
        assert "Traceback" not in err
        assert not (out / ".work").exists()
    with pytest.raises(ScheduleError, match=r"unfinished|it was stopped before it was complete"):
        Schedule(out)
    if number != signal.SIGTERM:
        done("prepare", clicks.log, *clicks.options(out))
        assert checksum_of(out) == checksum_of(clicks.schedule)


def test_a_prepare_that_is_stopped_before_its_pipeline_runs_leaves_nothing(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(beam_run, "add_ordering", stopped)
    # Beam has made its temporary folder by then; nothing of it may be left.
    status, _, err = run_here("prepare", clicks.log, *clicks.options(tmp_path / "out"))
    assert (status, err.splitlines()[-1:]) == (130, ["foreload: stopped"])
    assert not (tmp_path / "out" / ".work").exists()


def test_a_training_that_is_stopped_goes_on_with_its_own_settings_only_and_to_the_same_model(
    clicks: Clicks, undisturbed: Path, tmp_path: Path, hold: Hold
) -> None:
    run = tmp_path / "run"
    start = ("train", clicks.schedule, "--run", run)
    command = hold([*start, "--store", "local:2", "--trainers", 2, *SMALL])
    command.interrupt(command.waits)
    status, _, err = command.stopped()
    assert status == 130, err
    assert "--resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    rest = json.loads((run / "status.json").read_bytes())
    assert rest["state"] == "stopped"

    # What does not fit leaves the run as it is.
    other = clicks.copy(tmp_path / "other")
    done("prepare", clicks.log, *clicks.options(other, batch_size=12), "--overwrite")
    for further, words in [
        (("--threads", 2), "--threads: must be what the run was started with, 1; got 2"),
        (("--seed", 7), "--seed: must be what the run was started with, 0; got 7"),
        (("--store", "local:3"), "--store: must be what the run was started with, local:2; got local:3"),
    ]:
        assert words in refused(*start, "--resume", *further)
    line = refused(*start, "--resume", MKL_CBWR="COMPATIBLE")
    assert "numerics fingerprint: mkl_cbwr is COMPATIBLE here" in line
    assert "accept these numerics with --resume --accept-numerics" in line
    assert "does not continue" in refused("train", other, "--run", run, "--resume")
    assert "holds a run already; give --resume to go on with it, --overwrite to delete it" in refused(
        *start, "--store", "local:2"
    )
    # Not even with --overwrite, where the new model cannot be built.
    assert "dlrm" in refused(*start, "--store", "local:2", "--overwrite", "--model-options", "bottom=7")
    # The trainers of one call were started, in a term of their own, before they saw that they may not join.
    assert json.loads((run / "status.json").read_bytes()) == rest | {"term": rest["term"] + 1}

    done(*start, "--resume", "--digest", "--trainers", 1)
    assert digest_of(run) == digest_of(undisturbed)
    assert "is at the end of" in refused(*start, "--resume")


# -- Schedules and models --------------------------------------------------------------------------------------------------------


def test_dlrm_over_tables_of_different_dimensions_is_refused(clicks: Clicks, tmp_path: Path) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    done("prepare", clicks.log, *clicks.options(out, features=write_features(tmp_path / "features.toml", ad_dimension=8)))
    line = refused("train", out, "--run", run, "--store", "local:1", "--dim", 4)
    assert "ad 8, user 4, site 4" in line
    assert not run.exists()


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (("--model-options", "bottom=8-5"), "dlrm: the last size of bottom must be the dimension of the embeddings, 4; got 5"),
        (("--trainers", 3), "--trainers: must be at most the schedule's lanes, 2; got 3"),
        (("--frobnicate", 3), "unrecognized arguments: --frobnicate 3"),
        (("--lr", "fast"), "--lr: must be a finite number; got 'fast'"),
        (("--model", "transformer"), "model: must be one of"),
        (("--memory", "1KB"), "--memory: 40 slots of this model take"),
    ],
)
def test_a_job_that_does_not_fit_the_schedule_is_refused(
    clicks: Clicks, tmp_path: Path, further: tuple[object, ...], words: str
) -> None:
    line = refused("train", clicks.schedule, "--run", tmp_path / "run", "--store", "local:1", "--dim", 4, *further)
    assert words in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind",
    [
        *("header.json", "schedule.json", "segment-*.json", "samples-*.arrow"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("moves-*.arrow", "evaluation-*.arrow")),
    ],
)
def test_a_changed_byte_in_a_schedule_stops_training(clicks: Clicks, tmp_path: Path, kind: str) -> None:
    schedule, run = clicks.copy(tmp_path / "schedule"), tmp_path / "run"
    path = sorted(schedule.glob(kind))[0]
    flip(path, path.stat().st_size // 2)
    # What trainers find is told by the process that started them.
    refuse = refused_apart if kind.endswith(".arrow") else refused
    line = refuse("train", schedule, "--run", run, "--store", "local:1", *SMALL)
    assert str(path) in line
    assert "damaged" in line
    refused("evaluate", run)


def test_a_changed_byte_in_the_row_table_does_not_stop_training_and_is_told_by_what_needs_it(
    clicks: Clicks, undisturbed: Path, tmp_path: Path
) -> None:
    schedule, run = clicks.copy(tmp_path / "schedule"), tmp_path / "run"
    rows = (schedule / "rows.arrow").read_bytes()
    flip(schedule / "rows.arrow", len(rows) // 2)
    # What is trained is there still: once the row table is whole again, it can be read.
    line = refused("train", schedule, "--run", run, "--store", "local:1", "--digest", *SMALL)
    assert f"row table {schedule / 'rows.arrow'}: its checksum does not match the manifest" in line
    assert "rows.arrow" in refused("digest", run)
    (schedule / "rows.arrow").write_bytes(rows)
    assert done("digest", run).strip() == digest_of(undisturbed)
    later = tmp_path / "later"
    flip(schedule / "rows.arrow", len(rows) // 2)
    assert "rows.arrow" in refused("prepare", clicks.log, *clicks.options(later), "--after", schedule)
    with pytest.raises(ScheduleError):
        Schedule(later)


def test_a_changed_byte_in_any_file_of_a_schedule_is_noticed(clicks: Clicks, tmp_path: Path) -> None:
    schedule = clicks.copy(tmp_path / "schedule")
    checked: set[str] = set()
    for path in sorted(schedule.iterdir()):
        kind = path.name.split("-")[0]
        # That file says how the schedule was prepared, and is no part of it.
        if path.name == "provenance.json" or path.is_dir():
            continue
        # A dozen bytes, spread over it, of the first file of each kind; of the others one each.
        size = path.stat().st_size
        places = range(0, size, max(1, size // 12)) if kind not in checked else [size // 3]
        checked.add(kind)
        data = path.read_bytes()
        for place in places:
            flip(path, place)
            with pytest.raises(ScheduleError) as caught:
                checksum_of(schedule)
            assert "\n" not in str(caught.value)
            path.write_bytes(data)
        for other in (data[:-1], b""):
            path.write_bytes(other)
            with pytest.raises(ScheduleError):
                checksum_of(schedule)
        path.unlink()
        with pytest.raises(ScheduleError):
            checksum_of(schedule)
        path.write_bytes(data)
    assert checked == {"entry", "evaluation", "header.json", "moves", "rows.arrow", "samples", "schedule.json", "segment"}
    assert checksum_of(schedule) == checksum_of(clicks.schedule)


def test_a_schedule_that_is_not_whole_is_refused(clicks: Clicks, tmp_path: Path) -> None:
    unfinished = clicks.copy(tmp_path / "unfinished")
    (unfinished / "schedule.json").unlink()

    def train(schedule: Path) -> str:
        return refused("train", schedule, "--run", tmp_path / "run", "--store", "local:1")

    assert "is unfinished (no schedule.json)" in train(unfinished)
    (unfinished / "failed.json").write_text('{"error": "the sky fell"}\n')
    assert "preparing it failed: the sky fell" in train(unfinished)
    assert "is not a folder" in train(tmp_path / "none")
    line = refused("prepare", clicks.log, *clicks.options(tmp_path / "later"), "--after", unfinished)
    assert "preparing it failed: the sky fell" in line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "later").exists()


def test_a_training_that_follows_a_schedule_that_fails_stops_with_its_reason(clicks: Clicks, tmp_path: Path) -> None:
    failed = clicks.copy(tmp_path / "failed")
    (failed / "schedule.json").unlink()
    segments = sorted(failed.glob("segment-*.json"))
    segments[-1].unlink()
    (failed / "failed.json").write_text('{"error": "the sky fell"}\n')
    run = tmp_path / "run"
    line = refused_apart("train", failed, "--run", run, "--store", "local:1", "--follow", *SMALL)
    assert "preparing it failed: the sky fell" in line
    assert "training stopped after step " in line
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"

"""The folder of a run, and what is reported into it."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import warnings
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_job import no_rows, step_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foreload.base.progress import Display, ProgressLine
from foreload.cache.parity.placement import Placement
from foreload.trainer.commands.train import call_values
from foreload.trainer.compute.numerics import mixed_text
from foreload.trainer.compute.reports import FIGURES, EvaluationReport, StepReport, Totals
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import METRICS, SUMMARY, Run, check_free, locked
from foreload.trainer.run.manifest import Status, new_manifest, rates_text
from foreload.trainer.run.report import RunReport
from foreload.trainer.run.resume import resumed


def job(**changed: Any) -> TrainJob:
    return TrainJob.of({"schedule": "s", "run": "r", "store": "local:2"} | changed)


def schedule(name: str = "first", parent: str | None = None, first: int = 0, lanes: int = 4, complete: bool = True) -> Any:
    """What a run asks of a schedule, of which there is no more than that: ten steps from `first` on."""
    header = SimpleNamespace(lanes=lanes, first_step=first, end_step=first + 10, parent=parent, program=f"program of {name}")
    return SimpleNamespace(
        path=Path(name), complete=complete, checksum=f"sum of {name}", identity=f"header of {name}", header=header
    )


def new_run(path: Path, **changed: Any) -> Run:
    """A run's folder as `train` makes it, before the first step; changed: settings of its job."""
    return Run.create(path, new_manifest(job(**changed), schedule(), (), 2), Placement.spread(2), overwrite=False)


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", lr=0.5, model_options={"top": "8-1"})
    again = Run.open(tmp_path / "run")
    assert again.manifest == run.manifest
    assert again.manifest.training_job.lr == 0.5
    assert again.placement.shard_count == 2
    assert again.status is None
    stopped = Status("stopped", 7, {str(lane): 3 + lane for lane in range(run.manifest.lanes)}, {"steps": 8})
    run.write_status(stopped)
    assert again.saved_status() == stopped


def test_passwords_are_not_kept(tmp_path: Path) -> None:
    secret = job(store="redis://:secret@localhost:1,redis://localhost:2")
    manifest = new_manifest(secret, schedule(), ("redis://localhost:1", "redis://localhost:2"), None)
    Run.create(tmp_path / "run", manifest, Placement.spread(2), overwrite=False)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and "secret" in path.read_text()]


def test_a_folder_in_use_is_never_taken_silently(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    # It has not trained a step yet.
    check_free(run.path, overwrite=False)
    run.write_status(Status("training", -1))
    with pytest.raises(RunError, match="holds a run already"):
        check_free(tmp_path / "run", overwrite=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(RunError, match=r"holds other files, such as thesis\.txt"):
            check_free(tmp_path / "other", overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file"):
        check_free(tmp_path / "file", overwrite=True)


@pytest.mark.parametrize(
    "left",
    [
        (), ("lock",), ("lock", ".placement.json.0123456789abcdef.tmp"), ("lock", "placement.json"),
        ("lock", "placement.json", ".manifest.json.0123456789abcdef.tmp"), ("lock", "placement.json", "manifest.json"),
    ],
)  # fmt: skip
def test_whatever_a_killed_call_had_made_of_a_run_another_takes_its_place(tmp_path: Path, left: tuple[str, ...]) -> None:
    whole = new_run(tmp_path / "whole")
    path = tmp_path / "run"
    path.mkdir()
    # Files of a whole run as they are; what was being written, cut off.
    for name in left:
        path.joinpath(name).write_bytes((whole.path / name).read_bytes() if (whole.path / name).exists() else b"{")
    with locked(path) as lock, pytest.raises(RunError, match="is being trained or read right now"), locked(path):
        pass
    assert lock is not None
    run = new_run(path)
    assert sorted(item.name for item in path.iterdir()) == ["lock", "manifest.json", "placement.json"]
    # Under the id of the run that never began: it may have claimed its namespace.
    assert (run.manifest.run_id == whole.manifest.run_id) == ("manifest.json" in left)


@pytest.mark.parametrize("deleted", range(4))
def test_a_run_that_was_being_deleted_makes_room_for_another(tmp_path: Path, deleted: int) -> None:
    with locked(tmp_path / "run"):
        run = new_run(tmp_path / "run")
    run.write_status(Status("ended", 9))
    (run.path / "notes.txt").write_text("keep")
    for name in ("status.json", "manifest.json", "placement.json")[:deleted]:
        (run.path / name).unlink()
    Run.create(run.path, new_manifest(job(), schedule(), (), 2), Placement.spread(2), overwrite=not deleted)
    assert run.status is None
    assert (run.path / "notes.txt").read_text() == "keep"


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.write_status(Status("ended", 9))
    (run.path / "notes.txt").write_text("keep")
    before = run.manifest.run_id
    Run.create(run.path, new_manifest(job(), schedule(), (), 2), Placement.spread(2), overwrite=True)
    assert run.status is None
    assert run.manifest.run_id != before
    assert (run.path / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 1, "stages": []}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    run = new_run(tmp_path / "run")
    (run.path / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=r"manifest\.json|version"):
        _ = run.manifest


def test_a_stopped_run_goes_on_where_it_stopped_with_other_trainers(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.write_status(Status("stopped", 6))
    manifest, step = resumed(run, job(trainers=3, resume=True, peer_timeout=5), schedule())
    assert step == 6
    assert len(manifest.stages) == 1


def test_a_call_s_own_address_is_not_the_run_s_even_where_one_of_an_earlier_version_has_it(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", address="127.0.0.7")
    assert "address" not in run.manifest.job
    run.write_manifest(replace(run.manifest, job=run.manifest.job | {"address": "127.0.0.1"}))
    assert run.manifest.training_job.address == "127.0.0.1"
    values, _ = call_values({"run": run.path, "resume": True}, None)
    assert TrainJob.of(values).address is None


@pytest.mark.parametrize("settings", [{"threads": 2}, {"cpu_capability": "avx512"}])
def test_a_run_goes_on_with_other_settings_of_its_numerics_where_that_is_accepted(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    run = new_run(tmp_path / "run")
    run.write_status(Status("stopped", 5))
    with pytest.raises(RunError, match=r"must be what the run was started with, .*; leave it out, or add --accept-numerics"):
        resumed(run, job(resume=True, **settings), schedule())
    manifest, step = resumed(run, job(resume=True, accept_numerics=True, **settings), schedule())
    assert step == 5
    # What later calls, and evaluations, go by.
    assert job(resume=True, **settings) == TrainJob.of(manifest.job | {"resume": True})


def test_a_run_says_since_which_steps_its_numerics_are_mixed(tmp_path: Path) -> None:
    first, second, third = ({"mkl_cbwr": branch} for branch in ("AVX2,STRICT", "AUTO,STRICT", "COMPATIBLE"))
    manifest = new_manifest(job(), schedule(first=2), (), 2).under(first, 2).under(first, 7)
    assert (manifest.fingerprint, manifest.mixed_numerics) == (first, ())
    mixed = manifest.under(second, 7)
    assert mixed.fingerprint == second
    assert mixed.mixed_numerics == ({"step": 2, "fingerprint": first}, {"step": 7, "fingerprint": second})
    assert mixed.under(second, 9) == mixed
    assert mixed.under(third, 9).mixed_numerics == (*mixed.mixed_numerics, {"step": 9, "fingerprint": third})
    # Not a step was trained under the second one.
    assert mixed.under(third, 7).mixed_numerics == ({"step": 2, "fingerprint": first}, {"step": 7, "fingerprint": third})
    assert mixed.under(first, 7) == manifest
    run = Run.create(tmp_path / "run", mixed, Placement.spread(2), overwrite=False)
    assert run.manifest == mixed
    told = mixed_text(mixed.under(first, 9).mixed_numerics)
    assert told == "of mixed numerics since step 7 (mkl_cbwr), and again 9 (mkl_cbwr)"


def test_a_run_that_goes_on_with_other_learning_rates_says_since_which_step(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.write_status(Status("stopped", 5))
    manifest, step = resumed(run, job(resume=True, lr=0.5, dense_lr_schedule="warmup:3"), schedule())
    first = {"lr": 0.05, "lr_schedule": None, "dense_lr": 0.01, "dense_lr_schedule": None, "dense_clip": None}
    second = first | {"lr": 0.5, "dense_lr_schedule": "warmup:3"}
    assert (step, manifest.rates) == (5, ({"step": 0, **first}, {"step": 6, **second}))
    assert TrainJob.of(manifest.job).lr == 0.5
    assert manifest.caveats["rates"] == list(manifest.rates)
    assert (
        rates_text(manifest.rates)
        == "learning rates: from step 6 on lr 0.5 (0.05 before), dense-lr-schedule warmup:3 (None before)"
    )
    # Called with the same again, and with the first ones before a step was trained.
    assert manifest.with_rates(job(lr=0.5, dense_lr_schedule="warmup:3"), 8) == manifest
    assert manifest.with_rates(job(), 6).rates == ()
    assert manifest.with_rates(job(), 9).rates == (*manifest.rates, {"step": 9, **first})
    Run.create(tmp_path / "kept", manifest, Placement.spread(2), overwrite=False)
    assert Run(tmp_path / "kept").manifest == manifest


def test_a_run_at_its_end_goes_on_with_the_schedule_prepared_after_it(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.write_status(Status("ended", 9))
    manifest, step = resumed(run, job(), schedule("second", parent="sum of first", first=10))
    assert step == 9
    assert [stage.first_step for stage in manifest.stages] == [0, 10]


@pytest.mark.parametrize(
    ("status", "settings", "offered", "message"),
    [
        (None, {}, schedule(), "never began to train"),
        (Status("ended", 9), {}, schedule(), "is at the end of"),
        (Status("ended", 9), {}, schedule("second", parent="sum of another"), "does not continue"),
        (Status("ended", 9), {}, schedule("second"), "does not continue"),
        (Status("stopped", 5), {}, schedule("second", parent="sum of first"), "stopped after step 5"),
        (Status("stopped", 5), {}, schedule(lanes=2), "has 2 lanes, the run 4"),
        (Status("stopped", 5), {"parity": "1+1"}, schedule(), r"--parity: must be what the run was started with, off; got 1\+1"),
        (Status("stopped", 5), {"dim": 5}, schedule(), "--dim: must be what the run was started with, 32; got 5"),
        (Status("stopped", 5), {"model": "dcn"}, schedule(), "--model: must be what"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(
    tmp_path: Path, status: Status | None, settings: dict[str, Any], offered: Any, message: str
) -> None:
    run = new_run(tmp_path / "run")
    if status is not None:
        run.write_status(status)
    with pytest.raises(RunError, match=message):
        resumed(run, job(**settings), offered)


def test_every_figure_of_a_report_stands_in_a_line() -> None:
    assert {figure.name for figure in FIGURES} == {item.name for item in fields(StepReport)}


def test_a_step_counts_when_every_trainer_has_told_of_it(tmp_path: Path) -> None:
    report = RunReport(tmp_path, Totals(), 0, 2, members=(4, 7), rows_of=no_rows)
    report.step(4, step_report(0))
    report.step(4, step_report(1, rows_arrived=0))
    assert report.totals.steps == 0
    report.step(7, step_report(0, seconds=1.0, seconds_waiting=0.5))
    report.step(7, step_report(1))
    report.evaluation(EvaluationReport(step=1, epoch=0, samples=7, log_loss=0.6, auc=0.7, normalized_entropy=0.9))
    summary = report.summary(digest=None)
    report.close()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 0), ("step", 1), ("evaluation", 1)]
    assert lines[0]["rows_used"] == 80
    assert (lines[0]["ms"], lines[0]["ms_waiting"]) == (1000, 500)
    assert summary == json.loads((tmp_path / SUMMARY).read_text())
    assert summary["samples"] == 200
    assert summary["samples_per_second"] == 200 / 1.5
    assert summary["cache_hit_rate"] == 1 - 30 / 160
    assert summary["wait_fraction"] == 0.625 / 1.5
    assert [summary[f"ms_{name}"] for name in ("step", "compute", "exchange", "waiting")] == [750, 250, 125, 312.5]
    assert summary["auc"] == 0.7


def test_a_step_of_which_a_lost_trainer_did_not_tell_has_the_rows_of_the_schedule(tmp_path: Path) -> None:
    names = ("rows_used", "rows_arrived", "rows_fetched", "rows_written_back")
    asked = []

    def rows_of(first: int, last: int) -> dict[int, dict[str, int]]:
        asked.append((first, last))
        return {step: dict.fromkeys(names, 100 + step) for step in range(first, last + 1)}

    report = RunReport(tmp_path, Totals(), 0, 4, members=(4, 7), rows_of=rows_of)
    for trainer, step in ((4, 0), (7, 0), (4, 1), (7, 1), (4, 2)):
        report.step(trainer, step_report(step))
    evaluated = EvaluationReport(step=1, epoch=0, samples=7, log_loss=0.6, auc=0.7, normalized_entropy=0.9)
    report.evaluation(evaluated)
    # Step 3 is committed, too, which trainer 4 tells of when it goes back there.
    report.on_term([4, 8], 3)
    report.step(4, step_report(3))
    report.evaluation(evaluated)  # the pass is run again, to the same end
    for trainer in (4, 8):
        report.step(trainer, step_report(4))
    summary = report.summary()
    report.close()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    told = [(line["step"], *(line[name] for name in names), line.get("without")) for line in lines if line["kind"] == "step"]
    whole = [(step, 80, 20, 10, 12, None) for step in (0, 1, 4)]
    assert told == [*whole[:2], (2, *[102] * 4, [7]), (3, *[103] * 4, [7]), whole[2]]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [1]
    assert asked == [(2, 3)]
    assert (summary["rows_used"], summary["steps_incomplete"]) == (3 * 80 + 102 + 103, 2)


def test_a_summary_without_a_step_has_nulls(tmp_path: Path) -> None:
    report = RunReport(tmp_path, Totals(), 0, 0, members=(0,), rows_of=no_rows)
    assert report.summary()["samples_per_second"] is None
    report.close()


def test_without_a_terminal_there_is_a_line_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    report = RunReport(tmp_path, Totals(steps=100, samples=10_000), 100, 1000, members=(0,), rows_of=no_rows, clock=lambda: now)
    for step in range(100, 220):
        now += 1.0
        report.step(0, step_report(step, loss=0.75 if step < 130 else 0.25))
    # Then no step ends for 90 seconds.
    for _ in range(90):
        now += 1.0
        report.tick()
    report.close()
    assert capsys.readouterr().err.splitlines() == [
        "train: 160 of 1,000 steps, 100 samples/s, loss 0.50000, hits 75.0%, 0:14:00 left",
        "train: 220 of 1,000 steps, 100 samples/s, loss 0.25000, hits 75.0%, 0:13:00 left",
        "train: 220 of 1,000 steps, none ended in the last 60 s",
    ]


def test_tensorboard_has_means_over_steps_and_the_settings(tmp_path: Path) -> None:
    def samples_of(step: int) -> int:
        return 100 if step % 2 else 300

    report = RunReport(tmp_path, Totals(), 20, None, members=(0,), rows_of=no_rows, settings={"lr": 0.5, "model": "dcn"})
    for step in range(20, 110):
        report.step(
            0,
            step_report(step, loss=step, samples=samples_of(step), seconds=0.5 if step < 100 else 1.0, rows_arrived=step),
        )
    report.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()

    def scalars(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in board.Scalars(name)]

    # Up to each fiftieth step, and what was left.
    weighted = [
        sum(step * samples_of(step) for step in steps) / sum(map(samples_of, steps))
        for steps in (range(20, 50), range(50, 100), range(100, 110))
    ]
    assert np.allclose(scalars("train/loss"), list(zip((49, 99, 109), weighted, strict=True)))
    assert scalars("train/samples_per_second") == [(49, 400), (99, 400), (109, 200)]
    assert scalars("cache/rows_arrived") == [(49, 34.5), (99, 74.5), (109, 104.5)]
    assert np.allclose(scalars("cache/hit_rate")[0], (49, 1 - 34.5 / 40))
    assert scalars("time/ms") == [(49, 500), (99, 500), (109, 1000)]
    text = board.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| lr | `0.5` |" in text
    assert "| model | `dcn` |" in text


def test_on_a_terminal_one_line_is_written_over() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines, times, terminal = iter(["one", "two", "two"]), iter([0.0, 0.1, 0.6, 0.7, 1.2, 1.8]), Terminal()
    display = Display(lambda: ProgressLine(next(lines)), 60, terminal, lambda: next(times))
    for _ in range(5):
        display.tick()
    display.write("stays")
    display.close()
    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[Kstays\n"


def test_a_full_disk_that_tensorboards_thread_meets_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = threading.excepthook
    report = RunReport(tmp_path, Totals(), 0, 1, members=(0,), rows_of=no_rows)

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = report._board._get_file_writer().event_writer._async_writer
    writer._writer.write = full  # TensorBoard's record file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report._board.add_scalar("train/loss", 1.0, 0)
        writer._worker.join()
        report.evaluation(EvaluationReport(step=0, epoch=0, samples=1, log_loss=0.5, auc=0.5, normalized_entropy=1.0))
        report.close()
    assert threading.excepthook is before
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "the disk is full, so metrics are missing" in said
    assert "epoch 1: log loss 0.50000" in said

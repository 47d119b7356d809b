"""Workers of a call that is over (stopped, killed, taken for dead) go on writing before, during and after another `prepare` of other data into the
same folder: they change nothing of it.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from portable_job import contents, worker_environment

from foreload.pipelines import prepare
from foreload.pipelines.beam import pipeline
from foreload.pipelines.beam.read import Encode
from foreload.pipelines.beam.stages import GroupStage, Stage
from foreload.pipelines.schedule.format import WORK

FEATURES = """
label = "clicked"
[[dense]]
name = "price"
transform = "standard"
[[feature]]
name = "left"
encoding = "vocabulary"
[[feature]]
name = "right"
encoding = "hash"
rows = 500
"""
SETTINGS = {
    "as it comes": ("--batch-size=32", "--lanes=2", "--slots=200", "--max-rejects=9"),
    "a tail held out": ("--batch-size=16", "--lanes=3", "--slots=200", "--eval-fraction=0.2", "--max-rejects=9"),
    "shuffled": ("--batch-size=32", "--lanes=2", "--slots=200", "--epochs=2", "--shuffle-seed=5", "--max-rejects=9"),
    "through a window": (
        "--batch-size=32",
        "--lanes=2",
        "--slots=200",
        "--window=4000",
        "--segment-bytes=4000",
        "--max-rejects=9",
    ),
}
CALLS: list[tuple[Stage, Any]] = []
"""What workers of the first call did: stages with what they were given."""


def write_logs(folder: Path, seed: int) -> Path:
    """Three files of clicks, some of whose records are malformed; returns the folder."""
    folder.mkdir()
    generator = random.Random(seed)
    for name in "abc":
        lines = ["clicked,price,left,right"]
        for _ in range(100):
            clicked = generator.choice("01" * 20 + "2")
            lines.append(f"{clicked},{generator.random():.3f},w{generator.randrange(90)},{generator.randrange(2000)}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    return folder


def command(folder: Path, settings: str, out: Path) -> list[str]:
    return [
        f"{folder}/*.csv",
        "--format=csv",
        f"--features={folder}/features.toml",
        *SETTINGS[settings],
        f"--out={out}",
        "--overwrite",
    ]


class Noted(beam.DoFn):
    """Notes what a stage is given."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def process(self, element: Any) -> Iterator[Any]:
        if isinstance(self.stage, GroupStage):
            element = element[0], list(element[1])
        CALLS.append((self.stage, element))
        yield from self.stage.process(element)


class Interrupted(Noted):
    """Notes what a stage is given, and meets Ctrl-C at the last task."""

    def process(self, element: Any) -> Iterator[Any]:
        yield from super().process(element)
        if isinstance(self.stage, Encode) and sum(isinstance(stage, Encode) for stage, _ in CALLS) == 3:
            raise KeyboardInterrupt


def stale_calls(checked: bool) -> None:
    """Do what the first call's workers did once more. checked: as Beam has it done; else as by one that has looked whether the call is over, and was
    held up then.
    """
    for stage, element in CALLS:
        if checked:
            assert list(stage.process(element)) == []  # no error, either: a runner would try that again
        else:
            with contextlib.suppress(OSError):
                list(stage.outputs(element))


class AmongStale(beam.DoFn):
    """A stage before and after which workers of the first call are at it again."""

    def __init__(self, stage: Stage, checked: bool) -> None:
        super().__init__()
        self.stage, self.checked = stage, checked

    def process(self, element: Any) -> Iterator[Any]:
        stale_calls(self.checked)
        outputs = list(self.stage.process(element))
        stale_calls(self.checked)
        yield from outputs


@pytest.fixture(params=[False, True], ids=["in this process", "planned by workers"])
def planned_by_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether lanes are planned by workers, as on a cluster, rather than by the command."""
    elsewhere: bool = request.param
    if elsewhere:
        monkeypatch.setattr(pipeline, "runs_locally", lambda flags: False)
    return elsewhere


PAIRS = [("as it comes", "as it comes"), ("a tail held out", "shuffled"), ("shuffled", "through a window")]


@pytest.mark.parametrize(
    ("first", "second", "checked"),
    [
        pytest.param(*pair, checked, marks=() if (pair, checked) == (PAIRS[1], False) else pytest.mark.full)
        for pair in PAIRS
        for checked in (False, True)
    ],
)
def test_another_call_has_its_own_data_alone(
    tmp_path: Path, first: str, second: str, checked: bool, planned_by_workers: bool
) -> None:
    here, there, out = write_logs(tmp_path / "here", 1), write_logs(tmp_path / "there", 2), tmp_path / "schedule"
    prepare.run(command(there, second, tmp_path / "expected"))
    CALLS.clear()
    prepare.run(command(here, first, out), wrap=Noted)
    assert {type(stage).__name__ for stage, _ in CALLS} >= {"Count", "Encode", "HoldOut"} | (
        {"PlanLanes"} if planned_by_workers else set()
    )
    prepare.run(command(there, second, out), wrap=lambda stage: AmongStale(stage, checked))
    stale_calls(checked)
    assert contents(out) == contents(tmp_path / "expected")
    assert not (out / WORK).exists()


@pytest.mark.parametrize("checked", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_call_that_was_killed_leaves_nothing_that_another_one_reads(tmp_path: Path, checked: bool) -> None:
    """Its workers, of which one is held up, are there when the next call has begun, and end then."""
    here, there, out = write_logs(tmp_path / "here", 1), write_logs(tmp_path / "there", 2), tmp_path / "schedule"
    prepare.run(command(there, "shuffled", tmp_path / "expected"))
    script = (
        f"from disturbed import prepare_and_die; prepare_and_die({command(here, 'shuffled', out)!r}, 'ShuffleBucket', 2, 100)"
    )
    dead = subprocess.run([sys.executable, "-c", script], env=worker_environment(), capture_output=True, text=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    (left,) = [path for path in (out / WORK).iterdir() if path.is_dir()]
    CALLS.clear()
    prepare.run(command(here, "shuffled", tmp_path / "other"), wrap=Noted)
    for stage, _ in CALLS:  # as if they were those of the call that was killed
        stage.plan = replace(stage.plan, out=out, token=left.name)
    stale_calls(checked=False)
    assert left.exists()
    prepare.run(command(there, "shuffled", out), wrap=lambda stage: AmongStale(stage, checked))
    assert contents(out) == contents(tmp_path / "expected")


def test_a_stopped_call_ends_its_workers_without_an_error(tmp_path: Path) -> None:
    """Ctrl-C while all is read: what a runner that cannot cancel still does is nothing."""
    here, out = write_logs(tmp_path / "here", 1), tmp_path / "schedule"
    CALLS.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare.run(command(here, "as it comes", out), wrap=Interrupted)
    assert not (out / WORK).exists()
    assert (out / "failed.json").exists()
    assert "Encode" in {type(stage).__name__ for stage, _ in CALLS}
    stale_calls(checked=True)
    assert not (out / WORK).exists()

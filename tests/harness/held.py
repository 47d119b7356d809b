"""Runs that are held at a step until the test lets them go on: what a test does meanwhile never depends on how fast the machine trains.

A held run follows a copy of its schedule (`foreload train --follow`) of which the test publishes segment after segment, as `prepare` does. It trains
what is published and waits there for the next segment. All of its processes live and answer meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from command_line import Command, status_of
from injection import KNOWN

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.at_work import at_work
from foreload.pipelines.schedule.format import LOCK, MANIFEST, WORK
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskStop, RunStatus, Stopping, ask
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.run.directory import Run

Hold = Callable[..., "HeldRun"]
"""Starts a run and holds it; see the fixture `hold`."""


class HeldSchedule:
    """The copy of a schedule, whose segments are published one after the other. step: the last training step that is published."""

    def __init__(self, whole: Path, path: Path) -> None:
        shutil.copytree(whole, path)
        self.path = path
        self._manifest = (path / MANIFEST).read_bytes()
        (path / MANIFEST).unlink()
        schedule, self._rest, step = Schedule(whole), list[tuple[Path, bytes, int]](), -1
        for published in sorted(path.glob("segment-*.json")):
            segment = schedule.segment(len(self._rest))
            assert segment is not None
            if segment.kind == "train":
                step = segment.first + len(segment.samples) - 1
            self._rest.append((published, published.read_bytes(), step))
            published.unlink()
        self.step = -1

    def publish(self) -> None:
        """Publish one more segment. At least one must be left after it: a held run has something to wait for."""
        assert len(self._rest) > 1, "the schedule has too few segments to be held here; prepare it with smaller ones"
        self._publish(*self._rest[0][:2])
        self.step = self._rest.pop(0)[2]

    @property
    def left(self) -> int:
        """How many segments are not published yet."""
        return len(self._rest)

    def publish_through(self, step: int) -> None:
        """Publish segments until training step `step` is among them."""
        while self.step < step:
            self.publish()

    def release(self) -> None:
        """Publish the rest."""
        for path, content, _ in self._rest:
            self._publish(path, content)
        self._rest.clear()
        self._publish(self.path / MANIFEST, self._manifest)

    def _publish(self, path: Path, content: bytes) -> None:
        """As prepare does: a trainer that looks for the file sees it whole, or not at all."""
        written = path.with_name(f".{path.name}")
        written.write_bytes(content)
        written.rename(path)


@contextmanager
def held(schedule: Path, path: Path, through: int) -> Iterator[HeldSchedule]:
    """Hold a schedule after the segment of training step `through`, in a folder where `prepare` is at work until the context ends."""
    copy = HeldSchedule(schedule, path)
    copy.publish_through(through)
    (path / WORK).mkdir()
    with at_work(path / WORK / LOCK):
        yield copy


class HeldRun(Command):
    """`foreload train` with a held schedule. Once started, it has trained what is published, and waits."""

    def __init__(self, words: Sequence[object], schedule: HeldSchedule, **how: Any) -> None:
        """words: of the command, whose second one is replaced by the held schedule; how: as Command takes it."""
        super().__init__(words[0], schedule.path, *words[2:], "--follow", **how)
        self.path, self.schedule = Path(str(words[words.index("--run") + 1])), schedule

    @property
    def step(self) -> int:
        """The last step that it has trained."""
        return self.schedule.step

    @property
    def status(self) -> RunStatus:
        """What it reports while it trains."""
        return self.answer(self.path)

    def waits(self) -> bool:
        """Whether all that is published is trained."""
        reported = status_of(self.path)
        return reported is not None and reported.step >= self.schedule.step

    def knows_checkpoint(self, number: int) -> None:
        """Wait until its trainers know of so many checkpoints: the newest is then taken after the next step that it is due after."""
        self.until(lambda: self.said.count(KNOWN) >= number)

    def advance(self, steps: int = 1) -> int:
        """Train at least so many steps more, and hold it there; returns the step."""
        self.schedule.publish_through(self.step + steps)
        self.until(self.waits)
        return self.step

    def train_until(self, satisfied: Callable[[RunStatus], bool]) -> None:
        """Train segment after segment until its status is as wanted."""

        def there() -> bool:
            if self.waits() and not satisfied(self.status):
                self.schedule.publish()
            return satisfied(self.status)

        self.until(there)

    def members(self, *trainers: int) -> None:
        """Wait, without training, until these are the trainers."""
        self.until(lambda: self.status.members == trainers)

    def hosting(self, *trainers: int) -> None:
        """Train until these are the trainers that host lanes."""
        self.train_until(lambda status: set(status.lanes) == set(trainers))

    @property
    def joining(self) -> Iterator[psutil.Process]:
        """The trainers' processes that were started while others trained."""
        return (worker for worker in self.workers if TrainerStart.of_environment(worker.environ()).plan is not None)

    def stopped(self) -> tuple[int, str, str]:
        """Wait until a run that was asked to stop where it is held has saved that, and publish the rest; exit status, output and errors."""
        self.until(lambda: self.process.poll() is not None or Run.open(self.path).saved_status().state == "stopped")
        return self.end()

    def end(self) -> tuple[int, str, str]:
        """Let it go on to its end; exit status, output and errors, as Command.end."""
        self.schedule.release()
        return super().end()


def stop_after(step: int, words: Sequence[object], folder: Path, **how: Any) -> int:
    """Train, and stop after this step or the next one that ends a segment; returns that step.

    words, how: as `hold` takes them; folder: for the copy of the schedule.
    """
    with holding(folder) as hold:
        # A digest at the stop would need the whole schedule, which is published only then.
        run = hold([word for word in words if word != "--digest"], step, **how)
        assert ask(run.path, AskStop()) == Stopping()
        status, _, err = run.stopped()
        assert status == 0, err
        assert Run.open(run.path).saved_status().step == run.step
        return run.step


def send(stores: LocalStores, number: int) -> None:
    """Send a signal to every server that runs."""
    for pid in stores.pids:
        if pid is not None:
            os.kill(pid, number)


def standing(job: Command, run: Path, trainer: int) -> psutil.Process:
    """Wait until a trainer stands still, as a TrainerFault with SIGSTOP has it (with a --peer-timeout that is long enough); returns its process.

    It stands until the test resumes it.
    """
    stopped: list[psutil.Process] = []

    def stands() -> bool:
        status = status_of(run) if run.exists() else None
        if status is not None and trainer in status.trainers:
            process = psutil.Process(status.trainers[trainer])
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process)
        return bool(stopped)

    job.until(stands)
    return stopped[0]


@contextmanager
def holding(tmp_path: Path) -> Iterator[Hold]:
    """What the fixture `hold` gives."""
    with contextlib.ExitStack() as stack:

        def hold(words: Sequence[object], through: int = 10, wait: bool = True, **how: Any) -> HeldRun:
            schedule = stack.enter_context(
                held(Path(str(words[1])), Path(tempfile.mkdtemp(prefix="held-", dir=tmp_path)) / "clicks", through)
            )
            run = HeldRun(words, schedule, **how)
            stack.callback(run.clear)
            if wait:
                run.until(run.waits)
            return run

        yield hold

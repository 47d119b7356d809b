"""Schedules that grow as a test wants it, while a run follows them: so it waits for what is to happen, however long that takes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from command_line import Command
from small_job import summary

from foreload.pipelines.base.at_work import at_work
from foreload.pipelines.schedule.format import LOCK, MANIFEST, WORK
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.control import RunStatus, training_status


def manifests(schedule: Path) -> list[Path]:
    """Those of the segments, in order."""
    return sorted(schedule.glob("segment-*.json"))


@contextmanager
def growing(schedule: Path, path: Path, segments: int) -> Iterator[Path]:
    """The folder of a schedule while `prepare` works on it: only the first segments are published. It is gone when the context ends."""
    shutil.copytree(schedule, path)
    (path / MANIFEST).unlink()
    for published in manifests(path)[segments:]:
        published.unlink()
    (path / WORK).mkdir()
    with at_work(path / WORK / LOCK):
        yield path


def publish_rest(schedule: Path, path: Path) -> None:
    """What `prepare` publishes from there on, in its order."""
    for published in [*manifests(schedule), schedule / MANIFEST]:
        _publish(published, path)


def _publish(published: Path, path: Path) -> None:
    """As prepare does: a trainer that looks for the file sees it whole, or not at all."""
    shutil.copy(published, path / f".{published.name}")
    (path / f".{published.name}").rename(path / published.name)


class GrowingRun:
    """A run whose schedule grows; it has trained what was published first."""

    def __init__(self, job: Command, run: Path, schedule: Path, followed: Path, published: int) -> None:
        self.job, self.path, self._schedule, self._followed, self._published = job, run, schedule, followed, published
        self.job.until(self._waits)

    @property
    def status(self) -> RunStatus:
        status = training_status(self.path)
        assert status is not None, self.job.process.communicate()
        return status

    def _waits(self) -> bool:
        """Whether all that is published is trained."""
        last = Schedule(self._schedule).segment(self._published - 1)
        assert last is not None
        told = training_status(self.path)
        return told is not None and told.step >= last.first + len(last.samples) - 1

    def members(self, *trainers: int) -> None:
        """Wait until these are the trainers; nobody trains meanwhile."""
        self.job.until(lambda: self.status.members == trainers)

    def hosting(self, *trainers: int) -> None:
        """Train until these are the trainers that host lanes."""

        def there() -> bool:
            if self._waits():
                segments = manifests(self._schedule)
                assert self._published < len(segments)
                _publish(segments[self._published], self._followed)
                self._published += 1
            return set(self.status.lanes) == set(trainers)

        self.job.until(there)

    @property
    def joining(self) -> Iterator[psutil.Process]:
        """The trainers' processes that were started while others trained."""
        return (worker for worker in self.job.workers if worker.environ()["FORELOAD_COMMANDS"] != "null")

    def end(self, undisturbed: str, trainers: int) -> str:
        """Train to the end: the undisturbed model, every step told once; returns what was said."""
        publish_rest(self._schedule, self._followed)
        status, _, err = self.job.end()
        assert status == 0, err
        assert "Traceback" not in err
        told = summary(self.path)
        steps = Schedule(self._schedule).header.end_step
        assert [told[name] for name in ("digest", "steps", "state", "trainers")] == [undisturbed, steps, "ended", trainers]
        return err

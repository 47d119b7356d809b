"""Training steps over time: gaps between them, and throughput."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.trainer.compute.reports import StepReport

_FEWEST_STEPS = 5  # needed for a throughput


@dataclass(frozen=True, slots=True)
class Timeline:
    """Training steps in order.

    Evaluations lie between steps and are part of no step's time.

    Attributes:
        ended: float64 [n], when each step ended, in seconds.
        took: float64 [n], seconds since the step before.
        samples: int64 [n].
    """

    ended: np.ndarray
    took: np.ndarray
    samples: np.ndarray

    @property
    def begin(self) -> float:
        """When the first step began."""
        return float(self.ended[0] - self.took[0])

    @property
    def end(self) -> float:
        """When the last step ended."""
        return float(self.ended[-1])

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest time between two steps, in seconds.

        The first gap begins at `since`. The last one ends with the first step that ends at `until`
        or later.

        Returns:
            The gap, or nan if no step ends after `since`.
        """
        first = int(np.searchsorted(self.ended, since, "right"))
        last = int(np.searchsorted(self.ended, until, "left"))
        begun = np.maximum(self.ended - self.took, since)
        gaps = (self.ended - begun)[first : last + 1]
        return float(gaps.max()) if len(gaps) else float("nan")

    def median_step(self, begin: float, end: float) -> float:
        """Return the median seconds of the steps that lie within begin .. end.

        Returns:
            The median, or nan if no step lies within.
        """
        within = (self.ended - self.took >= begin) & (self.ended <= end)
        return float(np.median(self.took[within])) if within.any() else float("nan")

    def throughput(self, *spans: tuple[float, float]) -> float:
        """Return samples per second of training time within the spans.

        Args:
            spans: (begin, end) in seconds. Steps are cut at the ends of a span.

        Returns:
            The throughput, or nan if the spans hold fewer than 5 steps.
        """
        samples = seconds = steps = 0.0
        for begin, end in spans:
            overlap = np.clip(np.minimum(self.ended, end) - np.maximum(self.ended - self.took, begin), 0, None)
            shares = overlap / np.maximum(self.took, 1e-9)
            samples, seconds, steps = samples + shares @ self.samples, seconds + overlap.sum(), steps + shares.sum()
        return float(samples / seconds) if steps >= _FEWEST_STEPS else float("nan")

    def bins(self, width: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the throughput over time, in bins of `width` seconds from the first step on.

        Returns:
            (edges float64 [m + 1], samples per second float64 [m]).
        """
        times = np.column_stack([self.ended - self.took, self.ended]).reshape(-1)
        done = np.cumsum(np.column_stack([np.zeros_like(self.took), self.samples]).reshape(-1))
        edges = np.arange(times[0], self.ended[-1] + width, width)
        return edges, np.diff(np.interp(edges, times, done)) / width


class StepTimes:
    """Collects the trainers' step reports into a Timeline."""

    def __init__(self) -> None:
        # step -> (when it ended, the seconds it took, epoch, samples)
        self._steps: dict[int, tuple[float, float, int, int]] = {}
        self._evaluated: set[int] = set()

    def note(self, report: StepReport, at: float) -> None:
        """Add one trainer's report of a step.

        The step ends when its last trainer has finished it.

        Args:
            at: when the step ended for this trainer, in seconds.
        """
        ended, own, *_ = self._steps.get(report.step, (0.0, 0.0))
        self._steps[report.step] = max(ended, at), max(own, report.seconds), report.epoch, report.samples

    def note_evaluation(self, step: int) -> None:
        """Record that an evaluation follows a step."""
        self._evaluated.add(step)

    @property
    def timeline(self) -> Timeline:
        """The steps so far, of which there must be at least one."""
        steps = sorted(self._steps)
        ended, own, epoch, samples = map(np.array, zip(*(self._steps[step] for step in steps), strict=True))
        since = np.diff(ended, prepend=-np.inf)
        # After an evaluation, also between epochs, the time since the step before includes the
        # evaluation, so the time that the trainers report counts.
        alone = (np.diff(epoch, prepend=epoch[0] - 1) != 0) | np.isin(np.array(steps) - 1, list(self._evaluated))
        took = np.where(alone, np.minimum(since, own), since)
        return Timeline(ended, took, samples)

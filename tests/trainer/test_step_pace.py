"""How much of the traffic's time a checkpoint takes, by what it costs training."""

from __future__ import annotations

from foreload.cache.protocol.rounds.background import SHARE
from foreload.trainer.cluster.member.trainer_checkpoints import LEAST_SHARE, StepPace


class Steps:
    """Steps that take as long as they are said to."""

    def __init__(self) -> None:
        self.pace, self.now = StepPace(), 5.0

    def told(self, seconds: float, steps: int, beside: bool) -> list[float]:
        """Tell of so many steps; returns the share behind each."""
        shares = []
        for _ in range(steps):
            self.now += seconds
            self.pace.step(self.now, beside)
            shares.append(self.pace.share)
        return shares


def test_a_checkpoint_that_slows_training_down_takes_less_but_not_ever_less() -> None:
    steps = Steps()
    assert set(steps.told(0.010, 100, beside=False)) == {SHARE}
    shares = steps.told(0.012, 200, beside=True)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == LEAST_SHARE
    # What was found out holds for the next one, and it takes more again where that costs nothing.
    steps.told(0.010, 50, beside=False)
    shares = steps.told(0.010, 200, beside=True)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (LEAST_SHARE, SHARE)


def test_single_slow_steps_do_not_count_nor_do_any_before_there_is_something_to_compare_with() -> None:
    steps = Steps()
    assert set(steps.told(0.5, 100, beside=True)) == {SHARE}
    steps.told(0.010, 100, beside=False)
    for _ in range(20):
        assert set(steps.told(0.010, 5, beside=True) + steps.told(0.3, 1, beside=True)) == {SHARE}

"""Why trainers ended before their time, and what follows from that.

The call ends, or, if only trainers of other hosts are to blame, only these are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from foreload.base.errors import ForeloadError, error_of
from foreload.cache.errors import CopyLost, RowsLost
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import Failed, LostRows
from foreload.trainer.errors import PeerLost, ShardsLost, TrainerError

_OF_OTHERS = {PeerLost.code, CopyLost.code}
"""The codes of errors that another trainer causes."""


class GuestsRefused(Exception):
    """Training did not begin, and only guests are to blame: trainers of other hosts.

    Attributes:
        why: For each guest to blame, what is wrong with it.
        said: The trainers that have reported the reason themselves, on their hosts.
    """

    def __init__(self, why: Mapping[int, str], said: Collection[int]) -> None:
        super().__init__()
        self.why, self.said = why, said


class Failures:
    """The failures that trainers reported before they ended.

    Args:
        guests: The trainers that other hosts have offered.
    """

    def __init__(self, guests: Collection[int]) -> None:
        self._guests = guests
        self._reports: list[tuple[int, Failed]] = []
        self._of_lost: dict[int, str] = {}  # the reports of guests whose loss the job survives

    def __bool__(self) -> bool:
        return bool(self._reports)

    @property
    def explained(self) -> bool:
        """Whether a trainer reported a cause other than the loss of another trainer or of rows."""
        return any(failed.code not in _OF_OTHERS and failed.lost is None for _, failed in self._reports)

    def guests(self, term: Term) -> set[int]:
        """Return the members of a term that other hosts have offered."""
        return {trainer for trainer in term.members if trainer in self._guests}

    def receive(self, trainer: int, failed: Failed, survived: bool) -> None:
        """Record a trainer's report.

        Args:
            survived: Whether training goes on without a trainer. A guest that fails is then only
                lost, and its failure does not end the call.
        """
        if survived and trainer in self._guests:
            self._of_lost[trainer] = failed.message
        else:
            self._reports.append((trainer, failed))

    def with_reports(self, ended: Mapping[int, str]) -> dict[int, str]:
        """Return how processes ended, with the reason that a guest reported, if it did."""
        return {trainer: self._of_lost.get(trainer, how) for trainer, how in ended.items()}

    def reason(self, term: Term, unheard: Mapping[int, str], begun: bool) -> ForeloadError | GuestsRefused:
        """Return the error that says why trainers ended before their time.

        Args:
            unheard: The members that ended without a report or are silent, and how.
            begun: Whether training has begun.
        """
        if not begun and (refused := guests_to_blame(self.guests(term), self._reports, unheard)):
            return GuestsRefused(refused, self.heard())
        return _reason([failed for _, failed in self._reports], unheard, term)

    def heard(self) -> set[int]:
        """Return the trainers that reported a failure."""
        return {trainer for trainer, _ in self._reports}


def guests_to_blame(guests: Collection[int], reports: Sequence[tuple[int, Failed]], unheard: Mapping[int, str]) -> dict[int, str]:
    """Return the guests because of which training did not begin, each with the reason.

    There are none if one of the coordinator's own trainers failed.

    Args:
        guests: The trainers that run on other hosts.
        unheard: The trainers that ended without a report or are silent, and how.
    """
    causes = {trainer: failed.message for trainer, failed in reports if failed.code not in _OF_OTHERS} | dict(unheard)
    if causes or not reports:
        return causes if causes.keys() <= set(guests) else {}
    # Every report blames another trainer. The guests that reported nothing are then to blame or, if
    # all guests have reported, all of them.
    heard = {trainer for trainer, _ in reports}
    why = f"the trainers cannot reach each other: {reports[0][1].message}"
    return dict.fromkeys(set(guests) - heard or guests, why)


def _all_lost(reports: Sequence[LostRows]) -> ShardsLost:
    """Combine the trainers' reports of lost rows into one error."""
    rows: Counter[str] = Counter()
    for report in reports:
        rows.update(report.rows or {})
    shards = sorted({shard for report in reports for shard in report.shards})
    counted = any(report.rows is not None for report in reports)
    return ShardsLost(str(RowsLost(shards, reports[0].covered, rows if counted else None)), shards)


def _reason(failures: Sequence[Failed], unheard: Mapping[int, str], term: Term) -> ForeloadError:
    """Return the error that says why trainers ended before their time.

    It is the rows that were lost; else the first reported reason that is not a lost peer; else the
    trainer that ended without a report.

    Args:
        unheard: The trainers that ended without a report or are silent, and how.
    """
    causes = [failed for failed in failures if failed.code != PeerLost.code]
    if lost := [failed.lost for failed in causes if failed.lost is not None]:
        return _all_lost(lost)
    if causes:
        return error_of(causes[0].code, causes[0].message)
    for trainer, how in unheard.items():
        hosted = ", ".join(map(str, term.lanes_of(trainer)))
        return TrainerError(
            f"trainer {trainer} (lanes {hosted}): {how}; the others were stopped, and the dense part since the last clean stop "
            "is lost; --resume goes on from that stop if its rows are still there, or says what is missing"
        )
    return PeerLost(failures[0].message)

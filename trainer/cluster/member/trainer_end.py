"""How a trainer's training ends: early stopping, and the wait until the run's state is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.ending import end_alone
from foreload.trainer.cluster.folder_over_hosts import save_over_hosts
from foreload.trainer.cluster.member.hosted_log import TermLog
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import Orphaned, RunSaved, Term
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import Departed, TrainerEnd
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.errors import PeerLost
from foreload.trainer.job.metric_choice import MetricValue, StopEarly, Watched, after_evaluation, metric_of
from foreload.trainer.run.directory import Run
from foreload.trainer.step.term_session import TermSession

_PAUSE = timedelta(milliseconds=10)  # between two polls


def await_saved(joined: JoinedTrainer, schedule: Schedule, term: Term, log: TermLog, check: Callable[[], None]) -> None:
    """Wait until the launcher has published the state of the run.

    If the launcher was killed, one trainer publishes the state in its place once all members have
    ended, and the others return.

    Args:
        log: Says whether this trainer is the one that publishes.
        check: Called during the wait. It raises PeerLost if another trainer was lost before it
            ended, so that its lanes must be taken over.
    """
    rendezvous, spec, run = joined.rendezvous, joined.spec, Run(joined.run)
    while rendezvous.poll(RunSaved) is None:
        check()
        if rendezvous.poll(Orphaned) is not None:
            if log.keeps_folder(term) == log.trainer:
                ended = _ends(rendezvous, term, joined.job.peer_silence)
                save_over_hosts(rendezvous, run, spec, term.number, ended)
                left = [departed for trainer in term.left if (departed := rendezvous.poll(Departed, trainer)) is not None]
                end_alone(run, schedule, ended, left, spec.totals)
            return
        time.sleep(_PAUSE.total_seconds())


def _ends(rendezvous: Rendezvous, term: Term, silence: timedelta) -> dict[int, TrainerEnd]:
    """Wait for the end report of each member, and return them by trainer.

    Args:
        silence: Time after which a member that has not reported counts as lost.

    Raises:
        PeerLost: A member has not reported in time.
    """
    ended: dict[int, TrainerEnd] = {}
    deadline = time.monotonic() + silence.total_seconds()
    while missing := [trainer for trainer in term.members if trainer not in ended]:
        reported = {trainer: end for trainer in missing if (end := rendezvous.poll(TrainerEnd, term.number, trainer)) is not None}
        ended |= reported
        if not reported and time.monotonic() >= deadline:
            raise PeerLost(f"trainer {missing[0]}: ended without a message, and so did the launcher")
        time.sleep(_PAUSE.total_seconds())
    return {trainer: ended[trainer] for trainer in term.members}


class EarlyStopping:
    """A trainer's side of early stopping.

    Every trainer of a call has one, and all have seen the same values, because the leader sends the
    others the value of each evaluation.

    Attributes:
        so_far: Results of the evaluations so far.
    """

    def __init__(self, rule: StopEarly | None, so_far: Watched | None) -> None:
        """Continue from the results of earlier evaluations.

        Args:
            rule: When to stop. If None, evaluations do not stop training.
            so_far: Results of the evaluations before.
        """
        self._rule, self.so_far = rule, so_far

    def ends_after(self, session: TermSession, step: int, reports: Sequence[EvaluationReport]) -> bool:
        """Return whether training ends after the evaluation that follows training step `step`.

        Args:
            session: The session of the current term.
            step: Training step before the evaluation.
            reports: Metrics of each evaluation set, if this trainer leads; otherwise empty.

        Raises:
            PeerLost: Another trainer was lost.
        """
        if self._rule is None:
            return False
        measured = metric_of(reports, self._rule.metric) if reports else MetricValue(0.0, False)
        encoded = torch.tensor(
            [measured.value, float(measured.higher_is_better)], dtype=torch.float64, device=session.transport.device
        )
        value, higher = session.exchange.agree(encoded).tolist()
        self.so_far = after_evaluation(self.so_far, self._rule, step, MetricValue(value, bool(higher)))
        # An evaluation that is repeated after a rollback is not counted again. One that is older
        # than the last counted evaluation does not end training.
        return step == self.so_far.step and self.so_far.ends(self._rule)

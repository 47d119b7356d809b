"""How a trainer's training ends: early, where evaluations get no better, and with a wait until the run's state is published."""

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

_PAUSE = timedelta(milliseconds=10)  # between two looks


def await_saved(joined: JoinedTrainer, schedule: Schedule, term: Term, log: TermLog, check: Callable[[], None]) -> None:
    """Wait until the launcher has published how far the run is; if it was killed, have that done in its place, when all have ended.

    log: says whether it falls to this trainer. check: called meanwhile; raises PeerLost where another trainer was lost that has not ended, so that
    its lanes are to be taken over.
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
    """How each member ended. silence: after which a member that has not reported counts as lost. Raises PeerLost then."""
    ended: dict[int, TrainerEnd] = {}
    deadline = time.monotonic() + silence.total_seconds()
    while missing := [trainer for trainer in term.members if trainer not in ended]:
        reported = {trainer: end for trainer in missing if (end := rendezvous.poll(TrainerEnd, term.number, trainer)) is not None}
        ended |= reported
        if not reported and time.monotonic() >= deadline:
            raise PeerLost(f"trainer {missing[0]}: ended without a word, and so did the launcher")
        time.sleep(_PAUSE.total_seconds())
    return {trainer: ended[trainer] for trainer in term.members}


class EarlyStopping:
    """A trainer's side. Every trainer of a call has one, and all have seen the same: the leader sends the others the value of each evaluation.

    rule: None: training does not end so; so_far: what was seen before.
    """

    def __init__(self, rule: StopEarly | None, so_far: Watched | None) -> None:
        self._rule, self.so_far = rule, so_far

    def ends_after(self, session: TermSession, step: int, reports: Sequence[EvaluationReport]) -> bool:
        """Whether training ends, after an evaluation behind step `step`; reports: of its sets, where this trainer leads. Raises PeerLost."""
        if self._rule is None:
            return False
        measured = metric_of(reports, self._rule.metric) if reports else MetricValue(0.0, False)
        encoded = torch.tensor(
            [measured.value, float(measured.higher_is_better)], dtype=torch.float64, device=session.transport.device
        )
        value, higher = session.exchange.agree(encoded).tolist()
        self.so_far = after_evaluation(self.so_far, self._rule, step, MetricValue(value, bool(higher)))
        return step == self.so_far.step and self.so_far.ends(self._rule)

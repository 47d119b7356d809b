"""What a trainer waits for once it has ended: that somebody publishes how far the run is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.board import Board
from foreload.trainer.cluster.ending import end_alone
from foreload.trainer.cluster.facts import Orphaned, RunSaved, Term
from foreload.trainer.cluster.messages import Departed, LaunchSpec, TrainerEnd
from foreload.trainer.cluster.run_folder import save_over_hosts
from foreload.trainer.run.directory import Run

_PAUSE = timedelta(milliseconds=10)  # between two looks


def await_saved(
    board: Board, spec: LaunchSpec, run: Path, schedule: Schedule, term: Term, ends_alone: Callable[[Term], bool], check: Callable[[], None]
) -> None:  # fmt: skip
    """Wait until the launcher has published how far the run is; if it was killed, have that done in its place, when all have ended.

    ends_alone: whether this trainer has to do it. check: called meanwhile; raises PeerLost where another trainer was lost that has not ended, so that
    its lanes are to be taken over.
    """
    while board.poll(RunSaved) is None:
        check()
        if board.poll(Orphaned) is not None:
            if ends_alone(term):
                ended = {trainer: board.read(TrainerEnd, term.number, trainer) for trainer in term.members}
                save_over_hosts(board, Run(run), spec, term.number, ended.values())
                left = [told for trainer in term.left if (told := board.poll(Departed, trainer)) is not None]
                end_alone(Run(run), schedule, ended, left, spec.totals)
            return
        time.sleep(_PAUSE.total_seconds())

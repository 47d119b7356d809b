"""A trainer that cannot go on, though no row is lost: all keep what the store lacks of their lanes in the run's folder, after the same step."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from foreload.base.errors import ForeloadError
from foreload.cache.errors import (
    CacheError,
    CommandRefused,
    ForeignKey,
    ShardsRefuse,
    StoreAuth,
    StoreFull,
    StoreTls,
    StoreUnavailable,
)
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.dense_file import save_dense
from foreload.trainer.cluster.member.hosted_log import TermLog
from foreload.trainer.cluster.member.run_folder import RunFolder
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.errors import DenseDiverged, PeerLost, TrainerError
from foreload.trainer.run.own_exit import exit_error
from foreload.trainer.saved.kept_lanes import DENSE, KeptLane, folder_of, write_lane
from foreload.trainer.saved.kept_manifest import KeptFile
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.program import Trainer

_ROWS_STAY = (StoreUnavailable, StoreFull, StoreAuth, StoreTls, CommandRefused, ShardsRefuse)


class CannotGoOn(Exception):
    """A trainer failed, and its rows, and those of the others, are as after a step that was trained."""


def cannot_go_on(error: Exception | SystemExit, trainer: Trainer, number: int) -> CannotGoOn | None:
    """What becomes of an error that a trainer's steps ended with; None where another trainer, or rows that are lost, are why, or a step is half done.

    number: the trainer's, for messages.
    """
    if isinstance(error, PeerLost | DenseDiverged) or (trainer.commits is None and trainer.applying):
        return None
    if isinstance(error, CacheError):
        return CannotGoOn(str(error)) if rows_stay(error) else None
    if isinstance(error, SystemExit):
        error = exit_error(f"trainer {number}", error)
    if isinstance(error, ForeloadError):
        return CannotGoOn(str(error))
    traceback.print_exception(error, file=sys.stderr)
    return CannotGoOn(f"trainer {number}: {type(error).__name__}: {error} (see above)")


def rows_stay(error: CacheError) -> bool:
    """Whether the servers may have every row that they had."""
    return isinstance(error, _ROWS_STAY) and not isinstance(error, ForeignKey)


def keep(
    folder: RunFolder,
    log: TermLog,
    term: Term,
    number: int,
    hosted: HostedLanes,
    trainer: Trainer | None,
    last_step: int,
    dense: DenseModel,
) -> tuple[KeptFile, ...]:
    """Leave what the store lacks of the lanes that a term gives a trainer, hosted or copied here, for the run; who leads, the dense part, too.

    trainer: who ran the last steps, up to last_step; None where this one had joined, and has nothing. Raises TrainerError, OSError.
    """
    commits = None if trainer is None else trainer.commits
    if trainer is not None and commits is None and last_step != term.committed:
        raise TrainerError(f"{term.keeps}; and the trainers have come to different steps, so what they have cannot be kept")

    def kept(lane: int) -> KeptLane:
        record = log.record_to_keep(lane)
        if lane in hosted.partitions:
            left = hosted.traffic.unwritten(lane)
            return KeptLane.of(
                hosted.partitions[lane], hosted.given_after(lane, term.committed), left.owed, left.released, record
            )
        assert commits is not None
        copy = commits.copies[lane]
        return KeptLane.of(copy.partition, copy.given, sorted(copy.owed.items()), (copy.released, copy.batch), record)

    def write(run: Path) -> tuple[KeptFile, ...]:
        files = tuple(write_lane(run, lane, kept(lane)) for lane in term.lanes_of(number))
        if term.leader == number:
            save_dense(folder_of(run) / DENSE, dense.module, dense.optimizer, term.committed)
        return files

    return folder.keep(write, term.committed, term.number, number)

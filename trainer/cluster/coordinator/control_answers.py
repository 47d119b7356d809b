"""What a run that trains answers on its control socket."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from foreload.trainer.cluster.coordinator.lane_replicas import LaneReplicas
from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.row_migration import RowMigration
from foreload.trainer.cluster.coordinator.run_requests import RunRequests
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.spawned_trainers import SpawnedTrainers
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.wanted_checkpoints import WantedCheckpoints
from foreload.trainer.cluster.messages.control import (
    Answer,
    AskCheckpoint,
    AskCheckpointed,
    AskMove,
    AskReplace,
    AskRowCounts,
    AskScale,
    AskScaled,
    AskScrub,
    AskScrubbed,
    AskStatus,
    AskStop,
    CheckpointBegun,
    ControlRequest,
    Refused,
    RunStatus,
    ScaleBegun,
    Stopping,
)
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.run.report import RunReport

Phase = Literal["starting", "training", "ending"]


class ControlAnswers:
    """Answers requests. stop_wanted: whether a clean stop was asked for; the coordinator sees to it."""

    def __init__(
        self,
        phase: Callable[[], Phase],
        members: Membership,
        trainers: SpawnedTrainers,
        shards: StoreShards,
        copies: LaneReplicas,
        run_requests: RunRequests,
        scaling: Scaling,
        report: RunReport,
        checkpoints: WantedCheckpoints,
        moves: RowMigration,
    ) -> None:
        self._checkpoints, self._moves = checkpoints, moves
        self._phase, self._members, self._trainers, self._shards, self._copies = phase, members, trainers, shards, copies
        self._run_requests, self._scaling, self._report = run_requests, scaling, report
        self.stop_wanted = False

    def respond(self, request: ControlRequest) -> Answer | Future[Answer]:
        """The answer to a request, or what will be the answer. Raises the package's errors, which say why it is refused."""
        match request:
            case AskStatus():
                return self._status()
            case AskStop():
                self.stop_wanted = True
                return Stopping()
            case AskReplace():
                return self._shards.want_replacement(request)
            case AskMove():
                return self._move(request)
            case AskScrub():
                return self._run_requests.scrub(request)
            case AskScrubbed():
                return self._run_requests.scrubbed()
            case AskRowCounts():
                return self._run_requests.row_counts()
            case AskScale():
                return self._scale(request)
            case AskScaled():
                return self._scaling.progress(request)
            case AskCheckpoint():
                return self._checkpoint(request)
            case AskCheckpointed():
                return self._checkpoints.progress(request)

    def _status(self) -> RunStatus:
        term = self._members.term
        return RunStatus(
            state="starting" if self._phase() == "starting" else "training",
            step=self._report.last_step,
            term=term.number,
            lanes=term.hosts,
            trainers=self._trainers.pids,
            shards=self._shards.together,
            members=term.members,
            copies=self._copies.status,
        )

    def _checkpoint(self, request: AskCheckpoint) -> CheckpointBegun | Refused:
        if self._phase() == "ending" or self.stop_wanted:
            return Refused("it is about to end; save a checkpoint of it then")
        return self._checkpoints.ask(request)

    def _move(self, request: AskMove) -> Answer | Future[Answer]:
        if self._phase() == "starting":
            return Refused("its trainers are still starting; try again in a moment")
        if self._phase() == "ending" or self.stop_wanted:
            return Refused("it is about to end; ask again when it rests")
        return self._moves.want(request)

    def _scale(self, request: AskScale) -> ScaleBegun | Refused:
        if under_scheduler():
            return Refused("a scheduler starts its trainers: stop it, and go on with --resume and another number of them")
        if self._phase() == "starting":
            return Refused("its trainers are still starting; try again in a moment")
        if self._phase() == "ending" or self.stop_wanted:
            return Refused("it is about to end; go on with --resume and another --trainers")
        return self._scaling.ask(request)

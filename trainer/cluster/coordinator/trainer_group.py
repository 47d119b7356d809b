"""Start the trainers of one `foreload train` call, and follow them to their end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from foreload.base.codec import FormError, fault, of_json
from foreload.cache.rows.layout import slot_columns
from foreload.trainer.cluster.coordinator.control_socket import ControlSocket, RequestQueue
from foreload.trainer.cluster.coordinator.coordinator import Coordinator
from foreload.trainer.cluster.coordinator.spawned_trainers import SpawnedTrainers
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.ending import Ending, call_figures, early_stop, first_of, keep_run, manifest_of, status_of
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.folder_over_hosts import publish_dense, run_facts, save_over_hosts
from foreload.trainer.cluster.messages.facts import RunSaved
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import Departed, LaunchSpec, TrainerEnd
from foreload.trainer.compute.reports import Totals
from foreload.trainer.errors import RunError
from foreload.trainer.job.scheduler import Meeting
from foreload.trainer.run.directory import STATUS, Run
from foreload.trainer.run.event_log import CallEnded
from foreload.trainer.run.manifest import Status, code_sums
from foreload.trainer.run.report import RunReport, rows_of_steps
from foreload.trainer.saved.kept import keep_schedule


def launch_spec(call: TrainingCall, servers_return: bool) -> LaunchSpec:
    """Return the launch spec that all trainers of a call get as it begins.

    Args:
        servers_return: As in `LaunchSpec`.
    """
    job, run, manifest, start = call.job, call.run, call.manifest, call.start
    return LaunchSpec(
        # Trainers of other hosts bring their own credentials and address. The credentials of this
        # call never reach the rendezvous store.
        job=job.to_dict() | {"store": manifest.job["store"], "spare": None, "address": None, "track": None},
        first_term=start.term,
        start_step=start.step,
        last_batches=tuple(int(start.batches[str(lane)]) for lane in range(manifest.lanes)),
        fingerprint=None if job.accept_numerics else manifest.fingerprint,
        resumes=start.step >= manifest.stages[0].first_step,
        servers_return=servers_return,
        faults=tuple(call.observer.faults),
        totals=_totals(run, start),
        hosts=run_facts(run, manifest) if job.is_over_hosts else None,
        watched=manifest.watched,
        code=code_sums(manifest.code),
    )


def _totals(run: Run, start: Status) -> Totals:
    try:
        return of_json(start.totals, Totals)
    except FormError as error:
        raise RunError(fault(f"run {run.path}: {STATUS}", error, "restore the folder from a copy")) from error


class TrainerGroup:
    """The trainers of one call, from the coordinator's side.

    Attributes:
        stopped: Whether the run has stopped, with everything saved.
        kept: Whether it has not, but everything that the store lacks is kept in the run's folder.
        status: The run's status after the call, if `stopped` or `kept`.
        failure: Why training ended before its time. None if nothing failed.
    """

    def __init__(self, call: TrainingCall, shards: StoreShards, engine: Engine) -> None:
        self._call, self._shards, self._engine = call, shards, engine
        self._requests = RequestQueue()
        self._trainers = SpawnedTrainers(engine, lambda: shards.urls, call.run.lock, self._requests.fileno())
        self.status = call.start
        self.failure: str | None = None
        self.stopped = self.kept = False

    def train(self, meeting: Meeting | None, spawned: Sequence[int]) -> Ending:
        """Start the trainers and follow them until all have left in order.

        No process of the call is left, however this method ends.

        Args:
            meeting: Where a scheduler's trainers meet. If None, there is no scheduler.
            spawned: The trainers to start; a scheduler has started the others.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._requests.close)
            spec = launch_spec(self._call, self._shards.servers_return)
            self._call.interrupts.defer_signals = True
            address = self._call.job.own_address()
            rendezvous_host = self._engine.rendezvous_host(address)
            # Callbacks run in reverse order: trainers are killed before their rendezvous host is
            # closed.
            stack.callback(rendezvous_host.close)
            stack.callback(self._trainers.kill)
            # The trainers start at the same time as the rendezvous host, and wait for it.
            self._trainers.meet_at(rendezvous_host.address, address, rendezvous_host.held)
            for trainer in spawned:
                self._trainers.start(trainer)
            store = rendezvous_host.join()
            if meeting is not None:
                meeting.announce(rendezvous_host.address)
            return self._lead(Rendezvous(store), spec)

    def _lead(self, rendezvous: Rendezvous, spec: LaunchSpec) -> Ending:
        """Publish the first term, follow the trainers to their end, and publish the status."""
        call, run, report = self._call, self._call.run, self._report(spec)
        coordinator = Coordinator(call, rendezvous, self._trainers, self._shards, self._requests, report)
        coordinator.begin()
        publish_dense(rendezvous, run, spec)
        # The spec comes last: a trainer that has read it finds the term, the plan and the dense
        # part.
        rendezvous.publish(spec)
        control = ControlSocket(run.path, self._requests.ask)
        try:
            try:
                coordinator.follow()
            finally:
                # What comes next, such as the wait for another host, may take long.
                if call.metrics is not None:
                    call.metrics.rest()
            term, ended = coordinator.members.term, coordinator.ended
            coordinator.checkpointing.finish(term.members, coordinator.wait)
            coordinator.moves.finish(ended, coordinator.wait)
            left = [departed for trainer in term.left if (departed := rendezvous.poll(Departed, trainer)) is not None]
            if call.metrics is not None:
                call.metrics.conclude(coordinator.figures())
            ending = self._finish(coordinator, report, left)
            save_over_hosts(rendezvous, run, spec, term.number, ended)
            self.kept = keep_run(run, call.manifest, self.status, ended)
            if not self.kept:
                # The servers still run, with the rows of this status. If they cannot save, they
                # stay up, and the next command uses them as they are.
                run.record_stop(call.manifest, self.status)
                self.stopped = True
                call.events.note(CallEnded(state=self.status.state, cause=self.failure or ending.early))
                keep_schedule(run, call.schedule, self.status.step)
            rendezvous.publish(RunSaved())
            coordinator.see_last()
            return ending
        finally:
            self._requests.close()
            self._trainers.kill()
            coordinator.checkpointing.close(self.stopped)
            control.close()
            report.close()

    def _report(self, spec: LaunchSpec) -> RunReport:
        call, header = self._call, self._call.schedule.header
        steps = header.end_step - call.manifest.stages[0].first_step
        if call.tracking is not None:
            call.tracking.settings(call.manifest.run_id, call.run.path.absolute().name, call.manifest.job)
        return RunReport(
            call.run.path,
            replace(spec.totals),
            call.start.step + 1,
            steps,
            range(call.job.trainers),
            partial(rows_of_steps, call.schedule),
            call.manifest.job,
            tracking=call.tracking,
            is_within_epoch=header.is_within_epoch,
            on_evaluation=call.observer.on_evaluation,
        )

    def _finish(self, coordinator: Coordinator, report: RunReport, left: Sequence[Departed]) -> Ending:
        """Combine the ends of all trainers: set `status` and `failure`, and write the summary.

        Args:
            left: The reports of the trainers that left before the end.
        """
        call, ended = self._call, coordinator.ended
        ends: tuple[TrainerEnd | Departed, ...] = (*ended.values(), *left)
        first = first_of(ended)
        self.failure = first.failure
        call.manifest = manifest_of(call.manifest, call.schedule, ended)
        self.status = status_of(ended, report.totals, call.start.term, coordinator.moves.removed)
        if self.status.lost:
            call.say(
                f"foreload: warning: store shard {', '.join(map(str, self.status.lost))} is lost, and its rows come from parity; "
                "the next --resume rebuilds it, once a server runs there"
            )
        summary = report.summary(
            state=self.status.state,
            trainers=len(ended),
            rebalanced=coordinator.scaling.rebalanced,
            checkpoints=coordinator.checkpointing.summary(),
            **call_figures(
                ends, first.totals.steps, max(call.schedule.slots), slot_columns(call.layouts), self._shards.protected
            ),
            **call.manifest.caveats,
            stopped_early=early_stop(call.manifest, first.stopped),
        )
        received = call.interrupts.received
        return Ending(summary, first.step, first.stopped, received[0] if first.stopped and received else None, ends)

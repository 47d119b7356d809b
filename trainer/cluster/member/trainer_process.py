"""One trainer's part of a job, from joining to leaving, through all terms.

See docs/internals/trainer.md, Terms.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from foreload.base.memory import ProcessUse
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError, CopyLost
from foreload.cache.protocol.handover.migration import warm_up_migration
from foreload.cache.protocol.handover.takeover import warm_up_takeover
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel, StoreAccess, begin_term, join_term, open_no_lanes
from foreload.trainer.assembly.next_term import continue_term, receive_state, segment_after, send_state
from foreload.trainer.assembly.start import Start
from foreload.trainer.cluster.ending import counters_of
from foreload.trainer.cluster.member.coordinator_link import CoordinatorLink
from foreload.trainer.cluster.member.hosted_log import open_log
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.member.run_folder import CannotGoOn, cannot_go_on, keep, open_folder
from foreload.trainer.cluster.member.segment_gate import SegmentGate, StoppedAtSegment
from foreload.trainer.cluster.member.trainer_checkpoints import TrainerCheckpoints
from foreload.trainer.cluster.member.trainer_end import EarlyStopping, await_saved
from foreload.trainer.cluster.member.trainer_terms import TrainerTerms
from foreload.trainer.cluster.messages.faults import FaultPoints, TrainerFault
from foreload.trainer.cluster.messages.rendezvous import StopAgreement
from foreload.trainer.cluster.messages.trainers import (
    Departed,
    Ended,
    EvaluationEnded,
    FaultInjected,
    LeaveWanted,
    StepEnded,
    TrainerEnd,
)
from foreload.trainer.compute import numerics
from foreload.trainer.compute.reports import EvaluationReport, StepReport, Totals
from foreload.trainer.errors import LossNotFinite, PeerLost, after_step
from foreload.trainer.run.model_code import check_same_code
from foreload.trainer.run.servers import asked
from foreload.trainer.saved.kept_manifest import KeptFile
from foreload.trainer.step.commits import TermPosition
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.program import Trainer
from foreload.trainer.step.term_session import TermSession, TrainerParts


class TrainerProcess:
    """One trainer's part of a job, as the launch spec says."""

    def __init__(self, joined: JoinedTrainer, ready: threading.Event, leaving: threading.Event) -> None:
        """Read the first term and the plan.

        Args:
            ready: This object sets it when the process no longer ends together with the launcher.
            leaving: The caller sets it when this trainer shall hand over its lanes and leave.
        """
        spec = joined.spec
        self._points = FaultPoints(spec.faults, joined.number, self._report_fault)
        self._joined = joined = replace(joined, reach_point=self._points.reach_point)
        self._rendezvous, self._events, self._trainer = joined.rendezvous, joined.events, joined.number
        self._job, self._spec, self._ready, self._leaving = joined.job, spec, ready, leaving
        self._leave_sent = self._begun = False
        self._terms = TrainerTerms(joined)
        self._checkpoints = TrainerCheckpoints(joined)
        self._checkpoints.watched = lambda: self._early.so_far
        self._link = CoordinatorLink(joined, self._checkpoints)
        # The last step trained, and the totals of this trainer's steps in this call.
        self._last_step, self._totals = spec.start_step, Totals()
        # Segments of the schedule that were begun, and rows written beyond the schedule.
        self._segments = self._flushed = 0
        self._early = EarlyStopping(self._job.stop_early, spec.watched)
        # The error that ended the last term. Its frames hold the old group, which takes as long to
        # close as to form. So the error is kept until a step of the next term is finished.
        self._over: PeerLost | CopyLost | None = None
        self._hosted: HostedLanes | None = None  # set once lanes are opened

    def run(self) -> None:
        """Train to the end of the schedule, or to an agreed stop.

        Raises:
            ForeloadError: Training failed.
        """
        joined, spec, job = self._joined, self._spec, self._job
        numerics.set_up(job.threads, joined.device, job.cpu_capability)
        self._terms.check_fingerprint(numerics.fingerprint(joined.device), spec.fingerprint)
        self._schedule = schedule = Schedule(job.schedule, follow=job.follow)
        self._folder = folder = open_folder(joined)
        folder.check_schedule(schedule, spec.resumes)
        self._dense = dense = DenseModel.build(job, schedule)
        check_same_code(f"trainer {self._trainer}", spec.code, job)
        if spec.resumes and not joined.joins:
            folder.load_dense(dense, spec.start_step)
        warm_up_migration(self._link.placement)
        if self._terms.survives or joined.joins:
            warm_up_takeover()
        self._checkpoints.prepare(dense.layouts)
        with (
            Store.connect(asked(self._link.stores), job.store_silence, self._link.placement.r) as store,
            self._terms.watched(),
            contextlib.closing(open_log(joined, self._lose_holder)) as log,
        ):
            folder.check_stores(store, job.run_namespace)
            access = StoreAccess(
                store,
                self._link.placement,
                job.run_namespace,
                log.log,
                ownership=Ownership(self._terms.term.number, folder.identity),
                on_shards=self._link.shard_news,
                on_action=self._points.in_traffic if self._points.any else None,
                patience=job.patience,
            )
            self._log, self._terms.keeps_folder = log, log.keeps_folder
            self._run_terms(dense.parts(job, schedule), access)

    def _lose_holder(self, why: str) -> None:
        """End the term, because another trainer with the batch log of a lane does not answer.

        The lane is hosted here. The traffic's thread calls this.
        """
        self._end_waits(why)
        self._terms.break_off()

    def _end_waits(self, why: str) -> None:
        if self._hosted is not None:
            self._hosted.traffic.interrupt(CopyLost(why))

    def _run_terms(self, parts: TrainerParts, access: StoreAccess) -> None:
        """Train in one term after the other, until training ends or this trainer has left."""
        # before: the Trainer that ran the last steps. hosted: the lanes hosted here. Both are kept
        # from one term to the next, and are None until this trainer has them.
        terms, before, hosted = self._terms, None, None
        with contextlib.ExitStack() as stack:
            if self._joined.joins:
                hosted = open_no_lanes(parts, access)
                self._serve(hosted, parts, stack)
                self._link.catch_up()  # needs the traffic
                terms.join()
            self._log.begin_term(terms.term, ())
            while True:
                why, keeps = None, False
                try:
                    with terms.transport() as transport:
                        self._points.reach_point("group formed")
                        session = join_term(parts, transport, terms.term.lane_map, terms.term.copy_map)
                        try:
                            if hosted is None:
                                start = Start(self._spec.start_step, tuple(self._spec.last_batches))
                                before, events = begin_term(parts, access, session, start)
                                hosted = before.lanes
                                self._serve(hosted, parts, stack)
                            else:
                                before, events = self._continue(parts, access, session, before, hosted)
                            if not self._run_term(before, events):
                                return
                        except (Exception, SystemExit) as error:
                            raise self._found_to_fail(error, before) from error
                except CannotGoOn as error:
                    why, keeps = str(error), True
                except (PeerLost, CopyLost) as error:
                    if hosted is None:
                        raise PeerLost(str(error)) from error
                    # The peer may be gone because rows were lost. The probe below finds out whether
                    # this trainer's rows are affected, and reports that instead.
                    self._terms.on_over()
                    self._over, why = error, str(error)
                    if not terms.ends_keeping:
                        try:
                            hosted.traffic.probe()
                        except CacheError as found:
                            if not isinstance(found, CopyLost):
                                why, keeps = self._cannot_go_on(found, before)
                        if not terms.survives:
                            raise
                    self._points.reach_point("term over")
                self._next_term(before, why, keeps)
                self._points.reach_point("rolled back")
                assert hosted is not None
                # A term that keeps trains no step: write what the store lacks to files, and end.
                if terms.term.keeps is not None:
                    given = terms.term, self._trainer, hosted, before, self._last_step, self._dense
                    files = keep(self._folder, self._log, *given)
                    self._points.reach_point("kept")
                    batches = dict.fromkeys(terms.term.lanes_of(self._trainer), 0)
                    self._publish_end(terms.term.committed, True, terms.term.keeps, batches, kept=files)
                    self._await_saved(lambda: None)
                    return
                if not terms.is_member:
                    terms.depart(Departed(self._totals, counters_of(hosted.traffic), ProcessUse.now(), hosted.stored.store.loads))
                    return

    def _serve(self, hosted: HostedLanes, parts: TrainerParts, stack: contextlib.ExitStack) -> None:
        """Start the traffic of the lanes, which serves run requests until `stack` is closed."""
        self._link.serve(hosted, parts.layouts)
        stack.enter_context(hosted.traffic)
        # The traffic's thread may wait in the log for a further term. `stack` closes the log before
        # it closes the traffic, so that this wait ends when no further term comes.
        stack.callback(self._log.close)
        self._hosted = hosted
        if self._joined.start.on_host is not None:
            self._terms.on_over = self._see_over

    def _found_to_fail(self, error: Exception | SystemExit, trainer: Trainer | None) -> Exception | SystemExit:
        """Turn an error that ended a term into CannotGoOn, if the next term can keep the run.

        In that case the other trainers are notified, too.

        Args:
            error: The error.
            trainer: What ran the steps of this term, or of the one before. None if this trainer has
                not trained.

        Returns:
            CannotGoOn, or `error` itself.
        """
        if trainer is None or not self._begun:
            return error
        failed = cannot_go_on(error, trainer, self._trainer)
        if failed is None:
            return error
        self._terms.end_keeping(trainer.commits is None)
        return failed

    def _cannot_go_on(self, error: CacheError, trainer: Trainer | None) -> tuple[str, bool]:
        """Return why the next term shall keep the run, and True; for errors outside a term's steps.

        Raises:
            CacheError: `error` itself, if the run cannot be kept after it.
        """
        failed = self._found_to_fail(error, trainer)
        if not isinstance(failed, CannotGoOn):
            raise error
        return str(failed), True

    def _next_term(self, before: Trainer | None, why: str | None, keeps: bool) -> None:
        """Leave the term, and enter the next one at the committed step.

        On return, the lanes that the new term gives to other trainers are handed over.

        Args:
            before: What ran the last steps. None if this trainer has no state yet.
            why: Why the term ended. If None, the end was planned.
            keeps: This trainer cannot go on, so the next term keeps what the store lacks.

        Raises:
            PeerLost: No further term comes.
            TrainerError: The others counted this trainer as lost.
        """
        terms = self._terms
        self._checkpoints.drop("the term is over")
        commits = None if before is None else before.commits
        # If preparing the new term fails, for example because a trainer with the batch log does not
        # answer, this trainer leaves the new term at once and waits for the one after it.
        while True:
            position = None
            if before is not None:
                position = TermPosition(self._last_step, (), False) if commits is None else commits.position()
            terms.next(position, why, keeps)
            keeping = terms.term.keeps is not None
            if not keeping:
                try:
                    self._log.begin_term(terms.term, () if before is None else before.lanes.numbers)
                except CopyLost as error:
                    why = str(error)
                    continue
            if self._hosted is not None:
                # Waits in the traffic were interrupted when the term ended; from here on they work
                # again.
                self._hosted.traffic.interrupt(None)
                if keeping:
                    self._log.close()
                    self._hosted.traffic.end_unwritten()
            if before is None:
                return
            if commits is not None:
                commits.roll_back(terms.term.committed)
            if keeping:
                return
            try:
                terms.hand_over(commits, before.lanes.numbers)
                return
            except CacheError as error:
                if not terms.is_member:
                    raise
                why, keeps = self._cannot_go_on(error, before)

    def _see_over(self) -> None:
        """Stop every wait for other trainers, because the term is over.

        The thread that watches the term calls this, and so does the main thread.
        """
        why = f"trainer {self._trainer}: term {self._terms.term.number} is over"
        self._log.interrupt(why)
        self._end_waits(why)

    def _continue(
        self, parts: TrainerParts, access: StoreAccess, session: TermSession, before: Trainer | None, hosted: HostedLanes
    ) -> tuple[Trainer, Iterator[Event]]:
        """Prepare to train in a further term, after the committed step.

        Args:
            parts: Schedule, dense model, optimizer and kernels of this trainer.
            access: Access to the store.
            session: Session of the new term.
            before: What trained in the last term. None if this trainer joins.
            hosted: Lanes hosted here.

        Returns:
            The new term's trainer, and its events.
        """
        term = self._terms.term
        # A trainer that joins gets the dense part and the totals from the leader.
        if before is None:
            self._totals, self._early.so_far = receive_state(session.transport, term.members.index(term.leader), parts)
            self._last_step = term.committed
        elif term.joined and session.leads:
            ranks = [term.members.index(trainer) for trainer in term.joined]
            send_state(session.transport, ranks, parts, term.committed, self._totals.shared(), self._early.so_far)
        self._terms.await_handed_over([lane for lane in session.hosted if lane not in hosted.partitions])
        # The former owners of these lanes may know of servers that this trainer does not know yet.
        self._link.catch_up()
        access = replace(access, ownership=replace(access.ownership, term=term.number))
        copies = dict(before.commits.copies) if before is not None and before.commits is not None else {}
        return continue_term(
            parts, access, session, hosted, copies, term.committed, term.seeded, term.stopping, last_owner_dead=term.dead
        )

    def _run_term(self, trainer: Trainer, events: Iterator[Event]) -> bool:
        """Train in a term, to the end of the schedule, to a stop, or to the term's planned end.

        At the end of training all rows are written back, and the leader saves the dense part.

        Returns:
            Whether only the term ended, so that a further one follows.

        Raises:
            PeerLost: The term ended early, because a trainer was lost.
        """
        terms, lanes, session, schedule = self._terms, trainer.lanes, trainer.session, self._schedule
        term = terms.term
        self._link.serve_replicas(term.number, {} if trainer.commits is None else trainer.commits.copies)
        begins = segment_after(schedule, term.committed) if term.number > self._spec.first_term else None
        gate = SegmentGate(self._rendezvous, schedule, events, self._trainer, term, begins)
        self._segments = max(self._segments, gate.begun)
        if self._points.any:
            trainer.on_point = self._points.in_step
        # From here on this process outlives the launcher, and learns from the rendezvous host when
        # the launcher has died.
        self._ready.set()
        if self._joined.interrupts is not None:
            self._joined.interrupts.defer_signals = True
        self._link.report_shards()
        terms.await_begin(numerics.fingerprint(self._joined.device), session)
        self._begun = True
        stopped, failure, goes_on = self._train(trainer, gate)
        self._segments = max(self._segments, gate.begun)
        if goes_on:
            # A trainer that leaves closes its connections, while another one may still wait for a
            # message of the last step. So all of them leave together.
            session.barrier()
            return True
        self._points.reach_point("last write-back")
        self._flushed = lanes.write_everything_back(self._last_step + 1, at_stop=stopped)
        self._points.reach_point("last rows written")
        lost = self._link.finish(term, lambda: terms.check_waiting(session.transport))
        # After this barrier no trainer writes rows, so all rows in the store are of the last step.
        # Only now may the dense part of this step replace that of the last clean stop.
        session.barrier()
        if session.leads:
            self._folder.save_dense(self._dense, self._last_step, term.number, self._on_dense_written)
        self._publish_end(self._last_step, stopped, failure, lanes.last_batches(), lost)
        self._points.reach_point("ended")
        if session.leads or terms.survives or self._joined.start.on_host is not None:
            self._await_saved(terms.check)
        return False

    def _publish_end(
        self,
        step: int,
        stopped: bool,
        failure: str | None,
        batches: dict[int, int],
        lost: Sequence[int] = (),
        kept: tuple[KeptFile, ...] = (),
    ) -> None:
        """Publish how this trainer ended. The arguments are as in `TrainerEnd`."""
        assert self._hosted is not None
        end = TrainerEnd(
            step=step,
            stopped=stopped,
            failure=failure,
            flushed=self._flushed,
            last_batches=batches,
            lost=tuple(lost),
            traffic=counters_of(self._hosted.traffic),
            segments=self._segments,
            prefix=self._schedule.prefix(self._segments),
            totals=self._totals,
            use=ProcessUse.now(),
            loads=self._hosted.stored.store.loads,
            watched=self._early.so_far,
            kept=kept,
        )
        self._rendezvous.publish(end, self._terms.term.number, self._trainer)
        self._events.send_last(Ended())

    def _await_saved(self, check: Callable[[], None]) -> None:
        await_saved(self._joined, self._schedule, self._terms.term, self._log, check)

    def _train(self, trainer: Trainer, gate: SegmentGate) -> tuple[bool, str | None, bool]:
        """Run the program of a term.

        Args:
            trainer: What runs the steps.
            gate: The agreement on segments, which gives the events.

        Returns:
            Whether training stopped early; what went wrong, or None; whether only the term ended.
        """
        agreement = StopAgreement(self._rendezvous, trainer.session.leads, self._terms.term.number, self._stop_by)
        self._checkpoints.now_trains(trainer, lambda: gate.begun)

        def report_state() -> None:
            self._link.report()
            # After SIGTERM, ask the coordinator once to give this trainer's lanes to others.
            if self._leaving.is_set() and not self._leave_sent:
                self._leave_sent = True
                self._events.send(LeaveWanted())

        def on_step(report: StepReport) -> None:
            self._last_step = report.step
            self._totals.add(report)
            self._over = None
            self._events.send(StepEnded(report, time.monotonic()))
            if trainer.session.leads:
                self._link.inject(self._spec.faults, report.step)
            report_state()

        def on_evaluation(report: EvaluationReport) -> None:
            self._events.send(EvaluationEnded(report, self._checkpoints.waits_in(self._terms.term.number, report.step)))

        def stop_after(step: int) -> bool:
            self._checkpoints.after_step(trainer, step)
            return agreement.stop_after(step)

        def ends_after(step: int, reports: Sequence[EvaluationReport]) -> bool:
            self._checkpoints.after_evaluation(trainer, step, self._terms.check, self._link.report)
            ended = self._early.ends_after(trainer.session, step, reports)
            if ended and step < self._schedule.header.end_step - 1:
                agreement.stop_now(step)
            return ended

        def while_waiting() -> None:
            self._terms.check_waiting(trainer.session.transport)
            self._events.flush()
            report_state()

        if agreement.reached(self._last_step):
            trainer.commit_last()
            return True, None, False
        # What the plan asks for by now counts from the next step on, however short the steps are.
        self._link.report(at_once=True)
        self._checkpoints.before_steps(self._last_step, trainer.session.leads)
        trainer.ends_after, events = ends_after, gate.events(while_waiting, lambda: self._link.report(at_once=True))
        try:
            stopped = trainer.run(events, stop_after, on_step, on_evaluation, agreement.goes_on) is not None
            return stopped, None, agreement.goes_on() and stopped
        except StoppedAtSegment as stop:
            # Every trainer comes here, after the same step.
            trainer.commit_last(stopping=not stop.goes_on)
            if stop.failure is None:
                return True, None, stop.goes_on
            return True, f"{stop.failure} (training stopped {after_step(self._last_step)}, with everything saved)", False
        except LossNotFinite as error:
            trainer.commit_last()
            failure = (
                f"{error}; training stopped in its state {after_step(self._last_step)}, with everything saved; train anew with a lower --lr or "
                "--dense-lr, or go on with --resume --allow-nan"
            )
            return True, failure, False

    def _stop_by(self) -> int | None:
        return self._link.plan.stop_by if self._job.stops_before_full else None

    def _on_dense_written(self) -> None:
        self._points.reach_point("dense part written")
        # If this process was suspended for a while, the others may have gone on without it. Then it
        # must not replace the dense part.
        self._terms.check()

    def _report_fault(self, fault: TrainerFault) -> None:
        self._events.send(FaultInjected(fault, time.monotonic()))

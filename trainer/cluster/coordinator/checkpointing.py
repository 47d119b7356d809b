"""The coordinator's side of checkpoints that are saved during training: it has each one taken, written and published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Header
from foreload.trainer.checkpoints.changed_rows import Plan
from foreload.trainer.checkpoints.contents import Checkpoint, Contents
from foreload.trainer.checkpoints.draft import AnyDraft, check_absent, draft, folder_of
from foreload.trainer.checkpoints.files import EXACT_BITS, LEAST_BITS, PartFiles
from foreload.trainer.checkpoints.lineage import Best, Increment, best_in, next_bits, next_increment, of_run, prune
from foreload.trainer.checkpoints.part import GRACE_SECONDS
from foreload.trainer.cluster.coordinator.background_work import FolderWork
from foreload.trainer.cluster.coordinator.training_call import PublishedPlan, TrainingCall
from foreload.trainer.cluster.coordinator.wanted_checkpoints import (
    OVERDUE,
    BestEvaluation,
    HeldTraining,
    Wanted,
    WantedCheckpoints,
    why_over,
)
from foreload.trainer.cluster.messages.facts import GoOnAfter
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import (
    CheckpointPlan,
    CheckpointReport,
    CopyTaken,
    EvaluationEnded,
    PartPlan,
)
from foreload.trainer.errors import CheckpointError, FolderBusy, after_step
from foreload.trainer.job.metric_choice import chosen_set, metric_of
from foreload.trainer.run.directory import CHECKPOINTS
from foreload.trainer.run.event_log import CheckpointNotSaved, CheckpointSaved
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.report import RunReport
from foreload.trainer.step.dense_agreement import check_alike
from foreload.trainer.storage import place


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the files of a checkpoint are put, of how many bits its weights are, and what it is an increment of; None: it has all rows."""

    draft: AnyDraft
    bits: int
    increment: Increment | None


@dataclass(slots=True)
class CheckpointUnderWay:
    """The checkpoint under way. opening: gives None where there is one of its step already; since: when it began, by the call's clock; best: what the
    evaluation was behind its step, where that was the best so far; seconds_waited: how long training waited until it could be begun.
    """

    number: int
    wanted: Wanted
    since: float
    best: Best | None = None
    seconds_waited: float = 0.0
    reports: dict[int, CheckpointReport] = field(default_factory=dict)
    opening: Future[Opened | None] | None = None
    opened: Opened | None = None
    publishing: Future[Checkpoint] | None = None

    @property
    def step(self) -> int:
        """Of which it is, once that is known."""
        return next(iter(self.taken.values())).step

    @property
    def taken(self) -> dict[int, CopyTaken]:
        """Who has it in memory."""
        return {trainer: report.taken for trainer, report in self.reports.items() if report.taken is not None}

    @property
    def written(self) -> dict[int, PartFiles]:
        """Whose files are there."""
        return {trainer: report.files for trainer, report in self.reports.items() if report.files is not None}

    def note(self, trainer: int, report: CheckpointReport) -> bool:
        """A trainer reports; returns whether it has it in memory, and had not. Raises DenseDiverged where its dense part is not that of the others:
        training must end then.
        """
        before = self.reports.get(trainer)
        self.reports[trainer] = report
        if report.taken is None or (before is not None and before.taken is not None):
            return False
        check_alike({holder: taken.dense for holder, taken in self.taken.items()}, report.taken.step)
        return True

    def contents(self, manifest: Manifest, totals: dict[str, float], header: Header, layouts: Sequence[RowLayout]) -> Contents:
        """What its manifest says, once all have written. manifest: the run's; totals: as after its step."""
        assert self.opened is not None
        taken, increment = next(iter(self.taken.values())), self.opened.increment
        files = [file for written in self.written.values() for file in written.rows]
        dense = next(written.dense for written in self.written.values() if written.dense is not None)
        stage = replace(manifest.stages[-1], segments=taken.segments, prefix=taken.prefix)
        given = {lane: ordinals for one in self.taken.values() for lane, ordinals in one.given.items()}
        ordinals = np.array([given[lane] for lane in range(manifest.lanes)], np.int64)
        run = replace(manifest, stages=(*manifest.stages[:-1], stage), watched=taken.watched)
        base = () if increment is None else (increment.base, increment.sizes)
        encoded = header.features, header.settings.get("encoding")
        return Contents.made(run, *encoded, taken.step, totals, layouts, ordinals, files, dense, *base)

    def metrics_line(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What metrics.jsonl has of it, once it is there."""
        assert self.opened is not None
        return {
            "step": checkpoint.contents.step,
            "checkpoint": str(checkpoint.place),
            "rows": sum(file.rows for file in checkpoint.contents.rows),
            "bits": self.opened.bits,
            "bytes": checkpoint.own_bytes,
            "seconds": max(written.seconds for written in self.written.values()),
            "seconds_stalled": max(taken.seconds for taken in self.taken.values()),
            **({"seconds_waited": self.seconds_waited} if self.seconds_waited else {}),
        }


class Checkpointing:
    """The checkpoints of one call. wanted: which ones are to be. plan: what trainers are told.

    Nothing waits for the folder of checkpoints: what is done there is done by a thread, one thing after the other.
    """

    def __init__(self, call: TrainingCall, rendezvous: Rendezvous, plan: PublishedPlan, report: RunReport) -> None:
        job, self._call, self._schedule = call.job, call, call.schedule
        self._every, self._keep, self._metric = job.checkpoint_every, job.keep, job.keep_best
        self._policy, self._bits, self._failures_a_day = job.checkpoint_policy, job.checkpoint_bits, job.failures_a_day
        self._most_bits = LEAST_BITS  # that --checkpoint-bits auto has chosen so far
        self._folder = place(job.checkpoint) if job.checkpoint is not None else call.run.path / CHECKPOINTS
        self.wanted = WantedCheckpoints(job, self._folder, call.schedule.header, call.clock)
        self._rendezvous, self._report, self._plan, self._at_point = rendezvous, report, plan, call.observer.at_checkpoint
        self._saving: CheckpointUnderWay | None = None
        self._folder_work = FolderWork()
        self._best = BestEvaluation(call, self._folder, rendezvous, self._folder_work)
        self._discarded: list[AnyDraft] = []
        self._count = 0
        self.saved = self.failed = 0
        self.last_step: int | None = None
        self._last_here: int | None = None  # in the folder of this call
        self._last_bits: int | None = None

    def poll(self, members: Sequence[int], goes_on: bool) -> None:
        """Go on with the one under way, or begin the next. goes_on: training does, so that one can be begun."""
        if self._best.held is not None:
            self._see_held(self._best.held, goes_on)
        elif goes_on:
            self._make_room()
        saving = self._saving
        if saving is None:
            # What is asked for as trainers start or change waits.
            if goes_on and self._best.held is None:
                self._begin_next()
            return
        if saving.reports.keys() >= set(members):
            self._change(ready=True)
        try:
            if saving.best is not None and saving.taken and saving.opening is None and self.wanted.may_begin():
                self._open(saving)
            if saving.opening is not None and saving.opened is None and saving.opening.done():
                self._have_written(saving, saving.opening.result())
            if saving.publishing is None:
                if saving.written.keys() >= set(members) and self._report.kept_totals is not None:
                    self._publish(saving)
            elif saving.publishing.done():
                self._now_published(saving, saving.publishing.result())
        except (CheckpointError, ScheduleError) as error:
            again = isinstance(error, FolderBusy) and self.wanted.waits()
            if again and saving.best is not None and saving.opened is None:
                saving.opening = None  # its copy is kept
            else:
                self._give_up(str(error), again)

    def finish(self, members: Sequence[int], wait: Callable[[Future[Any], float], None]) -> None:
        """Training is over: publish what all have written. wait: returns when a future is done, or after so many seconds."""
        self.poll(members, goes_on=False)
        if self._saving is not None and self._saving.publishing is not None:
            wait(self._saving.publishing, GRACE_SECONDS)
            self.poll(members, goes_on=False)

    def _make_room(self) -> None:
        """Give up the one under way where another one is to be before."""
        saving = self._saving
        if saving is None or saving.publishing is not None:
            return
        if not saving.taken:
            if self.wanted.is_sooner(saving.wanted, self._report.last_step):
                self._give_up("another one is wanted", again=True)
        elif self.wanted.gives_way(saving.wanted, saving.step, self._report.last_step):
            self._give_up("an evaluation is near, whose checkpoint may be the best", again=True)

    def _change(self, **fields: Any) -> None:
        """Tell trainers more of the checkpoint under way."""
        plan = self._plan.now.checkpoint
        assert plan is not None
        self._plan.change(checkpoint=replace(plan, **fields))

    def _begin_next(self) -> None:
        wanted = self.wanted.next(self._report.last_step)
        if wanted is None:
            return
        self._begin(wanted)
        self._plan.change(checkpoint=CheckpointPlan(self._count, wanted.every, wanted.steps))

    def _begin(self, wanted: Wanted, best: Best | None = None) -> None:
        self._count += 1
        self._saving = CheckpointUnderWay(self._count, wanted, self._call.clock(), best)
        self._report.keep_totals(None)

    def _see_held(self, held: HeldTraining, goes_on: bool) -> None:
        """Training waits: begin the checkpoint of its step when the one under way is over, or let it go on where that takes too long to end."""
        saving, step = self._saving, held.best.step
        if self._best.is_overdue(goes_on):
            if saving is not None and saving.number == held.number:
                self._give_up(OVERDUE)
            else:
                self._best.go_on(OVERDUE)
            return
        if saving is not None and not saving.taken and saving.number != held.number:
            self._give_up("that of the best evaluation so far comes before it", again=True)
        if self._saving is None:
            self._begin(Wanted(self._folder, None, None, (step,)), held.best)
            held.number = self._count
            self._plan.change(checkpoint=CheckpointPlan(self._count, None, (step,), step))

    def evaluated(self, event: EvaluationEnded) -> None:
        """An evaluation of a set: keep a checkpoint of the step before it, if it is the best so far. One that is reported again is no better."""
        report, saving = event.report, self._saving
        if self._metric is None or report.set != chosen_set(self._metric, self._schedule.header.set_names)[0]:
            return
        measured = metric_of([report], self._metric)
        best = self._best.so_far(None if saving is None else saving.best)
        better = measured.is_better_than(None if best is None else best.value)
        best = Best(self._call.manifest.run_id, self._metric, measured.value, report.step)
        has_replica = (
            saving is not None and bool(saving.taken) and saving.step == report.step and saving.wanted.folder == self._folder
        )
        there = self._last_here == report.step
        if better and event.waits_in is not None and not there and not has_replica:
            self._best.held = HeldTraining(event.waits_in, best, self._call.clock())
            return
        if better and there:
            self._best.note(best)
        elif better and not has_replica:
            self._best.tell_missing(best, "the copy of it was given up")
        if saving is not None and has_replica:
            saving.best = best if better else saving.best
            if saving.opening is None and better:
                self._open(saving)
            elif saving.opening is None and saving.best is None:
                self._give_up("it is not the best", again=True)
        if event.waits_in is not None:
            self._rendezvous.publish(GoOnAfter(), event.waits_in, report.step)

    def _open(self, saving: CheckpointUnderWay) -> None:
        """Its step is known: make the draft of it, unless it is there already, from before the run was broken off."""
        folder, step, run, planned = saving.wanted.folder, saving.step, self._call.manifest, self._planned(saving.step)
        field_name = "--checkpoint" if saving.wanted.asked is None else "--to"
        totals = self._report.totals
        # With auto never fewer than before: a checkpoint with more bits could not be an increment of that.
        bits = next_bits(self._bits, run, totals.steps, totals.seconds, self._failures_a_day, self._most_bits)
        policy, self._most_bits, first_step = self._policy, bits, self._schedule.header.first_step

        def opened() -> Opened | None:
            begun = draft(folder, field_name, step, run.run_id)  # from here on none is deleted there
            try:
                own = of_run(folder, run)
                if any(one.contents.step == step for one in own):
                    begun.discard()
                    return None
                check_absent(folder, step)  # of another run
                increment = next_increment(own, run, step, policy, bits, planned)
            except BaseException:
                begun.discard()
                raise
            # Of what an earlier schedule changed, this one says nothing.
            known = increment is not None and increment.base.contents.step >= first_step - 1
            return Opened(begun, bits, increment if known else None)

        saving.opening = self._folder_work.submit(opened)

    def _planned(self, step: int) -> Plan | None:
        """For policy planned: the checkpoints that are to come, this one first."""
        if self._policy != "planned" or self._every is None or self._every.steps is None:
            return None
        return Plan.of(self._schedule, step, self._every.steps, self._call.layouts)

    def _have_written(self, saving: CheckpointUnderWay, opened: Opened | None) -> None:
        """Have trainers write their parts."""
        if opened is None:
            if saving.best is not None:
                self._best.note(saving.best)
                saving.best = None
            self._give_up("it is there already", again=True)
            return
        saving.opened = opened
        base = None if opened.increment is None else opened.increment.base.contents
        since, known = (-1, ()) if base is None else (base.step, base.ordinals)
        self._at_point("begun")
        self._change(part=PartPlan(str(opened.draft.path.absolute()), since, known, opened.bits))

    def receive(self, trainer: int, report: CheckpointReport) -> None:
        """What a trainer reports of one; of one before the last it does not count. Raises DenseDiverged."""
        saving = self._saving
        if saving is None or saving.number != report.number:
            return
        first = not saving.taken
        if report.failed is not None:
            self._give_up(f"trainer {trainer}: {report.failed}")
        elif saving.note(trainer, report):
            self._report.keep_totals(saving.step)
            # One for an evaluation waits for what that says.
            every, held = saving.wanted.every, self._best.held
            if first and (saving.best is not None or (every is not None and (saving.step + 1) % every == 0)):
                self._open(saving)
            if held is not None and held.number == saving.number:
                saving.seconds_waited = self._best.has_replica()

    def on_term(self) -> None:
        """The trainers, or their lanes, are others now: what they have not written cannot be finished; what they waited behind is reported again."""
        held, self._best.held = self._best.held, None
        if self._saving is not None and self._saving.publishing is None:
            if held is not None:
                self._saving.best = None  # it is not any more
            self._give_up("the trainers, or their lanes, changed meanwhile", again=True)

    def close(self, at_rest: bool) -> None:
        """Trainers are gone: leave nothing half written. at_rest: the run has come to rest."""
        over = why_over(at_rest)
        saving, self._saving = self._saving, None
        if saving is not None:
            self._discard(saving)
            if saving.best is not None:
                self._best.tell_missing(saving.best, over)
            if saving.taken or saving.wanted.asked is not None:
                self._failed(saving.wanted, over)
        for given_up in self._discarded:
            self._folder_work.submit(given_up.discard)  # again: a trainer may have been writing there
        self._folder_work.close()
        self.wanted.refuse(over)

    def _give_up(self, why: str, again: bool = False) -> None:
        """again: begin another one at once, as nothing is wrong with where it is put."""
        saving, self._saving = self._saving, None
        assert saving is not None
        self._plan.change(checkpoint=None)
        self._discard(saving)
        held = self._best.held
        if held is not None and held.number == saving.number:
            self._best.go_on(why)
        elif saving.best is not None and (not again or self._report.last_step > saving.best.step):
            self._best.tell_missing(saving.best, why)  # otherwise it is reported again
        if again:
            self.wanted.again(saving.wanted)
        else:
            self._failed(saving.wanted, why)

    def _discard(self, saving: CheckpointUnderWay) -> None:
        """Leave nothing of its files, once what is being done with them is over."""
        opening = saving.opening

        def discard() -> None:
            if opening is None or opening.exception() is not None or (opened := opening.result()) is None:
                return
            opened.draft.discard()
            self._discarded.append(opened.draft)

        self._folder_work.submit(discard)

    def _failed(self, wanted: Wanted, why: str) -> None:
        """Report that there is no checkpoint, though one was due or asked for."""
        self.failed += 1
        self._report.checkpoint({"failed": why})
        self._call.events.note(CheckpointNotSaved(cause=why))
        self._call.say(f"foreload: warning: a checkpoint was not saved: {why}")
        self.wanted.failed(wanted, why)

    def _publish(self, saving: CheckpointUnderWay) -> None:
        totals, opened = self._report.kept_totals, saving.opened
        assert totals is not None
        assert opened is not None
        contents = saving.contents(self._call.manifest, totals, self._schedule.header, self._call.layouts)

        def published() -> Checkpoint:
            if opened.increment is not None:
                opened.increment.check_base()
            checkpoint = opened.draft.publish(contents, lambda: self._at_point("manifest written"))
            self._at_point("published")
            return checkpoint

        saving.publishing = self._folder_work.submit(published)

    def _now_published(self, saving: CheckpointUnderWay, checkpoint: Checkpoint) -> None:
        self._saving = None
        self._plan.change(checkpoint=None)
        contents, wanted = checkpoint.contents, saving.wanted
        self.saved += 1
        self.last_step, self._last_bits = contents.step, checkpoint.bits
        if wanted.folder == self._folder:
            self._last_here = contents.step
            if saving.best is not None:
                self._best.note(saving.best)
        line = saving.metrics_line(checkpoint)
        bits = "" if line["bits"] == EXACT_BITS else f", weights of {line['bits']} bits"
        self._report.checkpoint(line)
        self._call.events.note(CheckpointSaved(checkpoint=str(checkpoint.place)))
        self._call.say(
            f"checkpoint {checkpoint.place}: {after_step(contents.step)}, {line['rows']:,} of {contents.row_count:,} rows{bits}, "
            f"{line['bytes'] / 2**20:,.1f} MiB in "
            f"{line['seconds']:.1f} s, during which training stood still for {1000 * line['seconds_stalled']:.0f} ms"
            + (f", after it had waited {saving.seconds_waited:.1f} s for the one before" if saving.seconds_waited else "")
        )
        self.wanted.now_saved(wanted, str(checkpoint.place), saving.since, self._report.last_step - contents.step)
        if wanted.asked is None:
            self._prune()

    def _prune(self) -> None:
        """Delete the checkpoints that are to go."""
        run = self._call.manifest

        def pruned() -> None:
            try:
                best = best_in(self._folder)
                prune(self._folder, run, self._keep, () if best is None else (folder_of(best.step),))
            except FolderBusy:
                pass  # the next one sees to it
            except CheckpointError as error:
                self._call.say(f"foreload: warning: {error}")
            self._at_point("old ones deleted")

        self._folder_work.submit(pruned)

    def summary(self) -> dict[str, Any]:
        """What summary.json has of all of them."""
        return {
            "saved": self.saved,
            "failed": self.failed,
            "last_step": self.last_step,
            "last_bits": self._last_bits,
            **self._best.summary(),
        }

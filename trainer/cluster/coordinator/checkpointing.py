"""The coordinator's side of saving checkpoints during training.

It has the trainers take each checkpoint in memory and write their parts, and publishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.format import Header
from foreload.trainer.checkpoints.best import Best, best_in
from foreload.trainer.checkpoints.changed_rows import Plan
from foreload.trainer.checkpoints.contents import Checkpoint, Contents
from foreload.trainer.checkpoints.draft import AnyDraft, check_absent, draft, folder_of
from foreload.trainer.checkpoints.files import EXACT_BITS, LEAST_BITS, PartFiles
from foreload.trainer.checkpoints.lineage import Increment, next_bits, next_increment, of_run, prune
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
    """The draft of a checkpoint, as it is written.

    Attributes:
        draft: The folder, not published yet, that gets the files.
        bits: The number of bits of a weight.
        increment: What the checkpoint is an increment of. If None, it has all rows.
    """

    draft: AnyDraft
    bits: int
    increment: Increment | None


@dataclass(slots=True)
class CheckpointUnderWay:
    """The checkpoint that is being saved.

    Attributes:
        number: The number of the checkpoint, by which trainers report it.
        wanted: Where it goes, and why it is saved.
        since: When it began, by the call's clock.
        best: The evaluation after its step, if that was the best so far.
        seconds_waited: How long training waited until it could be begun.
        reports: The last report of each trainer.
        opening: The making of its draft. Gives None if a checkpoint of its step exists already.
        opened: The draft, once it is made.
        publishing: The publication, once all trainers have written their parts.
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
        """The step of the checkpoint. Known once a trainer has taken it."""
        return next(iter(self.taken.values())).step

    @property
    def taken(self) -> dict[int, CopyTaken]:
        """The trainers that have the checkpoint in memory, with their reports of that."""
        return {trainer: report.taken for trainer, report in self.reports.items() if report.taken is not None}

    @property
    def written(self) -> dict[int, PartFiles]:
        """The trainers whose files are written, with these files."""
        return {trainer: report.files for trainer, report in self.reports.items() if report.files is not None}

    def note(self, trainer: int, report: CheckpointReport) -> bool:
        """Record a trainer's report.

        Returns:
            Whether by this report the trainer first has the checkpoint in memory.

        Raises:
            DenseDiverged: Its dense part differs from the others'. Training must end then.
        """
        before = self.reports.get(trainer)
        self.reports[trainer] = report
        if report.taken is None or (before is not None and before.taken is not None):
            return False
        check_alike({holder: taken.dense for holder, taken in self.taken.items()}, report.taken.step)
        return True

    def contents(self, manifest: Manifest, totals: dict[str, float], header: Header, layouts: Sequence[RowLayout]) -> Contents:
        """Return the contents of the checkpoint's manifest. Call it once all trainers have written.

        Args:
            totals: The run's totals after the checkpoint's step.
        """
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
        """Return the line of the published checkpoint for metrics.jsonl."""
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
    """The checkpoints of one call.

    The coordinator never waits for the folder of checkpoints: a thread does all work there, one
    thing after the other.

    Args:
        report: The report of the trainers' steps, which also gets a line per checkpoint.

    Attributes:
        wanted: Decides which checkpoint is next.
        saved: The number of checkpoints saved.
        failed: The number of checkpoints that were due or requested and could not be saved.
        last_step: The step of the last checkpoint saved. None if none was.
    """

    def __init__(self, call: TrainingCall, rendezvous: Rendezvous, plan: PublishedPlan, report: RunReport) -> None:
        job, self._call, self._schedule = call.job, call, call.schedule
        self._every, self._keep, self._metric = job.checkpoint_every, job.keep, job.keep_best
        self._policy, self._bits, self._failures_a_day = job.checkpoint_policy, job.checkpoint_bits, job.failures_a_day
        # --checkpoint-bits auto never chooses fewer bits than before.
        self._least_bits = LEAST_BITS
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
        self._last_here: int | None = None  # step of the last one in this call's own folder
        self._last_bits: int | None = None

    def poll(self, members: Sequence[int], goes_on: bool) -> None:
        """Go on with the checkpoint under way, or begin the next one.

        Args:
            goes_on: Whether training goes on, so that a checkpoint can be begun.
        """
        if self._best.held is not None:
            self._see_held(self._best.held, goes_on)
        elif goes_on:
            self._make_room()
        saving = self._saving
        if saving is None:
            # Requests that arrive while trainers start or change wait until training goes on.
            if goes_on and self._best.held is None:
                self._begin_next()
            return
        # The leader names the step only when every trainer knows of the checkpoint; otherwise a
        # trainer could pass that step without taking it.
        if saving.reports.keys() >= set(members) and self._change(ready=True):
            self._at_point("known")
        try:
            # The folder was busy when the draft was to be made. Try again after a pause.
            if saving.best is not None and saving.taken and saving.opening is None and self.wanted.may_begin():
                self._open(saving)
            if saving.opening is not None and saving.opened is None and saving.opening.done():
                self._have_written(saving, saving.opening.result())
            if saving.publishing is None:
                # The totals exist once all members have reported the step, so the step counts.
                if saving.written.keys() >= set(members) and self._report.kept_totals is not None:
                    self._publish(saving)
            elif saving.publishing.done():
                self._now_published(saving, saving.publishing.result())
        except (CheckpointError, ScheduleError) as error:
            again = isinstance(error, FolderBusy) and self.wanted.waits()
            if again and saving.best is not None and saving.opened is None:
                # The trainers keep what they have in memory, and only the draft is tried again.
                saving.opening = None
            else:
                self._give_up(str(error), again)

    def begin_before_steps(self) -> None:
        """Begin the next checkpoint before the steps of a term begin.

        Every trainer reads the plan after the term begins and before its first step, so all of them
        know of this checkpoint, however short the steps are.
        """
        if self._saving is None and self._begin_next(ready=True):
            self._at_point("known")

    def finish(self, members: Sequence[int], wait: Callable[[Future[Any], float], None]) -> None:
        """Publish a checkpoint that all trainers have written. Call it once training is over.

        Args:
            members: The members of the last term.
            wait: Returns when a future is done, or after that many seconds.
        """
        self.poll(members, goes_on=False)
        if self._saving is not None and self._saving.publishing is not None:
            wait(self._saving.publishing, GRACE_SECONDS)
            self.poll(members, goes_on=False)

    def _make_room(self) -> None:
        """Give up the checkpoint under way if another one must come before it."""
        saving = self._saving
        if saving is None or saving.publishing is not None:
            return
        if not saving.taken:
            if self.wanted.is_sooner(saving.wanted, self._report.last_step):
                self._give_up("another checkpoint must be saved first", again=True)
        elif self.wanted.gives_way(saving.wanted, saving.step, self._report.last_step):
            self._give_up("an evaluation is near, and its checkpoint may be the best", again=True)

    def _change(self, **fields: Any) -> bool:
        """Publish changed fields of the plan of the checkpoint under way, if any differs.

        Returns:
            Whether any differs.
        """
        plan = self._plan.now.checkpoint
        assert plan is not None
        changed = replace(plan, **fields)
        self._plan.change(checkpoint=changed)
        return changed != plan

    def _begin_next(self, ready: bool = False) -> bool:
        """Begin the next checkpoint, if one is wanted. Returns whether one is."""
        wanted = self.wanted.next(self._report.last_step)
        if wanted is None:
            return False
        self._begin(wanted)
        self._plan.change(checkpoint=CheckpointPlan(self._count, wanted.every, wanted.steps, ready=ready))
        return True

    def _begin(self, wanted: Wanted, best: Best | None = None) -> None:
        self._count += 1
        self._saving = CheckpointUnderWay(self._count, wanted, self._call.clock(), best)
        self._report.keep_totals(None)

    def _see_held(self, held: HeldTraining, goes_on: bool) -> None:
        """See to training that waits after the best evaluation so far.

        Begin the checkpoint of its step as soon as no other is under way. If training is to end, or
        trainers to change, and the checkpoint takes too long, let training go on without it.
        """
        saving, step = self._saving, held.best.step
        if self._best.is_overdue(goes_on):
            if saving is not None and saving.number == held.number:
                self._give_up(OVERDUE)
            else:
                self._best.go_on(OVERDUE)
            return
        if saving is not None and not saving.taken and saving.number != held.number:
            self._give_up("the checkpoint of the best evaluation so far must be saved first", again=True)
        if self._saving is None:
            self._begin(Wanted(self._folder, None, None, (step,)), held.best)
            held.number = self._count
            self._plan.change(checkpoint=CheckpointPlan(self._count, None, (step,), step))

    def evaluated(self, event: EvaluationEnded) -> None:
        """Handle an evaluation: if it is the best so far, keep a checkpoint of its step.

        An evaluation that is reported again, as after a rollback, is no better than before.
        """
        report, saving = event.report, self._saving
        if self._metric is None or report.set != chosen_set(self._metric, self._schedule.header.set_names)[0]:
            return
        measured = metric_of([report], self._metric)
        best = self._best.so_far(None if saving is None else saving.best)
        better = measured.is_better_than(None if best is None else best.value)
        best = Best(self._call.manifest.run_id, self._metric, measured.value, report.step)
        in_memory = (
            saving is not None and bool(saving.taken) and saving.step == report.step and saving.wanted.folder == self._folder
        )
        there = self._last_here == report.step
        # Neither the folder nor the trainers' memory has this step, and training can still wait:
        # hold it until the checkpoint is taken.
        if better and event.waits_in is not None and not there and not in_memory:
            self._best.held = HeldTraining(event.waits_in, best, self._call.clock())
            return
        if better and there:
            self._best.note(best)
        elif better and not in_memory:
            self._best.warn_missing(best, "its snapshot was given up")
        if saving is not None and in_memory:
            saving.best = best if better else saving.best
            if saving.opening is None and better:
                self._open(saving)
            elif saving.opening is None and saving.best is None:
                self._give_up("it is not the best", again=True)
        # Training waits, but no checkpoint of this step is to be taken.
        if event.waits_in is not None:
            self._rendezvous.publish(GoOnAfter(), event.waits_in, report.step)

    def _open(self, saving: CheckpointUnderWay) -> None:
        """Make the draft of a checkpoint whose step is known.

        No draft is made if this run has a checkpoint of that step already, from before it crashed.
        """
        folder, step, run, planned = saving.wanted.folder, saving.step, self._call.manifest, self._planned(saving.step)
        field_name = "--checkpoint" if saving.wanted.asked is None else "--to"
        totals = self._report.totals
        # With --checkpoint-bits auto the bits never decrease: a later checkpoint with more bits
        # could not be an increment of one with fewer.
        bits = next_bits(self._bits, run, totals.steps, totals.seconds, self._failures_a_day, self._least_bits)
        policy, self._least_bits, first_step = self._policy, bits, self._schedule.header.first_step

        def opened() -> Opened | None:
            # While the draft is held, foreload deletes no checkpoint in this folder, so the base
            # that is chosen below stays.
            begun = draft(folder, field_name, step, run.run_id)
            try:
                own = of_run(folder, run)
                if any(one.contents.step == step for one in own):
                    begun.discard()
                    return None
                check_absent(folder, step)  # one of another run
                increment = next_increment(own, run, step, policy, bits, planned)
            except BaseException:
                begun.discard()
                raise
            # This schedule does not say which rows an earlier schedule changed, so a base from
            # before this schedule cannot be used.
            known = increment is not None and increment.base.contents.step >= first_step - 1
            return Opened(begun, bits, increment if known else None)

        saving.opening = self._folder_work.submit(opened)

    def _planned(self, step: int) -> Plan | None:
        """Return the checkpoints to come, this one first, for policy "planned"; otherwise None.

        It is None also if checkpoints are not due by steps.
        """
        if self._policy != "planned" or self._every is None or self._every.steps is None:
            return None
        return Plan.of(self._schedule, step, self._every.steps, self._call.layouts)

    def _have_written(self, saving: CheckpointUnderWay, opened: Opened | None) -> None:
        """Have the trainers write their parts into the draft."""
        if opened is None:
            if saving.best is not None:
                self._best.note(saving.best)
                saving.best = None
            self._give_up("it exists already", again=True)
            return
        saving.opened = opened
        base = None if opened.increment is None else opened.increment.base.contents
        since, known = (-1, ()) if base is None else (base.step, base.ordinals)
        self._at_point("begun")
        self._change(part=PartPlan(str(opened.draft.path.absolute()), since, known, opened.bits))

    def receive(self, trainer: int, report: CheckpointReport) -> None:
        """Handle a trainer's report. Reports of earlier checkpoints are ignored.

        Raises:
            DenseDiverged: The trainer's dense part differs from the others'.
        """
        saving = self._saving
        if saving is None or saving.number != report.number:
            return
        first = not saving.taken
        if report.failed is not None:
            self._give_up(f"trainer {trainer}: {report.failed}")
        elif saving.note(trainer, report):
            self._report.keep_totals(saving.step)
            # A checkpoint that is only for an evaluation is opened when the evaluation turns out to
            # be the best so far.
            every, held = saving.wanted.every, self._best.held
            if first and (saving.best is not None or (every is not None and (saving.step + 1) % every == 0)):
                self._open(saving)
            if held is not None and held.number == saving.number:
                saving.seconds_waited = self._best.end_wait()

    def on_term(self) -> None:
        """Give up the checkpoint under way: the trainers, or their lanes, have changed.

        Its parts can no longer be finished, unless it is being published already. If training
        waited after an evaluation, the new term reports that evaluation again.
        """
        held, self._best.held = self._best.held, None
        if self._saving is not None and self._saving.publishing is None:
            # A better evaluation was held, so this one is no longer the best.
            if held is not None:
                self._saving.best = None
            self._give_up("the trainers, or their lanes, changed meanwhile", again=True)

    def close(self, stopped: bool) -> None:
        """Discard unfinished checkpoints. Call it once the trainers have ended.

        Args:
            stopped: Whether the run has stopped, with everything saved.
        """
        over = why_over(stopped)
        saving, self._saving = self._saving, None
        if saving is not None:
            self._discard(saving)
            if saving.best is not None:
                self._best.warn_missing(saving.best, over)
            if saving.taken or saving.wanted.asked is not None:
                self._failed(saving.wanted, over)
        # Discard given up drafts once more: a trainer may have written there after the first time.
        for given_up in self._discarded:
            self._folder_work.submit(given_up.discard)
        self._folder_work.close()
        self.wanted.refuse(over)

    def _give_up(self, why: str, again: bool = False) -> None:
        """Give up the checkpoint under way.

        Args:
            why: The reason, for the user.
            again: Whether another one is begun at once instead of counting a failure, since nothing
                is wrong with its folder. A requested checkpoint is then the next.
        """
        saving, self._saving = self._saving, None
        assert saving is not None
        self._plan.change(checkpoint=None)
        self._discard(saving)
        held = self._best.held
        if held is not None and held.number == saving.number:
            self._best.go_on(why)
        # Otherwise the evaluation is reported again, and gets its checkpoint then.
        elif saving.best is not None and (not again or self._report.last_step > saving.best.step):
            self._best.warn_missing(saving.best, why)
        if again:
            self.wanted.again(saving.wanted)
        else:
            self._failed(saving.wanted, why)

    def _discard(self, saving: CheckpointUnderWay) -> None:
        """Delete the files of a checkpoint, once the folder's thread is through with them."""
        opening = saving.opening

        def discard() -> None:
            if opening is None or opening.exception() is not None or (opened := opening.result()) is None:
                return
            opened.draft.discard()
            self._discarded.append(opened.draft)

        self._folder_work.submit(discard)

    def _failed(self, wanted: Wanted, why: str) -> None:
        """Report that a checkpoint which was due or requested was not saved."""
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
            # An increment whose base was removed or replaced meanwhile would be of no use.
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
            f"{line['seconds']:.1f} s, during which training paused for {1000 * line['seconds_stalled']:.0f} ms"
            + (f", after waiting {saving.seconds_waited:.1f} s for the checkpoint before it" if saving.seconds_waited else "")
        )
        self.wanted.now_saved(wanted, str(checkpoint.place), saving.since, self._report.last_step - contents.step)
        if wanted.asked is None:
            self._prune()

    def _prune(self) -> None:
        """Delete the run's checkpoints but the --keep newest, the best, and those they build on."""
        run = self._call.manifest

        def pruned() -> None:
            try:
                best = best_in(self._folder)
                prune(self._folder, run, self._keep, () if best is None else (folder_of(best.step),))
            # Another process is saving there. The next checkpoint prunes the folder again.
            except FolderBusy:
                pass
            except CheckpointError as error:
                self._call.say(f"foreload: warning: {error}")
            self._at_point("old ones deleted")

        self._folder_work.submit(pruned)

    def summary(self) -> dict[str, Any]:
        """Return the figures of all checkpoints for summary.json."""
        return {
            "saved": self.saved,
            "failed": self.failed,
            "last_step": self.last_step,
            "last_bits": self._last_bits,
            **self._best.summary(),
        }

"""The coordinator's side of --auto: it measures steps, and acts on decisions (`trainer.adjusting`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from foreload.base.errors import ForeloadError
from foreload.base.memory import processor_seconds_of, total_bytes
from foreload.cache.client.load import ShardLoad, slower
from foreload.cache.protocol.handover.migration import COMING_SHARE, MOVING_SHARE
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.trainer.adjusting.adviser import Adviser, Judged
from foreload.trainer.adjusting.decision import (
    Action,
    Costs,
    MoveShard,
    ReplaceTrainer,
    Resize,
    Situation,
    SlowShard,
    SlowTrainer,
    choices,
    decide,
    slow_trainer,
)
from foreload.trainer.adjusting.prediction import Machine, Work
from foreload.trainer.adjusting.shares import Choice, Grant, Needs, Share
from foreload.trainer.adjusting.size import Size
from foreload.trainer.adjusting.window import WARM_UP_STEPS, Window
from foreload.trainer.assembly.job_shape import cores
from foreload.trainer.cluster.coordinator.background_work import in_background
from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.row_migration import RowMigration
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.messages.control import Answer, AskMove, AskScale, Refused
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import DRY_RUN, STORES, Pool
from foreload.trainer.job.memory_check import store_bytes, trainer_bytes
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.run.event_log import Adjusted, AdjustmentJudged
from foreload.trainer.run.shard_change import ENGINE

# What the store moves in a second, as long as it is never seen busy, and what the start or the end
# of a trainer takes from training: a pause, and the start's processor time on one of the cores.
_BYTES_PER_SECOND = 2e7
_PAUSE_SECONDS, _START_SECONDS = 0.5, 4.0
_JOINS_AFTER = 10.0  # seconds from a trainer's start to its first step
# A shard is slow if its answers take so many times the median of the others', by this much longer.
_SLOW_TIMES, _SLOW_SECONDS = 3.0, 0.002
_LEAST_EXCHANGES = 5


class Adjustments:
    """The changes that --auto makes in one call.

    Attributes:
        counts: How many changes were made, and found to pay ("paid") or not ("unpaid"). Empty
            without --auto.
        loads: The load of the store shards, by number, that each trainer has last reported.
    """

    def __init__(self, call: TrainingCall, scaling: Scaling, moves: RowMigration, shards: StoreShards, engine: Engine) -> None:
        self._call, self._scaling, self._moves, self._shards, self._engine = call, scaling, moves, shards, engine
        job = call.job
        self._pool = job.pool or Pool()
        self._on = bool(job.auto) and not under_scheduler()
        # A thread reads the whole schedule at first, which may take seconds.
        self._reading = in_background(lambda: Work(call.schedule).advance()) if self._on else None
        self._window = Window(warm_up_steps=WARM_UP_STEPS)
        self._row_bytes = _mean_row_bytes(call.layouts)
        self._most_by_memory = _most_by_memory(call, self._pool) if self._on else 0
        self._adviser = Adviser()
        self.counts = dict.fromkeys(("made", "paid", "unpaid"), 0) if self._on else {}
        self._least_shards = moves.placement.k + moves.placement.r if moves.placement.r else 1
        self._needs: Needs | None = engine.needs if self._on else None
        self._choices: tuple[Choice, ...] = ()  # what was last reported to the pool of other sizes
        self._share: Share | None = None
        if self._needs is not None and call.start.step < call.schedule.header.first_step:
            # What a new run begins with is reserved, and stays.
            self._least_shards = max(self._least_shards, len(moves.placement.live))
        self._advised: set[str] = set()  # what --auto=dry-run has said
        # The action under way, with the answer to its request.
        self._asked: tuple[Action, Future[Answer]] | None = None
        self._taken: tuple[str, ...] = ()  # the spares that it takes
        self.loads: dict[int, dict[int, ShardLoad]] = {}
        self._loads_before: dict[int, dict[int, ShardLoad]] = {}  # when the window began
        self._slow_servers: set[str] = set()  # whose shards were moved to others
        self._replaced = 0  # the highest number of a slow trainer that was replaced
        self._waits = False  # whether trainers waited for the store in the last window
        self._since = call.clock()
        self._bytes_per_second = 0.0  # the most that was seen while trainers waited for the store

    def add(self, trainer: int, report: StepReport) -> None:
        """Add a step that a trainer has trained."""
        if self._on:
            self._window.add(trainer, report)

    def poll(self, members: Membership, is_training: bool) -> None:
        """Measure, decide and act.

        Args:
            is_training: whether training goes on, no term is about to change, and every lane has
                the replicas that it should have.
        """
        if not self._on or self._reading is None or not self._reading.done():
            return
        try:
            self._poll(members, is_training, self._reading.result())
        except ScheduleError as error:
            self._on = False
            self._call.say(f"foreload: warning: --auto changes nothing from now on: {error}")

    def _poll(self, members: Membership, is_training: bool, work: Work) -> None:
        self._see_answer()
        now = Size(len(members.term.members), len(self._moves.placement.live))
        if self._needs is not None:
            self._share = self._engine.ask_share(self._least, self._choices)
            self._heed_share(now, members)
        if not is_training or self._is_busy(members):
            self._window = Window(warm_up_steps=WARM_UP_STEPS)
            return
        memory, grant = self._shards.memory, self._grant
        full_after = memory.stop_by if memory is not None and memory.is_current else None
        if full_after is not None or (grant is not None and not grant.has_room_for(now)):
            # What memory or other jobs need cannot wait, and needs no measurement.
            urgent = decide(self._situation(work.advance(), now, full_after))
            if isinstance(urgent, Resize) and urgent.trial is None:
                self._act(urgent, now, members)
                return
        if self._window.is_warmed_up(members.term.members):
            self._begin_window()
        if self._window.is_over(members.term.members):
            self._look(work, now, members)

    @property
    def _grant(self) -> Grant | None:
        """The share of the pool; None without a shared pool, and as long as it is not known."""
        granted = None if self._share is None else self._share.granted
        return None if self._needs is None or granted is None else Grant(self._needs, granted)

    def _heed_share(self, now: Size, members: Membership) -> None:
        """Start no further trainers where the share has become too small for them: there may never be room."""
        wanted, enough, grant = self._scaling.wanted, max(now.trainers, self._least.trainers), self._grant
        if wanted > enough and grant is not None and not grant.has_room_for(replace(now, trainers=wanted)):
            self._call.say(f"auto: stays at {now}: the pool has no room for {wanted - enough} more")
            self._scaling.ask(AskScale(enough), members)
            self._adviser.withdraw()

    def _begin_window(self) -> None:
        self._window, self._loads_before = Window(self._server_seconds()), dict(self.loads)

    def _is_busy(self, members: Membership) -> bool:
        """Whether a change is under way, or a loss is being repaired."""
        together = self._shards.together
        return (
            self._asked is not None
            or not members.is_stable
            or self._scaling.is_changing(members)
            or self._moves.under_way
            or bool(together.not_whole)
            or bool(self._shards.about_to_come)
        )

    def _server_seconds(self) -> float:
        local = self._shards.local
        return 0.0 if local is None else sum(processor_seconds_of(pid) for pid in local.pids if pid)

    def _look(self, work: Work, now: Size, members: Membership) -> None:
        """Judge the last change, decide, and act, at the end of a window."""
        # The files of a schedule that is still prepared are asked for no more often than this.
        measured = self._window.measured(work.advance(), self._server_seconds())
        slow_shard, late = self._slow_shard(), self._slow_trainer(members)
        self._begin_window()
        self._waits = measured.waits_for_store
        if self._waits:
            seen = measured.rows * self._row_bytes / measured.seconds / now.shards
            self._bytes_per_second = max(self._bytes_per_second, seen)
        situation = self._situation(work, now)
        advice = self._adviser.look(measured, replace(situation, slow_shard=slow_shard, slow_trainer=late))
        self._choices = choices(replace(situation, known=self._adviser.known, rejected=self._adviser.rejected))
        if advice.missed is not None:
            self._call.say(f"auto: there are {now} now, not {advice.missed}")
        if advice.judged is not None:
            self._report(advice.judged)
        if advice.action is not None:
            self._act(advice.action, now, members)

    def _report(self, over: Judged) -> None:
        size, gain, paid = over.trial.target, over.verdict.gain, over.verdict.paid
        self.counts["paid" if paid else "unpaid"] += 1
        self._call.events.note(AdjustmentJudged(trainers=size.trainers, shards=size.shards, gain=gain, kept=paid))
        self._call.say(
            f"auto: with {size} a step takes {1000 * over.measured.seconds:.1f} ms, {abs(gain):.0%} {'less' if gain >= 0 else 'more'} "
            f"than with {over.trial.origin}{'' if paid else '; that does not pay'}"
        )

    def _situation(self, work: Work, now: Size, full_after: int | None = None) -> Situation:
        call, step = self._call, self._call.events.step
        job, lanes, placement, memory = call.job, call.schedule.header.lanes, self._moves.placement, self._shards.memory
        here = job.engine == "local"
        of_pool = self._pool.cores or (cores() if here else lanes * job.threads)
        most = Size(max(min(lanes, of_pool // job.threads, self._most_by_memory), 1), most_shards(job, self._shards, now.shards))
        if full_after is None and self._shards.own is None and self._shards.protected:
            # One spare is left for a shard that is lost.
            most = replace(most, shards=max(most.shards - 1, now.shards))
        if job.budget is not None and full_after is None:
            most = now
        trained, deadline = self._call.clock() - self._since, None if job.deadline is None else job.deadline.seconds
        stored = work.rows_until(step) * self._row_bytes * (placement.k + placement.r) / placement.k
        start, least = _START_SECONDS / of_pool if here else 0.0, self._least
        return Situation(
            now=now,
            least=Size(min(least.trainers, now.trainers), min(least.shards, now.shards)),
            most=most,
            machine=Machine(lanes, of_pool if here else None),
            ahead=work.ahead(step),
            costs=Costs(
                stored,
                self._bytes_per_second or _BYTES_PER_SECOND,
                COMING_SHARE if self._waits else MOVING_SHARE,
                _PAUSE_SECONDS + start,
                _JOINS_AFTER,
            ),
            trained_seconds=trained,
            seconds_left=None if deadline is None else deadline - trained,
            full_after=full_after,
            shards_needed=0 if memory is None else memory.shards_needed,
            grant=self._grant,
        )

    @property
    def _least(self) -> Size:
        """The smallest size that this run can have. Beside other jobs, what was reserved for it stays."""
        job = self._call.job
        return Size(job.replicas_held if self._needs is None else job.trainers, max(self._least_shards, 1))

    def _slow_shard(self) -> SlowShard | None:
        """Return a shard that was slow in the last window, if another server can take its place."""
        since: dict[int, ShardLoad] = {}
        for trainer in self.loads.keys() & self._loads_before.keys():
            before = self._loads_before[trainer]
            for shard in self.loads[trainer].keys() & before.keys():
                now, then = self.loads[trainer][shard], before[shard]
                since.setdefault(shard, ShardLoad()).add(ShardLoad(now.exchanges - then.exchanges, now.seconds - then.seconds))
        seconds = {shard: load.mean for shard, load in since.items() if load.exchanges >= _LEAST_EXCHANGES}
        own = self._shards.own
        if not self._shards.spares and (own is None or own.word != ENGINE):
            return None
        for shard in sorted(seconds, key=lambda one: -seconds[one]):
            times = slower(shard, seconds, _SLOW_TIMES, _SLOW_SECONDS)
            if times is not None and self._shards.plain_urls[shard] not in self._slow_servers:
                return SlowShard(shard, times)
        return None

    def _slow_trainer(self, members: Membership) -> SlowTrainer | None:
        """Return a trainer that was slow in the last window, if another one can take its place.

        Where the one that took the place of a slow trainer is slow as well, it is not the trainer's fault.
        """
        hosts = members.term.hosts
        lanes = {trainer: hosts.count(trainer) for trainer in members.term.members if trainer in hosts}
        late = slow_trainer({trainer: self._window.compute(trainer) for trainer in lanes}, lanes)
        if late is None or late.trainer in self._call.guests or (self._replaced and late.trainer > self._replaced):
            return None
        return late

    def _act(self, action: Action, now: Size, members: Membership) -> None:
        to = action.to if isinstance(action, Resize) else now
        trial, gain, cost = None, None, 0.0
        if isinstance(action, Resize):
            trial, gain, cost = action.trial, action.gain_seconds, action.cost_seconds
            said = f"from {now} to {to}"
        elif isinstance(action, MoveShard):
            said = f"the rows of store shard {action.shard} to another server"
        else:
            said = f"from trainer {action.trainer} to another one"
        dry_run = self._call.job.auto == DRY_RUN
        event = Adjusted(
            trainers=to.trainers,
            shards=to.shards,
            shard=action.shard if isinstance(action, MoveShard) else None,
            trainer=action.trainer if isinstance(action, ReplaceTrainer) else None,
            gain_seconds=gain,
            cost_seconds=cost,
            undoes=trial is not None and trial.undoes,
            dry_run=dry_run,
            cause=action.reason,
        )
        if dry_run and said in self._advised:
            return
        self._advised.add(said)
        saves = "" if gain is None or event.undoes else f", which would save about {gain:.0f} s"
        self._call.events.note(event)
        self._call.say(f"auto: {'would go ' if dry_run else ''}{said}{saves}: {action.reason}")
        if dry_run:
            return
        self.counts["made"] += 1
        self._adviser.acts(action, self._call.clock() - self._since)
        if isinstance(action, Resize) and action.for_memory:
            # What memory needs is never given back.
            self._least_shards = to.shards
        self._asked = action, self._request(action, now, members)

    def _request(self, action: Action, now: Size, members: Membership) -> Future[Answer]:
        """Make the request that a user would make. Returns its answer, also if it is refused."""
        answered: Future[Answer] = Future()
        try:
            given = self._asked_for(action, now, members)
        except ForeloadError as error:
            given = Refused(str(error))
        if isinstance(given, Future):
            return given
        answered.set_result(given)
        return answered

    def _asked_for(self, action: Action, now: Size, members: Membership) -> Answer | Future[Answer]:
        shards, own = self._shards, self._shards.own
        if isinstance(action, MoveShard):
            self._slow_servers.add(shards.plain_urls[action.shard])
            urls = (own.word,) if own is not None else self._take_spares(1)
            return self._moves.want(AskMove("move", str(action.shard), urls), hurried=self._waits)
        if isinstance(action, ReplaceTrainer):
            self._replaced = max(self._replaced, action.trainer)
            return self._scaling.ask(AskScale(None, action.trainer), members)
        if action.to.trainers != now.trainers:
            return self._scaling.ask(AskScale(action.to.trainers), members)
        further = action.to.shards - now.shards
        if further > 0:
            urls = (own.word,) * further if own is not None else self._take_spares(further)
            return self._moves.want(AskMove("add", "", urls), hurried=self._waits)
        # Shards leave one at a time, the last one first; the next decision goes on.
        last = max(self._moves.placement.live)
        url = shards.plain_urls[last]
        answer = self._moves.want(AskMove("remove", str(last), ()))
        if own is None and isinstance(answer, Future):
            shards.add_spares((url,))
        return answer

    def _take_spares(self, count: int) -> tuple[str, ...]:
        self._taken = self._shards.take_spares(count)
        return self._taken

    def _see_answer(self) -> None:
        """Note how the last request was answered. What was refused is not tried again."""
        if self._asked is None or not self._asked[1].done():
            return
        (action, answered), self._asked = self._asked, None
        taken, self._taken = self._taken, ()
        error = answered.exception()
        refused = error if error is not None else answered.result()
        if error is None and not isinstance(refused, Refused):
            return
        why = refused.error if isinstance(refused, Refused) else str(refused)
        self._call.say(f"auto: not done: {why}")
        self._shards.add_spares(taken)
        self._adviser.reject(action)


def most_shards(job: TrainJob, shards: StoreShards, now: int) -> int:
    """Return how many store shards --auto can have, with the servers that are there or can be started.

    Args:
        now: the number of shards now.
    """
    of_pool = None if job.pool is None else job.pool.stores
    if shards.own is not None:
        return max(of_pool or STORES, now)
    return max(min(now + shards.spares, of_pool or now + shards.spares), now)


def _most_by_memory(call: TrainingCall, pool: Pool) -> int:
    """Return how many trainers there is memory for, beside the local servers, if there are any."""
    job, schedule, placement = call.job, call.schedule, call.run.placement
    if job.engine != "local" and pool.memory_bytes is None:
        return schedule.header.lanes
    servers = store_bytes(job, schedule, placement.k, placement.r) if job.store.local else 0
    return ((pool.memory_bytes or total_bytes()) - servers) // trainer_bytes(job, schedule)


def _mean_row_bytes(layouts: Sequence[RowLayout]) -> float:
    return sum(layout.row_bytes for layout in layouts) / max(len(layouts), 1)

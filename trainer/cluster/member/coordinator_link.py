"""A trainer's link to the coordinator: reports between two steps, and what the plan asks for."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.shard_status import LOST, ServerUnreachable, ShardNews, ShardsAwaited, ShardSnapshot
from foreload.cache.rows.layout import RowLayout
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.member.trainer_checkpoints import TrainerCheckpoints
from foreload.trainer.cluster.messages.facts import ShardsLooked, StopWanted, Term
from foreload.trainer.cluster.messages.faults import Fault, TrainerFault
from foreload.trainer.cluster.messages.trainers import (
    CopiesReport,
    FaultInjected,
    HeldRows,
    LoadsReport,
    PlacementText,
    Plan,
    RequestReport,
    SeededCopy,
    ShardsReport,
)
from foreload.trainer.run.directory import SCRUB, STORES
from foreload.trainer.run.servers import asked, numbered
from foreload.trainer.saved.model_rows import MappedRows
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica


class TrainerRequests:
    """A trainer's side of run requests: scrubs and counts of stored rows.

    Only the trainer's main thread uses it.
    """

    def __init__(self, joined: JoinedTrainer, lanes: HostedLanes, layouts: Sequence[RowLayout], counted: int) -> None:
        """Serve the requests that come after `counted`.

        Args:
            counted: Number of the last row count that was requested before this trainer serves
                requests, and so is not for it.
        """
        self._joined, self._lanes, self._traffic, self._layouts = joined, lanes, lanes.traffic, layouts
        # The numbers of the scrub and the count that this trainer began last.
        self._scrubbed, self._counted = 0, counted
        self._scrub: int | None = None
        self._row_counts: int | None = None

    def follow(self, plan: Plan) -> None:
        """Start the scrub or row count that the plan asks for, unless it was started before."""
        if plan.count > self._counted:
            self._row_counts = self._counted = plan.count
            self._traffic.inspection.begin_row_counts()
        scrub = plan.scrub
        if scrub is not None and scrub.number > self._scrubbed:
            self._scrubbed = scrub.number
            try:
                self._traffic.inspection.begin_scrub(MappedRows(self._joined.run / SCRUB / scrub.rows, list(self._lanes.numbers)))
                self._scrub = scrub.number
            except (OSError, ValueError, CacheError) as error:
                self._joined.events.send(RequestReport(scrub.number, failed=str(error)))

    def report(self) -> None:
        """Report a finished row count and the progress of the scrub under way."""
        counted = self._traffic.inspection.row_counts()
        if self._row_counts is not None and counted is not None:
            held = HeldRows(
                rows=tuple(counted.rows.sum(axis=0).tolist()),
                parity_rows=tuple(counted.parity_rows.sum(axis=0).tolist()),
                row_bytes=tuple(counted.row_bytes(self._layouts).tolist()),
                lag=self._traffic.inspection.lag(),
                loads=self._lanes.stored.store.loads,
            )
            self._joined.events.send(RequestReport(self._row_counts, held=held))
            self._row_counts = None
        progress = self._traffic.inspection.scrubbed()
        if self._scrub is not None and progress is not None:
            self._joined.events.send(RequestReport(self._scrub, progress))
            if progress.done:
                self._scrub = None

    def finish(self) -> None:
        """Run the scrub under way to its end, and report all results."""
        if self._scrub is not None:
            self._traffic.inspection.scrubbed(finish=True)
        self.report()


# How long a finished training waits for the replacement of a lost server.
RETURN_TIMEOUT = timedelta(seconds=30)
SHARDS_PAUSE = timedelta(milliseconds=100)  # between two polls of the plan and of the rebuild
LOADS_PAUSE = timedelta(seconds=1)  # between two reports of the shards' load
BOARD_PAUSE = timedelta(milliseconds=10)  # between two polls for an awaited fact


class CoordinatorLink:
    """One trainer's link to the coordinator.

    Only the trainer's main thread uses it, except `shard_news`, which the traffic's threads call.

    Attributes:
        plan: Newest plan that this trainer has read.
        placement: Placement of the run's rows that the trainer starts with.
        stores: URLs of the store shards by number that the trainer starts with; they include
            passwords, and a removed shard has "".
    """

    def __init__(self, joined: JoinedTrainer, checkpoints: TrainerCheckpoints) -> None:
        self._joined, self._checkpoints, self._trainer = joined, checkpoints, joined.number
        self._rendezvous, self._events, self._run = joined.rendezvous, joined.events, joined.run
        self._stop_asked = False
        self._news: deque[tuple[ServerUnreachable | ShardSnapshot, float]] = deque()
        self._reported: ShardSnapshot | None = None  # the last snapshot reported to the coordinator
        self.plan = joined.rendezvous.read(Plan, joined.start.plan or 0)
        self.placement = self._placement_of(self.plan)
        self.stores = numbered(joined.start.store_urls or self.plan.servers, self.placement)
        self._copies: Callable[[], CopiesReport | None] = lambda: None
        self._copies_reported: CopiesReport | None = None
        # How many times a shard was lost, or had its server replaced, for this trainer.
        self._lost = 0
        self._asked_at = 0.0  # when the plan was last polled, time.monotonic()
        self._loads_at = 0.0  # when the shards' load was last reported, likewise

    def serve(self, lanes: HostedLanes, layouts: Sequence[RowLayout]) -> None:
        """Let the traffic of these lanes serve run requests, for the lanes hosted at that time."""
        self._traffic, self._store = lanes.traffic, lanes.stored.store
        if self.plan.hurried:
            self._traffic.migration.hurry()
        self._requests = TrainerRequests(self._joined, lanes, layouts, self.plan.count)

    def serve_replicas(self, term: int, copies: Mapping[int, LaneReplica]) -> None:
        """Report the state of these replicas of lanes from now on.

        Args:
            term: Number of the term in which this trainer holds them.
            copies: Lane -> replica.
        """

        def report() -> CopiesReport:
            seeded = {lane: SeededCopy(copy.cursor, copy.partition.slots, copy.complete) for lane, copy in sorted(copies.items())}
            return CopiesReport(term, seeded)

        self._copies = report

    def _placement_of(self, plan: Plan) -> Placement:
        text = self._rendezvous.read(PlacementText, plan.placement).text
        return Placement.of_text(text, "the coordinator's placement")

    def catch_up(self) -> None:
        """Adopt the servers and the placement of every plan version published so far.

        A trainer calls this before it hosts lanes of another trainer, because that trainer may
        have read a newer plan.
        """
        while (plan := self._rendezvous.poll(Plan, self.plan.version + 1)) is not None:
            before, self.plan = self.plan, plan
            if plan.placement != before.placement:
                placement = self._placement_of(plan)
                if placement.migrating:
                    self._traffic.migration.begin(placement, asked(plan.servers))
                    if plan.hurried:
                        self._traffic.migration.hurry()
                else:
                    self._traffic.migration.complete(placement)
            for shard, (was, url) in enumerate(zip(before.servers, plan.servers, strict=False)):
                if was and url and was != url:
                    self._traffic.replace(shard, url)
                    self._lost += 1  # the shard lost its former server

    def shard_news(self, news: ShardNews) -> None:
        """Queue news of the store shards for the next report to the coordinator.

        News that the trainer waits for shards is printed at once instead.
        """
        # A trainer that waits for shards does nothing else, so no report would follow soon.
        if isinstance(news, ShardsAwaited):
            sys.stderr.write(f"trainer {self._trainer}: {news}\n")
        else:
            self._news.append((news, time.monotonic()))

    def inject(self, faults: Sequence[Fault | TrainerFault], step: int) -> None:
        """Inject the faults of store shards that are due after training step `step`."""
        for fault in faults:
            if isinstance(fault, Fault) and fault.step == step:
                at = time.monotonic()
                fault.inject(self._run / STORES)
                self._events.send(FaultInjected(fault, at))

    def report(self, at_once: bool = False) -> None:
        """Report to the coordinator, then read the newest plan and do what it asks for.

        Each call reports changes of store shards. The rest is done once every SHARDS_PAUSE.

        Args:
            at_once: Do all of it in this call.
        """
        self._report_news()
        if not at_once and time.monotonic() - self._asked_at < SHARDS_PAUSE.total_seconds():
            return
        self._asked_at = time.monotonic()
        interrupts = self._joined.interrupts
        if interrupts is not None and interrupts.received and not self._stop_asked:
            self._stop_asked = True
            self._rendezvous.publish(StopWanted())
        self.report_shards()
        if (copies := self._copies()) is not None and copies != self._copies_reported:
            self._copies_reported = copies
            self._events.send(copies)
        if self._joined.job.auto and self._asked_at - self._loads_at >= LOADS_PAUSE.total_seconds():
            self._loads_at = self._asked_at
            self._events.send(LoadsReport(self._store.loads))
        self._requests.report()
        self._checkpoints.report()
        self.catch_up()
        self._requests.follow(self.plan)
        self._checkpoints.follow(self.plan.checkpoint)

    def report_shards(self) -> None:
        """Report how the lanes hosted now see the store shards, if the last report said otherwise.

        Progress of a rebuild counts as a difference.
        """
        self._report_news()
        shards = self._traffic.shards
        # A first report of whole shards at placement version 0 would contain nothing new.
        if shards != self._reported and not (self._reported is None and shards.whole and not shards.version):
            self._report_shards(shards, time.monotonic())

    def _report_news(self) -> None:
        while self._news:
            news, at = self._news.popleft()
            if isinstance(news, ServerUnreachable):
                self._events.send(news)
            else:
                self._report_shards(news, at)

    def _report_shards(self, shards: ShardSnapshot, at: float) -> None:
        """Report to the coordinator how this trainer sees the store shards.

        Args:
            shards: The snapshot.
            at: When it was taken, time.monotonic().
        """
        self._lost += sum(status.state == LOST for status in shards.changes_since(self._reported).values())
        self._reported = shards
        self._events.send(ShardsReport(shards, at))

    def finish(self, term: Term, check: Callable[[], None]) -> list[int]:
        """Finish what is under way when training ends, and wait until the store is whole.

        A checkpoint under way and run requests are finished. The trainer then waits until every
        shard is whole for every trainer and every migration is done. It waits for lost shards only
        where servers come back by themselves, for RETURN_TIMEOUT at most, and not again once it
        gave up a shard.

        Args:
            term: The term that ends.
            check: Called while this trainer waits for others. It raises an error once waiting is
                pointless.

        Returns:
            The shards that are not whole.
        """
        self._checkpoints.finish(check, self.report)
        # A shard that one trainer finds lost may have been whole when another trainer looked. So
        # all of them look in turns, until no trainer finds a further loss.
        lost: list[int] = []
        turn, known = 0, self._lost
        while True:
            hopeful = self._joined.spec.servers_return and not lost
            deadline = time.monotonic() + (RETURN_TIMEOUT.total_seconds() if hopeful else 0.0)
            while True:
                lost = self._traffic.repair_shards(SHARDS_PAUSE)
                self.report()
                shards = self._traffic.shards
                # A migration completes only while no shard is lost, so it is waited for only then.
                through = shards.not_whole.keys() <= set(lost) if lost else shards.whole and shards.migrated >= 1.0
                if through and (not lost or time.monotonic() >= deadline):
                    break
                check()
            further, known = self._lost > known, self._lost
            self._rendezvous.publish(ShardsLooked(further), term.number, turn, self._trainer)
            if not any(self._found_lost(term, turn, trainer, check) for trainer in term.members):
                break
            turn += 1
        self._requests.finish()
        return lost

    def _found_lost(self, term: Term, turn: int, trainer: int, check: Callable[[], None]) -> bool:
        """Return whether a trainer found a lost shard in a turn of `finish`.

        Waits for the trainer's answer for as long as its rebuild takes.
        """
        while (looked := self._rendezvous.poll(ShardsLooked, term.number, turn, trainer)) is None:
            check()
            self.report()
            time.sleep(BOARD_PAUSE.total_seconds())
        return looked.found_lost

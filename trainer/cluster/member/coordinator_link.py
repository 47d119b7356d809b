"""Between two steps: report store shards and requests to the coordinator, and do what its plan says."""

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
    CopiesTold,
    FaultInjected,
    HeldRows,
    PlacementText,
    Plan,
    RequestReport,
    SeededCopy,
    ShardsTold,
)
from foreload.trainer.run.directory import SCRUB, STORES
from foreload.trainer.run.servers import asked, numbered
from foreload.trainer.saved.model_rows import MappedRows
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica


class TrainerRequests:
    """A trainer's side; its main thread uses it."""

    def __init__(self, joined: JoinedTrainer, lanes: HostedLanes, layouts: Sequence[RowLayout], counted: int) -> None:
        """counted: the number of the last count that is not for this trainer."""
        self._joined, self._lanes, self._traffic, self._layouts = joined, lanes, lanes.traffic, layouts
        self._scrubbed, self._counted = 0, counted  # the numbers of those that were begun last
        self._scrub: int | None = None
        self._row_counts: int | None = None

    def follow(self, plan: Plan) -> None:
        """Begin what is planned."""
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

    def tell(self) -> None:
        """Report how far the requests are."""
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
        """Finish what was begun, and report it."""
        if self._scrub is not None:
            self._traffic.inspection.scrubbed(finish=True)
        self.tell()


RETURN_TIMEOUT = timedelta(seconds=30)  # for a server that is to take the place of one that is gone, once training is over
SHARDS_PAUSE = timedelta(milliseconds=100)  # between two looks at the plan and at what is rebuilt
BOARD_PAUSE = timedelta(milliseconds=10)  # between two looks for a fact that is waited for


class CoordinatorLink:
    """Of one trainer; its main thread uses it, but for `shard_news`, which the traffic's threads call.

    plan: the newest that is known here. placement: of the run's rows; stores: the URLs of its store shards by number, with passwords, "" for those
    removed. Both are as the trainer is to begin with.
    """

    def __init__(self, joined: JoinedTrainer, checkpoints: TrainerCheckpoints) -> None:
        self._joined, self._checkpoints, self._trainer = joined, checkpoints, joined.number
        self._rendezvous, self._events, self._run = joined.rendezvous, joined.events, joined.run
        self._stop_asked = False
        self._news: deque[tuple[ServerUnreachable | ShardSnapshot, float]] = deque()
        self._reported: ShardSnapshot | None = None  # what was last reported to the coordinator
        self.plan = joined.rendezvous.read(Plan, joined.start.plan or 0)
        self.placement = self._placement_of(self.plan)
        self.stores = numbered(joined.start.store_urls or self.plan.servers, self.placement)
        self._copies: Callable[[], CopiesTold | None] = lambda: None
        self._copies_reported: CopiesTold | None = None
        self._lost = 0  # how many times a shard was lost, or had its server replaced, for this trainer
        self._asked_at = 0.0  # when the plan was last looked at, time.monotonic()

    def serve(self, lanes: HostedLanes, layouts: Sequence[RowLayout]) -> None:
        """Have run requests done by the traffic of these lanes, for those that are hosted then."""
        self._traffic = lanes.traffic
        self._requests = TrainerRequests(self._joined, lanes, layouts, self.plan.count)

    def serve_replicas(self, term: int, copies: Mapping[int, LaneReplica]) -> None:
        """Report these copies of lanes from now on."""

        def report() -> CopiesTold:
            seeded = {lane: SeededCopy(copy.cursor, copy.partition.slots, copy.complete) for lane, copy in sorted(copies.items())}
            return CopiesTold(term, seeded)

        self._copies = report

    def _placement_of(self, plan: Plan) -> Placement:
        text = self._rendezvous.read(PlacementText, plan.placement).text
        return Placement.of_text(text, "the coordinator's placement")

    def catch_up(self) -> None:
        """Use the servers and the placement that were published by now: before it serves lanes that were another trainer's, which may know more."""
        while (plan := self._rendezvous.poll(Plan, self.plan.version + 1)) is not None:
            before, self.plan = self.plan, plan
            if plan.placement != before.placement:
                placement = self._placement_of(plan)
                if placement.migrating:
                    self._traffic.migration.begin(placement, asked(plan.servers))
                else:
                    self._traffic.migration.complete(placement)
            for shard, (was, url) in enumerate(zip(before.servers, plan.servers, strict=False)):
                if was and url and was != url:
                    self._traffic.replace(shard, url)
                    self._lost += 1  # of the server that had the shard

    def shard_news(self, news: ShardNews) -> None:
        """What became of store shards, to be reported at the next `tell`; that they are waited for is printed at once: nothing else is done then."""
        if isinstance(news, ShardsAwaited):
            sys.stderr.write(f"trainer {self._trainer}: {news}\n")
        else:
            self._news.append((news, time.monotonic()))

    def inject(self, faults: Sequence[Fault | TrainerFault], step: int) -> None:
        """Put in the store shards' faults that are due after a step."""
        for fault in faults:
            if isinstance(fault, Fault) and fault.step == step:
                at = time.monotonic()
                fault.inject(self._run / STORES)
                self._events.send(FaultInjected(fault, at))

    def tell(self, at_once: bool = False) -> None:
        """Report to the coordinator what became of store shards, and how far run requests are; do what is planned.

        Changes are reported at every call, the rest every SHARDS_PAUSE, or at once.
        """
        self._tell_news()
        if not at_once and time.monotonic() - self._asked_at < SHARDS_PAUSE.total_seconds():
            return
        self._asked_at = time.monotonic()
        interrupts = self._joined.interrupts
        if interrupts is not None and interrupts.received and not self._stop_asked:
            self._stop_asked = True
            self._rendezvous.publish(StopWanted())
        self.tell_shards()
        if (copies := self._copies()) is not None and copies != self._copies_reported:
            self._copies_reported = copies
            self._events.send(copies)
        self._requests.tell()
        self._checkpoints.tell()
        self.catch_up()
        self._requests.follow(self.plan)
        self._checkpoints.follow(self.plan.checkpoint)

    def tell_shards(self) -> None:
        """Report how the store shards are for the lanes that are hosted now, where that differs from the last report, or more is rebuilt."""
        self._tell_news()
        shards = self._traffic.shards
        if shards != self._reported and not (self._reported is None and shards.whole and not shards.version):
            self._tell_shards(shards, time.monotonic())

    def _tell_news(self) -> None:
        while self._news:
            news, at = self._news.popleft()
            if isinstance(news, ServerUnreachable):
                self._events.send(news)
            else:
                self._tell_shards(news, at)

    def _tell_shards(self, shards: ShardSnapshot, at: float) -> None:
        """Report to the coordinator how the store shards are for this trainer. at: since when, time.monotonic()."""
        self._lost += sum(status.state == LOST for status in shards.changes_since(self._reported).values())
        self._reported = shards
        self._events.send(ShardsTold(shards, at))

    def finish(self, term: Term, check: Callable[[], None]) -> list[int]:
        """Bring a checkpoint under way and run requests to their end, and wait until all shards are whole again and rows that move have moved, for
        every trainer, as long as there is hope; returns the shards that are not whole. check: called while others are waited for, raises where they
        are not to be waited for any more.

        A shard that one trainer finds lost may have been whole when another looked, so all look, turn by turn, until none finds a further one. There
        is hope where servers come back by themselves, for RETURN_TIMEOUT at most, and not again once a shard was given up.
        """
        self._checkpoints.finish(check, self.tell)
        lost: list[int] = []
        turn, known = 0, self._lost
        while True:
            hopeful = self._joined.spec.servers_return and not lost
            deadline = time.monotonic() + (RETURN_TIMEOUT.total_seconds() if hopeful else 0.0)
            while True:
                lost = self._traffic.repair_shards(SHARDS_PAUSE)
                self.tell()
                shards = self._traffic.shards
                # Rows that are to move do, as long as no shard is lost.
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
        """Whether a trainer found a shard lost in a turn of `finish`, waited for as long as its rebuilding takes."""
        while (looked := self._rendezvous.poll(ShardsLooked, term.number, turn, trainer)) is None:
            check()
            self.tell()
            time.sleep(BOARD_PAUSE.total_seconds())
        return looked.found_lost

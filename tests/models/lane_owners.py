"""Owners of lanes that come one after the other, and what a copy of a lane holds: for tests of takeovers, over the programs of `lane_program`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
from lane_program import EVALUATION_SLOTS, LAYOUTS, SEED, SLOTS, STATE_WIDTH, WIDTH, LaneProgram, Truth, train_slots, values
from lane_runs import expected_rows
from waiting import DEADLINE_SECONDS

from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.handover.takeover import CopiedLane, TakenLane, take_over_lost
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership, find_rows
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows, read_rows
from foreload.cache.repair.scrub import MUST, NEVER, TableRows, scrub_table
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows, Staged
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals, Occupants

NAMESPACE = "t"
TIMEOUT = timedelta(seconds=10)


class Died(Exception):
    """An owner is no more."""


class Mortal(Store):
    """A Store whose n-th exchange of some kind reaches only some shards, and then its owner dies.

    dies: (writes) -> whether the exchange is of that kind.
    """

    def __init__(
        self, urls: Sequence[str], dies: Callable[[Sequence[Write]], bool] = bool, last: int = 0, reached: Sequence[int] = ()
    ) -> None:
        super().__init__(urls, TIMEOUT, timedelta(seconds=1), optional=True)
        self._dies, self.left, self._reached = dies, last, reached

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        self._inject(writes)
        return super().attempt(reads, writes)

    def exchange(self, reads: Sequence[Read], writes: Sequence[Write]) -> None:
        self._inject(writes)
        super().exchange(reads, writes)

    def _inject(self, writes: Sequence[Write]) -> None:
        if self._dies(writes):
            self.left -= 1
            if not self.left:
                super().attempt([], [write for write in writes if write.shard in self._reached])
                raise Died


def of_phase(phase: str) -> Callable[[Sequence[Write]], bool]:
    """Whether writes are of a phase: "parity" or "data"."""

    def are(writes: Sequence[Write]) -> bool:
        marker = Marker.parse(writes[0].marker) if writes else None
        return marker is not None and ("parity" if marker.parity > marker.data else "data") == phase

    return are


@dataclass(frozen=True)
class After:
    """A lane at the end of a step, as its copy has it. ordinals: int64 [tables]; slots int32 [n]: taken ones; rows: who sits there."""

    ordinals: np.ndarray
    slots: np.ndarray
    rows: EndedRows


@dataclass
class History:
    """What is true of a lane: at the end of each step; the rows that end at each boundary; of each event, by number, the rows used, before it.

    first_event: of each step, the number of the first event behind the step before.
    """

    program: LaneProgram
    after: dict[int, After] = field(default_factory=dict)
    ended: dict[int, EndedRows] = field(default_factory=dict)
    used: list[np.ndarray] = field(default_factory=list)
    first_event: dict[int, int] = field(default_factory=dict)
    truth: Truth = field(default_factory=Truth)

    @classmethod
    def of(cls, program: LaneProgram) -> History:
        found, partition = cls(program), Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH)
        given, following, last = np.zeros(len(LAYOUTS), np.int64), 0, -1
        for index, event in enumerate(program.events):
            found.used.append(found.truth.of(event.rows))
            if event.step is None:
                continue
            found.first_event[event.step], following, last = following, index + 1, event.step
            found.ended[event.step] = partition.end(event.ends)
            who = list(zip(event.arrivals.table.tolist(), event.arrivals.id.tolist(), strict=True))
            come = found.truth.of(who) if who else np.zeros((0, WIDTH + STATE_WIDTH), np.float32)
            staged = Staged(come[:, :WIDTH].copy(), come[:, WIDTH:].copy(), timedelta())
            partition.admit(event.arrivals, staged)
            train_slots(partition, event.slots, event.step)
            found.truth.train(event.rows, event.step)
            np.maximum.at(given, event.arrivals.table, event.arrivals.ordinal + 1)
            slots = partition.occupied()
            found.after[event.step] = After(given.copy(), slots, rows_in(partition, slots))
        found.first_event[last + 1] = following
        found.ended[last + 1] = partition.end(program.final_ends)
        return found

    @property
    def end(self) -> int:
        """The boundary after the last step."""
        return max(self.ended)

    def copied(self, step: int, released: tuple[int, int], all_ending: bool = False) -> CopiedLane:
        """What the copy has after a step. all_ending: it does not know what ends at the next boundary."""
        here = self.after[step]
        owed = [(boundary, self.ended[boundary]) for boundary in range(released[0] + 1, step + 1)]
        return CopiedLane(
            here.ordinals,
            Occupants(*here.rows.columns(), here.rows.stored_tag),
            owed,
            here.rows if all_ending else self.ended[step + 1],
            released,
        )


def rows_in(partition: Partition, slots: np.ndarray) -> EndedRows:
    """Copies of the rows in slots."""
    here, both = partition.occupants, values(partition, slots)
    weights, state = both[:, :WIDTH].copy(), both[:, WIDTH:].copy()
    return EndedRows(*here.columns(slots), here.stored_tag[slots], weights, state)


class Owner:
    """Owns lanes through a Traffic, and trains them step by step until the end, or until it dies. log, term: its own. parity: k and r, or where rows
    are.

    handed: the last boundary handed over; applied: the last step trained by all lanes; told: of each lane, what was released, by boundary.
    """

    def __init__(
        self,
        store: Store,
        histories: Mapping[int, History],
        logs: Path,
        parity: tuple[int, int] | Placement,
        ownership: Ownership,
        on_action: Callable[[str], None] = lambda action: None,
    ) -> None:
        self.store, self.histories, self.logs = store, histories, logs
        self.ownership, self.on_action = ownership, on_action
        self.log = FileLog(logs)
        placement = parity if isinstance(parity, Placement) else Placement.spread(store.shards, *parity)
        self.stored = StoredRows(store, placement, LAYOUTS, NAMESPACE)
        self.partitions: dict[int, Partition] = {}
        self.unknown: dict[int, np.ndarray] = {}
        self.handed = self.applied = self.began = -1
        self.told: dict[int, dict[int, tuple[int, int]]] = {lane: {} for lane in histories}
        self.traffic: Traffic | None = None

    def begin(self) -> Owner:
        """Own the lanes from the beginning."""
        self._serve([LanePlan(lane, self.plan_from(lane, 0)) for lane in self.histories])
        for lane in self.histories:
            self._partition(lane)
        return self

    def take_over(self, step: int, copied: Mapping[int, CopiedLane], dead: bool = True) -> dict[int, TakenLane]:
        """Own these lanes, too, from the end of a step on; those that it has are at that step."""

        def take() -> dict[int, TakenLane]:
            return take_over_lost(self.stored, self.ownership, self.log, copied, dead, self.on_action)

        # From here on it may die: who follows it has the same copies.
        self.handed = self.applied = self.began = step
        for lane, copy in copied.items():
            self.told[lane][step] = copy.released
        if self.traffic is None:
            taken = take()
            self._serve([])
        else:
            self.traffic.raise_term(self.ownership.term)
            taken = self.traffic.between_rounds(take)
        assert self.traffic is not None
        for lane, one in taken.items():
            self.traffic.add_lane(one.plan(self.plan_from(lane, step + 1)))
        for lane, one in taken.items():
            here, partition = self.histories[lane].after[step], self._partition(lane)
            who = here.rows
            arrivals = Arrivals(*who.columns(), here.slots, np.full(len(who), -1, np.int32))
            partition.admit(arrivals, Staged(who.weights, who.state, timedelta()))
            partition.occupants.stored_tag[here.slots] = who.stored_tag
            if partition.base_weights is not None and partition.base_state is not None:
                # Nobody knows the bases: what stands there must not matter.
                partition.base_weights[:], partition.base_state[:] = 7.0, 7.0
                self.unknown[lane][here.slots] = True
            names = dict(zip(zip(who.table.tolist(), who.ordinal.tolist(), strict=True), here.slots.tolist(), strict=True))
            for place in np.flatnonzero(one.stored).tolist():
                slot = names[int(one.ending.table[place]), int(one.ending.ordinal[place])]
                partition.occupants.stored_tag[slot] = partition.occupants.tag[slot]
            for boundary, rows in one.to_write:
                self.traffic.write_back(lane, boundary, rows)
        return taken

    def _serve(self, plans: Sequence[LanePlan]) -> None:
        self.traffic = Traffic(self.stored, SEED, lead_events=3, log=self.log, ownership=self.ownership, on_action=self.on_action)
        for plan in plans:
            self.traffic.add_lane(plan)

    def plan_from(self, lane: int, step: int) -> Iterator[tuple[int, Arrivals]]:
        """The arrivals of a lane from a step on, and of what comes between it and the step before."""
        history = self.histories[lane]
        return (
            (index, event.arrivals) for index, event in enumerate(history.program.events) if index >= history.first_event[step]
        )

    def _partition(self, lane: int) -> Partition:
        with_base = self.stored.placement.r > 0
        partition = self.partitions[lane] = Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH, with_base=with_base)
        self.unknown[lane] = np.zeros(SLOTS, bool)
        return partition

    def train(self, until: int | None = None) -> None:
        """Train step by step, each lane in turn, to the end or to a step; then everything is written back. Raises what the traffic fails with."""
        assert self.traffic is not None
        end = max(history.end for history in self.histories.values())
        for step in range(self.applied + 1, end if until is None else until + 1):
            for lane, history in self.histories.items():
                self._step(lane, history, step)
            self.applied = step
        if until is None:
            for lane, history in self.histories.items():
                for index in range(history.first_event[end], len(history.program.events)):
                    self._take(lane, history, index)
                self.traffic.write_back(lane, end, self._end(lane, history.program.final_ends))
            self.traffic.flush()

    def _step(self, lane: int, history: History, step: int) -> None:
        assert self.traffic is not None
        partition = self.partitions[lane]
        index = history.first_event[step]
        while (event := history.program.events[index]).step is None:
            self._take(lane, history, index)
            index += 1
        self.told[lane][step] = self.traffic.released(lane)
        self.traffic.write_back(lane, step, self._end(lane, event.ends))
        self.handed = step
        self._take(lane, history, index)
        self.unknown[lane][event.arrivals.slot] = False
        train_slots(partition, event.slots, step)

    def _take(self, lane: int, history: History, index: int) -> None:
        assert self.traffic is not None
        event, partition = history.program.events[index], self.partitions[lane]
        partition.admit(event.arrivals, self.traffic.take(lane, index))
        assert np.array_equal(values(partition, event.slots), history.used[index])

    def _end(self, lane: int, slots: np.ndarray) -> EndedRows:
        ended, unknown = self.partitions[lane].end(slots), self.unknown[lane][slots]
        return replace(ended, base_known=~unknown) if unknown.any() else ended

    def copies(self, lag: int, early: bool = False, all_ending: bool = False) -> tuple[int, dict[int, CopiedLane]]:
        """The last committed step, and what copies have then. lag: how many boundaries ago they were told what was released.

        early: the step before the last boundary that was handed over counts as the last one, though one more may have been committed.
        """
        step = max(self.handed - 1 if early else self.applied, self.began)
        copies = {}
        for lane, history in self.histories.items():
            known = [(-1, 0), *(told for at, told in sorted(self.told[lane].items()) if at <= step)]
            copies[lane] = history.copied(step, known[max(len(known) - 1 - lag, 0)], all_ending)
        return step, copies

    def abandon(self) -> None:
        """What is left of an owner that died."""
        if self.traffic is not None:
            self.traffic.abort()
        self.log.close()
        self.store.close()


def check_all(
    urls: Sequence[str | None],
    histories: Mapping[int, History],
    parity: tuple[int, int] | Placement,
    last_batches: Mapping[int, int],
) -> None:
    """Every row that was ever trained is what it must be, bit for bit, and every stripe agrees."""
    with Store(urls, TIMEOUT) as store:
        placement = parity if isinstance(parity, Placement) else Placement.spread(store.shards, *parity)
        stored = StoredRows(store, placement, LAYOUTS, NAMESPACE)
        lanes = max(histories) + 1
        find_rows(stored, [last_batches.get(lane, 0) for lane in range(lanes)])
        assert not stored.shards.lost
        for lane, history in histories.items():
            expected, names = expected_rows(lane, history.program)
            found = read_rows(stored, expected, last_batches[lane])
            assert np.array_equal(np.concatenate([found.weights, found.state], axis=1), history.truth.of(names))
            for table in range(len(LAYOUTS)) if placement.r else ():
                own = expected.table == table
                count = int(expected.ordinal[own].max(initial=-1)) + 1
                presence, ids, tags = np.full(count, NEVER, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int32)
                at = expected.ordinal[own]
                presence[at], ids[at], tags[at] = MUST, expected.id[own], expected.tag[own]
                rows = TableRows(table, presence, ids, tags, np.ones(count, bool))
                for findings in scrub_table(stored, lane, rows, last_batches[lane], repair=False):
                    assert (findings.stripes_repaired, findings.stripes_damaged) == (0, 0), findings


class Gate:
    """Stops who comes for the n-th time to an action, until it is let on."""

    def __init__(self, action: str, count: int) -> None:
        self._action, self._left = action, count
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, action: str) -> None:
        self._left -= action == self._action
        if not self._left and action == self._action:
            self.reached.set()
            assert self.open.wait(DEADLINE_SECONDS)


def dies_at(action: str, count: int) -> Callable[[str], None]:
    """Raises Died at the n-th time of an action."""
    left = count

    def act(happened: str) -> None:
        nonlocal left
        left -= happened == action
        if not left and happened == action:
            raise Died

    return act

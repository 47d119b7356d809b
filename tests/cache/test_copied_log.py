"""A log that lives with the copies, over real sockets: whoever has a copy of the lane goes on, wherever its owner died among the acknowledgements."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from grids import covering
from lane_owners import TIMEOUT, Died, History, Owner, check_all, dies_at
from lane_program import make_program
from waiting import DEADLINE_SECONDS

from foreload.base.job_token import new_token
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError, CopyLost
from foreload.cache.protocol.ownership.batch_log import CopiedLog, HeldRecords, Holders, LoggedBatch, LogService
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.marker import first_number

LANES = (0, 3)
STEPS = 24
PARITY = (2, 1)
TOKEN = new_token()


@pytest.fixture(scope="module")
def histories() -> Mapping[int, History]:
    """Two lanes."""
    return {lane: History.of(make_program(lane + 50, STEPS)) for lane in LANES}


class Trainer:
    """One that holds records, and may own lanes: its service, and its log."""

    def __init__(self, silence: timedelta = timedelta(seconds=20)) -> None:
        self.records, self.lost = HeldRecords(), threading.Event()
        self.service = LogService("127.0.0.1", TOKEN, self.records)
        self.log = CopiedLog(self.records, TOKEN, silence, lambda why: self.lost.set())

    @property
    def place(self) -> tuple[str, int]:
        return self.service.address, self.service.port

    def close(self) -> None:
        self.log.close()
        self.service.close()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Trainers 0, 1 and 2."""
    there = [Trainer() for _ in range(3)]
    yield there
    for trainer in there:
        trainer.close()


def holders(trainers: Sequence[Trainer], numbers: Sequence[int], lanes: Sequence[int] = LANES) -> Holders:
    """These hold the log of all lanes."""
    return Holders(dict.fromkeys(lanes, numbers), {number: trainers[number].place for number in numbers})


def batch(number: int, before: int, rows: int = 3) -> LoggedBatch:
    """Made-up rows."""
    random = np.random.default_rng(number)
    old, new = (random.integers(0, 256, (rows, 12), dtype=np.uint8) for _ in range(2))
    return LoggedBatch(number, random.integers(0, 99, rows).astype(np.uint64), old, new, np.arange(9).reshape(3, 3), before)


def same(one: LoggedBatch | None, other: LoggedBatch | None) -> bool:
    assert one is not None
    assert other is not None
    parts = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("fields", "old", "new", "held"))
    return parts and (one.number, one.before) == (other.number, other.before)


def owner_of(
    trainer: Trainer,
    urls: Sequence[str],
    histories: Mapping[int, History],
    unused: Path,
    term: int,
    action: str = "",
    count: int = 1,
) -> Owner:
    """An owner whose log is a trainer's; it dies at an action."""
    owner = Owner(Store(urls, TIMEOUT), histories, unused, PARITY, Ownership(term), dies_at(action, count))
    owner.log = trainer.log  # type: ignore[assignment]
    return owner


class DiesAmongAnswers(CopiedLog):
    """The log of an owner that dies when only some of the holders of a lane have its n-th record."""

    def __init__(self, records: HeldRecords, reached: Holders, all_holders: Holders, last: int) -> None:
        super().__init__(records, TOKEN, timedelta(seconds=20), lambda why: None)
        self._reached, self._left = reached, last
        self.begin_term(all_holders, ())

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        self._left -= 1
        if not self._left:
            self.begin_term(self._reached, ())
            super().hold(lane, batch)
            raise Died
        super().hold(lane, batch)


@pytest.mark.parametrize(
    ("reached", "taker", "count"), covering(list(product([(), (1,), (2,), (1, 2)], (1, 2), (1, 2, 3, 9, 12))), 4)
)
def test_an_owner_dies_among_the_acknowledgements_and_either_copy_goes_on(
    urls: Sequence[str],
    histories: Mapping[int, History],
    trainers: list[Trainer],
    tmp_path: Path,
    reached: tuple[int, ...],
    taker: int,
    count: int,
) -> None:
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, PARITY, Ownership(1))
    first.log = DiesAmongAnswers(  # type: ignore[assignment]
        trainers[0].records, holders(trainers, reached), holders(trainers, (1, 2)), count
    )
    with pytest.raises(Died):
        first.begin().train()
    step, copies = first.copies(1)
    first.abandon()
    other = 3 - taker
    trainers[taker].log.begin_term(holders(trainers, [other]), ())
    second = owner_of(trainers[taker], urls, histories, tmp_path, 2)
    second.take_over(step, copies)
    second.train()
    last = {lane: second.traffic.last_batch(lane) for lane in LANES} if second.traffic is not None else {}
    second.abandon()
    check_all(urls, histories, PARITY, last)
    assert not list(tmp_path.iterdir())


TAKEOVER = ["fenced", "record held", "batch finished", "rows looked at", "empty record held", "marker written"]


@pytest.mark.parametrize(
    ("action", "then"),
    covering(list(product(["batch logged", "parity leaves", "data leaves", "data acknowledged"], TAKEOVER)), 3),
)
def test_who_takes_over_dies_too_and_the_third_finds_what_it_played(
    urls: Sequence[str], histories: Mapping[int, History], trainers: list[Trainer], tmp_path: Path, action: str, then: str
) -> None:
    trainers[0].log.begin_term(holders(trainers, (1, 2)), ())
    first = owner_of(trainers[0], urls, histories, tmp_path, 1, action, 12)
    with pytest.raises(Died):
        first.begin().train()
    step, copies = first.copies(1)
    trainers[1].log.begin_term(holders(trainers, (2,)), ())
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, PARITY, Ownership(2), dies_at(then, 1))
    second.log = trainers[1].log  # type: ignore[assignment]
    with pytest.raises(Died):
        second.take_over(step, copies)
    # The first, which seems to be dead, may still log: those who have a later record refuse its.
    if then != "fenced":
        assert not trainers[2].records.hold(LANES[0], 1, batch(first_number(1) + 99, first_number(1) + 98))
    first.abandon()
    second.abandon()
    trainers[2].log.begin_term(Holders({}, {}), ())
    third = owner_of(trainers[2], urls, histories, tmp_path, 3)
    third.take_over(step, copies)
    third.train()
    last = {lane: third.traffic.last_batch(lane) for lane in LANES} if third.traffic is not None else {}
    third.abandon()
    check_all(urls, histories, PARITY, last)


def test_a_copy_that_is_gone_ends_the_term_and_the_owner_goes_on_in_the_next(
    urls: Sequence[str], histories: Mapping[int, History], trainers: list[Trainer], tmp_path: Path
) -> None:
    trainers[0].log.begin_term(holders(trainers, (1, 2)), ())
    owner = owner_of(trainers[0], urls, histories, tmp_path, 1).begin()
    owner.train(8)
    trainers[1].close()
    failures: list[BaseException] = []

    def train() -> None:
        try:
            owner.train()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert trainers[0].lost.wait(DEADLINE_SECONDS)
    # Nothing has left since; the trainer's own thread is freed where it would wait, and everything goes on with the next term.
    assert owner.traffic is not None
    owner.traffic.interrupt(CopyLost("trainer 1 is gone"))
    with pytest.raises(CopyLost, match="trainer 1 is gone"):
        owner.traffic.flush()
    owner.traffic.interrupt(None)
    with pytest.raises(CopyLost, match="trainer 1: "):
        trainers[0].log.begin_term(holders(trainers, (1, 2)), LANES)
    trainers[0].log.begin_term(holders(trainers, (2,)), LANES)
    thread.join()
    if failures:  # it was interrupted where it waited
        assert [type(failure) for failure in failures] == [CopyLost]
        owner.abandon()
        return
    last = {lane: owner.traffic.last_batch(lane) for lane in LANES}
    owner.abandon()
    check_all(urls, histories, PARITY, last)


def test_a_takeover_that_loses_a_holder_leaves_the_traffic_at_work(
    urls: Sequence[str], histories: Mapping[int, History], trainers: list[Trainer], tmp_path: Path
) -> None:
    owner = owner_of(trainers[0], urls, histories, tmp_path, 1).begin()
    owner.train(4)
    traffic = owner.traffic
    assert traffic is not None

    def takes_over() -> None:
        raise CopyLost("trainer 1 is gone")

    with pytest.raises(CopyLost, match="trainer 1 is gone"):
        traffic.between_rounds(takes_over)
    traffic.interrupt(CopyLost("term 1 is over"))
    traffic.interrupt(None)
    assert traffic.between_rounds(lambda: 5) == 5
    owner.train()
    last = {lane: traffic.last_batch(lane) for lane in LANES}
    owner.abandon()
    check_all(urls, histories, PARITY, last)


def test_a_new_holder_gets_what_is_held_and_late_messages_change_nothing(trainers: list[Trainer]) -> None:
    log, one, two = trainers[0].log, trainers[1], trainers[2]
    log.begin_term(holders(trainers, (1,)), ())
    first = batch(first_number(1) + 1, first_number(1))
    log.hold(0, first)
    assert same(one.log.held(0), first)
    log.begin_term(holders(trainers, (1, 2)), (0,))
    assert same(two.log.held(0), first)
    second = batch(first.number + 1, first.number)
    log.hold(0, second)
    assert two.records.hold(0, 1, first)
    assert same(two.log.held(0), second)
    # A lane that is hosted no more is not told of.
    log.begin_term(holders(trainers, (1,)), ())
    one.log.begin_term(Holders({}, {}), ())
    assert same(one.log.adopt(0, 3), second)
    with pytest.raises(CacheError, match="is closed"):
        hold_until_closed(trainers[0], batch(second.number + 1, second.number))
    assert trainers[0].lost.is_set()
    assert same(one.log.held(0), second)


def hold_until_closed(trainer: Trainer, record: LoggedBatch) -> None:
    """An owner that is none any more waits for a further term, until its process ends."""

    def close() -> None:
        assert trainer.lost.wait(DEADLINE_SECONDS)
        trainer.log.close()

    closer = threading.Thread(target=close)
    closer.start()
    try:
        trainer.log.hold(0, record)
    finally:
        closer.join()


def test_a_silent_holder_is_given_up_at_once_when_the_term_is_over(trainers: list[Trainer]) -> None:
    with_lock = trainers[1].records._changed
    log = trainers[0].log
    log.begin_term(holders(trainers, (1,)), ())
    done = threading.Event()

    def hold() -> None:
        log.hold(0, batch(first_number(1) + 1, first_number(1)))
        done.set()

    with with_lock:  # it takes records, and says nothing
        holder = threading.Thread(target=hold)
        holder.start()
        assert not done.is_set()
        log.interrupt("term 1 is over")
        log.begin_term(Holders({}, {}), (0,))
        assert done.wait(DEADLINE_SECONDS)
    holder.join()


def test_a_silent_holder_is_given_up_in_time() -> None:
    owner, holder = Trainer(timedelta(seconds=0.2)), Trainer()
    owner.log.begin_term(Holders({0: (1,)}, {1: holder.place}), ())
    owner.log._adopted[0] = 2
    with (
        holder.records._changed,
        pytest.raises(CopyLost, match="trainer 1: did not acknowledge the batch log of lane 0"),
    ):
        owner.log.hold(0, LoggedBatch.empty(first_number(2), 0, None))
    owner.close()
    holder.close()


def test_a_lane_at_rest_is_taken_over_before_its_first_record(trainers: list[Trainer]) -> None:
    trainers[1].log.begin_with(0, 7)
    held = trainers[1].log.adopt(0, 3)
    assert held is not None
    assert (held.number, held.before, len(held.fields)) == (7, 7, 0)

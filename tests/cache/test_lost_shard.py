"""A store shard is lost in the middle of traffic: every row used is the true one, and what the store holds in the end is what it would have been."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import redis
from grids import covering
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import arriving, contents, ending, plan, run_lane, with_base
from serving import serving
from tls import KINDS, TlsServer, tls_server_or_skip

from foreload.cache.client import frames
from foreload.cache.client.channel import Channel
from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import (
    NO_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.errors import (
    CacheError,
    NamespaceInUse,
    RowError,
    RowsLost,
    ShardsRefuse,
    ShardsSilent,
    StoreError,
    StoreUnavailable,
)
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.counters import Counters
from foreload.cache.protocol.failover import Failover
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.monitor import Monitor
from foreload.cache.protocol.namespace import claim, lane_key, remove
from foreload.cache.protocol.ownership import Ownership
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.reconnection import Patience, ShardsAwaited
from foreload.cache.protocol.server_probe import ShardNews
from foreload.cache.protocol.shard_table import LOST, ShardSnapshot
from foreload.cache.traffic import Traffic

LANES = (0, 3)
IDENTITY = Ownership(0, {"run": "x"})
PATIENCE = timedelta(seconds=20)

Contents = dict[int, list[dict[bytes, bytes]]]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[LocalStores]:
    """Three servers of a test's own."""
    with LocalStores(3, tmp_path / "stores") as stores:
        yield stores


def held(stored: StoredRows, traffic: Traffic, lanes: Sequence[int] = LANES) -> Contents:
    """What every shard that is up holds of each lane, but for the marker, which says that it holds everything."""
    found = {lane: contents(stored.store, stored, lane) for lane in lanes}
    for lane, shards in found.items():
        for shard, fields in enumerate(shards):
            if shard not in stored.store.down:
                # How many batches there were is a matter of time.
                assert Marker.parse(fields.pop(MARKER)) == Marker(traffic.last_batch(lane), traffic.last_batch(lane))
    return found


class Disturber:
    """Does things at the n-th time of an action of the traffic's thread."""

    def __init__(self, events: dict[tuple[str, int], Callable[[], None]]) -> None:
        self._events = dict(events)
        self._counts: dict[str, int] = {}
        self.states: list[tuple[int, str]] = []  # shards and what became of each, in order
        self.reasons: list[str] = []  # why shards were lost
        self._shards: ShardSnapshot | None = None

    def __call__(self, action: str) -> None:
        count = self._counts[action] = self._counts.get(action, 0) + 1
        if do := self._events.pop((action, count), None):
            do()

    def hear(self, news: ShardNews) -> None:
        """What became of shards; but that no server is there for 5 s is told by a slow machine, too."""
        if not isinstance(news, ShardSnapshot):
            return
        changed = news.changes_since(self._shards)
        self.states += [(shard, status.state) for shard, status in changed.items()]
        self.reasons += [status.why for status in changed.values() if status.state == LOST]
        self._shards = news

    @property
    def done(self) -> bool:
        """Whether everything was done."""
        return not self._events


class Urls(Protocol):
    """Something that has the URLs of servers."""

    @property
    def urls(self) -> Sequence[str]: ...


def run(
    stores: Urls,
    logs: Path,
    k: int,
    r: int,
    disturber: Disturber | None = None,
    grace: timedelta = timedelta(),
    timeout: float = 10,
    lanes: Sequence[int] = LANES,
    patience: timedelta = timedelta(),
) -> tuple[Contents, Counters, list[int]]:
    """Train lanes; returns what the servers hold in the end, the counters and the shards still lost.

    grace: how long to wait at the end for shards to be rebuilt; timeout: seconds of silence after which a server is lost; patience: as Traffic
    has it.
    """
    programs = {lane: make_program(lane + 50, 30) for lane in lanes}
    with Store(stores.urls, timedelta(seconds=timeout)) as store:
        claim(store, "t", {"run": "x"}, "new")
        stored = StoredRows(store, Placement.spread(len(stores.urls), k, r), LAYOUTS, "t")
        with serving(
            stored,
            [LanePlan(lane, plan(program)) for lane, program in programs.items()],
            SEED,
            lead_events=3,
            log=FileLog(logs),
            ownership=IDENTITY,
            on_action=disturber,
            on_shards=disturber.hear if disturber else None,
            patience=Patience(patience),
        ) as traffic:
            for lane, program in programs.items():
                run_lane(traffic, lane, program)
            lost = traffic.repair_shards(grace)
        assert disturber is None or disturber.done
        return held(stored, traffic, lanes), traffic.counters(), lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], Contents]:
    """What shards hold after a run that nothing happened to."""
    known: dict[tuple[int, int, int], Contents] = {}

    def of(shards: int, k: int, r: int) -> Contents:
        if (shards, k, r) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            with LocalStores(shards, folder / "stores") as stores:
                known[shards, k, r] = run(stores, folder / "logs", k, r)[0]
        return known[shards, k, r]

    return of


def kill(stores: LocalStores, shard: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Sends a signal to a shard's server."""

    def send() -> None:
        pid = stores.pids[shard]
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            stores._processes[shard].wait()

    return send


# An action of the thread, and the n-th time of it: in the midst of the training.
MOMENTS = [
    ("data leaves", 9),
    ("data acknowledged", 9),
    ("parity rows asked for", 7),
    ("parity rows read", 7),
    ("batch logged", 9),
    ("parity leaves", 9),
    ("parity acknowledged", 9),
    ("fetch leaves", 5),
]
ONE_SHARD_A_MOMENT = covering([(moment, (shard + place) % 3) for place, moment in enumerate(MOMENTS) for shard in range(3)], 3)


@pytest.mark.parametrize(("moment", "shard"), ONE_SHARD_A_MOMENT)
def test_without_a_server_for_the_lost_shard_the_others_end_as_they_would_have(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], shard: int, moment: tuple[str, int]
) -> None:
    disturber = Disturber({moment: kill(stores, shard)})
    found, counters, lost = run(stores, tmp_path / "logs", 2, 1, disturber)
    assert lost == [shard]
    assert disturber.states == [(shard, "lost")]
    assert counters.rows_decoded > 0
    for lane, expected in undisturbed(3, 2, 1).items():
        for other in {0, 1, 2} - {shard}:
            assert found[lane][other] == expected[other]


def restart(stores: LocalStores, shard: int) -> Callable[[], None]:
    """Kills a shard's server, which is there again, empty, when that is found out."""

    def do() -> None:
        kill(stores, shard)()
        assert stores.restart(shard)

    return do


@pytest.mark.parametrize(("moment", "shard"), ONE_SHARD_A_MOMENT)
def test_a_server_that_comes_back_empty_ends_with_every_row_and_parity_row(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], shard: int, moment: tuple[str, int]
) -> None:
    disturber = Disturber({moment: restart(stores, shard)})
    found, counters, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states == [(shard, "lost"), (shard, "rebuilding"), (shard, "ok")]
    assert found == undisturbed(3, 2, 1)
    assert counters.rows_rebuilt > 0


def empty(stores: LocalStores, shard: int) -> Callable[[], None]:
    """Has a server forget everything, under the connections that it has."""

    def flush() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            other.command(shard, "FLUSHALL")

    return flush


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_emptied_under_its_connections_is_lost_and_rebuilt(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], moment: tuple[str, int]
) -> None:
    disturber = Disturber({moment: empty(stores, 1)})
    found, counters, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states == [(1, "lost"), (1, "rebuilding"), (1, "ok")]
    assert found == undisturbed(3, 2, 1)
    assert counters.rows_rebuilt > 0


def test_a_server_that_lost_some_rows_is_lost_and_rebuilt(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    def forget() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            for lane in LANES:
                names = other.command(1, "HKEYS", lane_key("t", lane, 0))
                assert isinstance(names, list)
                if len(names) > 1:
                    other.command(1, "HDEL", lane_key("t", lane, 0), *[name for name in names if name != MARKER][::2])

    disturber = Disturber({("data acknowledged", 9): forget})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states == [(1, "lost"), (1, "rebuilding"), (1, "ok")]
    assert found == undisturbed(3, 2, 1)


def test_a_server_that_is_emptied_while_it_is_rebuilt_is_rebuilt_anew(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    disturber = Disturber({("batch logged", 9): restart(stores, 1), ("rows rebuilt", 3): empty(stores, 1)})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states.count((1, "lost")) == 2
    assert found == undisturbed(3, 2, 1)


def test_a_server_that_is_emptied_and_written_to_before_its_connection_breaks_does_not_look_whole(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    """As if the write had come between: all that was under way has been done, and no one heard of it."""
    attempt, done = Store.attempt, list[bool]()

    def unheard(self: Store, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        if done or not any(Marker.parse(write.marker) == Marker(12, 12) for write in writes):
            return attempt(self, reads, writes)
        done.append(True)
        empty(stores, 1)()
        failures = attempt(self, reads, writes)
        return failures | {1: StoreUnavailable("the connection broke")}

    disturber = Disturber({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "attempt", unheard)
        # However slow the machine, so that it is not lost for being late; and the note of whose the server is, is there.
        patch.setattr("foreload.cache.protocol.reconnection.RECONNECT", PATIENCE)
        patch.setattr(Ownership, "has", lambda *_: True)
        # One lane, so that the marker is everywhere what it must be.
        found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE, lanes=LANES[:1])
    assert lost == []
    # By the count of its rows, before any that it lacks was asked for.
    assert disturber.reasons[0].endswith("came back without the run's last write-back batches, or without rows")
    assert found == {LANES[0]: undisturbed(3, 2, 1)[LANES[0]]}


@pytest.mark.parametrize("covered", [True, False])
def test_a_row_that_is_missing_on_one_shard_too_many_is_decoded_alone_if_its_stripe_allows(tmp_path: Path, covered: bool) -> None:
    count = 60
    wanted = arriving(*((1, ordinal, 1000 + ordinal, 7, 9) for ordinal in range(count)))
    with LocalStores(5, tmp_path / "stores") as stores, Store(stores.urls, timedelta(seconds=10)) as store:
        placement = Placement.spread(5, 2, 1)
        stored = StoredRows(store, placement, LAYOUTS, "t")
        at = placement.stripes(0, np.zeros(len(LAYOUTS), np.int64)).shards(1, np.arange(count) // 2)
        with_first = (at == 0).any(axis=1)
        gone = int(np.flatnonzero((at[np.arange(count), np.arange(count) % 2] == 1) & (with_first != covered))[0])
        name = (1 << 48 | gone).to_bytes(8, "big")
        plan = LanePlan(0, iter([(0, arriving()), (1, wanted)]))
        traffic = serving(stored, [plan], SEED, log=FileLog(tmp_path / "logs"))
        traffic.take(0, 0)
        traffic.write_back(0, 4, with_base(ending(count, 7)))
        traffic.flush()
        kill(stores, 0)()
        traffic.probe()
        with Store(stores.urls[1:2], timedelta(seconds=10)) as other:
            row = other.command(0, "HGET", stored.key(0, 1), name)
            assert other.command(0, "HDEL", stored.key(0, 1), name) == 1
            traffic.write_back(0, 9, ending(0, 1))
            if covered:
                assert (traffic.take(0, 1).weights[:, :3] == 1).all()
                assert list(traffic.shards.not_whole) == [0]
            else:
                with pytest.raises(RowError, match=rf"table narrow: the row with ordinal {gone} .* is missing"):
                    traffic.take(0, 1)
            assert other.command(0, "HGET", stored.key(0, 1), name) == (row if covered else None)
        traffic.abort()


def asked(stores: LocalStores, shard: int, *words: object) -> Callable[[], None]:
    """Has a server do something, as its administrator would."""

    def ask() -> None:
        with Store(stores.urls[shard : shard + 1], timedelta(seconds=5)) as other:
            other.command(0, *words)  # type: ignore[arg-type]

    return ask


def busy(stores: LocalStores, shard: int, until: threading.Event) -> Callable[[], None]:
    """Has a server run a script until an event, and say so to everyone else."""

    def loop() -> None:
        with contextlib.suppress(CacheError), Store(stores.urls[shard : shard + 1], timedelta(seconds=60)) as other:
            other.command(0, "EVAL", "while true do end", 0)

    def begin() -> None:
        asked(stores, shard, "CONFIG", "SET", "lua-time-limit", 5)()
        thread = threading.Thread(target=loop)
        thread.start()

        def end() -> None:
            until.wait(60)
            with redis.Redis(unix_socket_path=str(stores.urls[shard]).removeprefix("unix://")) as other:
                other.script_kill()
            thread.join()

        threading.Thread(target=end).start()

    return begin


def failing_to_save(stores: LocalStores, shard: int) -> Callable[[], None]:
    """Has a server, that is to save now and then, fail to: from then on it takes no writes (MISCONF)."""

    def fail() -> None:
        # A folder in the place of its file: the rename at the end of the save fails, for root too.
        (stores.directory / f"shard-{shard}.rdb" / "x").mkdir(parents=True)
        with Store(stores.urls[shard : shard + 1], timedelta(seconds=5)) as other:
            other.command(0, "CONFIG", "SET", "save", "3600 1000000")
            other.command(0, "BGSAVE")
            while other.info(0)["rdb_last_bgsave_status"] != "err":
                pass

    return fail


REFUSALS = {
    "READONLY": (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    "OOM": (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)),
    "NOPERM": (("ACL", "SETUSER", "default", "-hset"), ("ACL", "SETUSER", "default", "+hset")),
    "MISCONF": ((), ("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")),
}


def refusing(stores: LocalStores, shard: int, refusal: str) -> Callable[[], None]:
    """Has a server refuse to write from then on."""
    words = REFUSALS[refusal][0]
    return asked(stores, shard, *words) if words else failing_to_save(stores, shard)


@pytest.mark.parametrize("refusal", [*REFUSALS, "BUSY"])
def test_a_server_that_refuses_is_lost_until_it_no_longer_does(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], refusal: str
) -> None:
    until = threading.Event()
    if refusal == "BUSY":
        events = {("batch logged", 9): busy(stores, 1, until), ("batch logged", 14): until.set}
    else:
        events = {
            ("batch logged", 9): refusing(stores, 1, refusal),
            ("batch logged", 14): asked(stores, 1, *REFUSALS[refusal][1]),
        }
    disturber = Disturber(events)
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE, timeout=0.5)
    assert lost == []
    assert disturber.states == [(1, "lost"), (1, "rebuilding"), (1, "ok")]
    assert found == undisturbed(3, 2, 1)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_goes_on_refusing_is_never_adopted(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], refusal: str
) -> None:
    disturber = Disturber({("batch logged", 9): refusing(stores, 1, refusal)})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=timedelta(seconds=1))
    assert lost == [1]
    assert disturber.states == [(1, "lost")]
    for lane, expected in undisturbed(3, 2, 1).items():
        assert [found[lane][shard] for shard in (0, 2)] == [expected[shard] for shard in (0, 2)]


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("READONLY", "is a read-only replica; name its primary instead"),
        ("OOM", r"is full \(OOM .*\); raise its maxmemory"),
        ("NOPERM", r"refuses the user or password \(NOPERM .*\)"),
        ("MISCONF", r"takes no writes, for it cannot save to its disk \(MISCONF .*\); free disk space"),
        ("BUSY", r"not ready \(BUSY .*\); try again later, or with a longer --store-timeout"),
    ],
)
def test_without_parity_a_server_that_refuses_is_told_of_in_a_line(
    stores: LocalStores, tmp_path: Path, refusal: str, told: str
) -> None:
    until = threading.Event()
    begin = busy(stores, 1, until) if refusal == "BUSY" else refusing(stores, 1, refusal)
    try:
        with pytest.raises(StoreError, match=rf"store unix://\S*shard-1\.sock: {told}") as caught:
            run(stores, tmp_path / "logs", 1, 0, Disturber({("data leaves", 4): begin}), timeout=0.5)
    finally:
        until.set()
    asked(stores, 1, "INFO")()  # answered when the script has ended
    assert "\n" not in str(caught.value)


def test_where_more_servers_refuse_than_parity_covers_the_reason_is_told_and_not_that_rows_are_gone(
    stores: LocalStores, tmp_path: Path
) -> None:
    def refuse() -> None:
        for shard in range(3):
            asked(stores, shard, "CONFIG", "SET", "maxmemory", 1)()

    message = (
        r"store shards 0, 1 take no part any more, and parity covers 1: store unix://\S*: is full .*They still have their rows"
    )
    with pytest.raises(ShardsRefuse, match=message):
        run(stores, tmp_path / "logs", 2, 1, Disturber({("batch logged", 9): refuse}))


def test_a_server_that_refused_and_is_rebuilt_does_not_count_as_one_that_has_its_rows(
    stores: LocalStores, tmp_path: Path
) -> None:
    disturber = Disturber(
        {
            ("batch logged", 9): refusing(stores, 1, "OOM"),
            ("batch logged", 14): asked(stores, 1, *REFUSALS["OOM"][1]),
            # What is rebuilt is decoded from rows of this one.
            ("rows rebuilt", 1): asked(stores, 0, "ACL", "SETUSER", "default", "-@read"),
        }
    )
    message = (
        r"store shards 0, 1 take no part any more, and parity covers 1: store unix://\S*shard-0\.sock: refuses the user or "
        r"password .*"
        r"Of these, 0 still have their rows"
    )
    with pytest.raises(ShardsRefuse, match=message):
        run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)


def test_a_server_that_answers_nonsense_is_lost(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, nonsense = Channel.begin, [False]

    def garbled(self: Channel, table: np.ndarray, first: int, requests: list[Any]) -> None:
        begin(self, table, first, requests)
        if nonsense[0] and str(self.url) == stores.urls[1]:
            nonsense[0] = False
            self._data[:9] = np.frombuffer(b"HTTP/1.1\n", np.uint8)
            self._state[frames.IN_END] = 9

    monkeypatch.setattr(Channel, "begin", garbled)
    disturber = Disturber({("batch logged", 9): lambda: nonsense.__setitem__(0, True)})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states == [(1, "lost"), (1, "rebuilding"), (1, "ok")]
    assert found == undisturbed(3, 2, 1)


def test_the_rebuilt_shard_is_lost_again_during_its_rebuild(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    disturber = Disturber({("batch logged", 9): restart(stores, 1), ("rows rebuilt", 3): restart(stores, 1)})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states.count((1, "lost")) == 2
    assert found == undisturbed(3, 2, 1)


def test_a_stopped_shard_is_lost_after_the_timeout_and_what_it_was_sent_harms_nothing(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    disturber = Disturber(
        {("data leaves", 9): kill(stores, 2, signal.SIGSTOP), ("batch logged", 14): kill(stores, 2, signal.SIGCONT)}
    )
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE, timeout=0.3)
    assert lost == []
    assert found == undisturbed(3, 2, 1)


def test_two_of_six_shards_are_lost_at_once(tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]) -> None:
    with LocalStores(6, tmp_path / "stores") as stores:

        def both() -> None:
            for shard in (1, 4):
                restart(stores, shard)()

        found, _, lost = run(stores, tmp_path / "logs", 4, 2, Disturber({("parity leaves", 9): both}), grace=PATIENCE)
    assert lost == []
    assert found == undisturbed(6, 4, 2)


def test_more_losses_than_parity_covers_stop_the_traffic(stores: LocalStores, tmp_path: Path) -> None:
    disturber = Disturber({("data leaves", 9): empty(stores, 0), ("batch logged", 12): empty(stores, 2)})
    with pytest.raises(
        RowsLost, match=r"store shards 0, 2 are lost, and parity covers 1: \d+ rows of table wide, .* cannot be had"
    ):
        run(stores, tmp_path / "logs", 2, 1, disturber)


def test_more_shards_that_do_not_answer_than_parity_covers_are_not_lost(stores: LocalStores, tmp_path: Path) -> None:
    disturber = Disturber({("data leaves", 9): kill(stores, 0), ("batch logged", 12): kill(stores, 2)})
    with pytest.raises(
        ShardsSilent, match=r"store shards 0, 2: lost, or without an answer, and parity covers 1: .* cannot be reached"
    ):
        run(stores, tmp_path / "logs", 2, 1, disturber)


@pytest.mark.parametrize(("k", "r"), [(2, 1), (1, 0)], ids=["2+1", "without parity"])
@pytest.mark.parametrize("moment", [("data leaves", 9), ("fetch leaves", 5), ("data acknowledged", 9)])
def test_rows_that_another_run_deleted_are_not_told_as_lost(
    stores: LocalStores, tmp_path: Path, k: int, r: int, moment: tuple[str, int]
) -> None:
    def take() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            remove(other, "t")
            claim(other, "t", {"run": "another"}, "new")

    with pytest.raises(NamespaceInUse, match="namespace t is another run's by now, which deleted this one's rows"):
        run(stores, tmp_path / "logs", k, r, Disturber({moment: take}))


class Releasing(Disturber):
    """One that lets servers go on that stand still, once they are waited for."""

    def __init__(self, stores: LocalStores, stopped: dict[tuple[str, int], Sequence[int]]) -> None:
        self._stores = stores
        super().__init__({moment: partial(self._each, shards, signal.SIGSTOP) for moment, shards in stopped.items()})
        self.awaited: list[tuple[int, ...]] = []

    def _each(self, shards: Sequence[int], number: int) -> None:
        for shard in shards:
            kill(self._stores, shard, number)()

    def hear(self, news: ShardNews) -> None:
        super().hear(news)
        if isinstance(news, ShardsAwaited):
            self.awaited.append(news.shards)
            self._each(news.shards, signal.SIGCONT)


@pytest.mark.parametrize(
    ("moment", "k", "r", "shards"),
    [  # when every shard is asked something: of others, those that are asked alone may be lost before the rest is found to be silent
        (("data leaves", 9), 2, 1, (0, 1, 2)),
        (("batch logged", 9), 2, 1, (0, 2)),
        (("parity leaves", 9), 2, 1, (0, 1, 2)),
        (("data leaves", 9), 1, 0, (0, 1, 2)),
        (("data leaves", 7), 1, 0, (1,)),
    ],
)
def test_shards_that_stand_still_and_are_too_many_are_waited_for(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents],
    moment: tuple[str, int], k: int, r: int, shards: tuple[int, ...],
) -> None:  # fmt: skip
    """Nothing is lost, and the rows are those of a run in which all answered."""
    disturber = Releasing(stores, {moment: shards})
    found, counters, lost = run(stores, tmp_path / "logs", k, r, disturber, timeout=1, patience=PATIENCE)
    assert disturber.done
    assert disturber.awaited[0]
    assert set(disturber.awaited[0]) <= set(shards)
    assert disturber.awaited[-1] == ()
    assert (lost, disturber.states, counters.rows_decoded) == ([], [], 0)
    assert found == undisturbed(3, k, r)


@pytest.mark.parametrize(("k", "r"), [(2, 1), (1, 0)], ids=["2+1", "without parity"])
def test_a_connection_that_is_reset_is_made_again_and_nothing_is_lost(
    stores: LocalStores, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents], k: int, r: int
) -> None:
    def reset() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            other.command(1, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    leave = ("data leaves", "parity leaves", "fetch leaves") if r else ("data leaves", "data acknowledged", "fetch leaves")
    disturber = Disturber({(action, count): reset for action in leave for count in (6, 8)})
    found, counters, lost = run(stores, tmp_path / "logs", k, r, disturber)
    assert disturber.done
    assert lost == []
    assert disturber.states == []
    assert counters.rows_decoded == 0
    assert found == undisturbed(3, k, r)


@dataclass
class OverTls:
    """Three servers that are reached over TLS."""

    servers: list[TlsServer]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]


@pytest.fixture(params=KINDS)
def over_tls(request: pytest.FixtureRequest, tmp_path: Path, certificates: Path) -> Iterator[OverTls]:
    """Three servers of a test's own, over TLS."""
    with contextlib.ExitStack() as opened:
        servers = []
        for shard in range(3):
            servers.append(tls_server_or_skip(tmp_path / f"{shard}", certificates, request.param))
            opened.callback(servers[-1].close)
        yield OverTls(servers)


def test_a_server_that_closes_tls_connections_loses_nothing_and_one_that_dies_is_a_lost_shard(
    over_tls: OverTls, tmp_path: Path, undisturbed: Callable[[int, int, int], Contents]
) -> None:
    servers = over_tls.servers
    disturber = Disturber(
        {
            (action, count): servers[1].disconnect
            for action in ("data leaves", "parity leaves", "fetch leaves")
            for count in (4, 6, 8)
        }
    )
    found, counters, lost = run(over_tls, tmp_path / "logs", 2, 1, disturber)
    assert lost == []
    assert disturber.states == []
    assert counters.rows_decoded == 0
    assert found == undisturbed(3, 2, 1)

    for server in servers:
        with Store(server.stores.urls) as store:
            store.command(0, "FLUSHALL")
    disturber = Disturber({("data leaves", 9): kill(servers[2].stores, 0)})
    found, counters, lost = run(over_tls, tmp_path / "more logs", 2, 1, disturber)
    assert lost == [2]
    assert counters.rows_decoded > 0
    for lane, expected in undisturbed(3, 2, 1).items():
        assert found[lane][:2] == expected[:2]


def test_a_shard_that_dies_after_the_last_write_is_noticed_at_the_end(stores: LocalStores, tmp_path: Path) -> None:
    program = make_program(1, 10)
    with Store(stores.urls, timedelta(seconds=5)) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path / "logs")) as traffic:
            run_lane(traffic, 0, program)
            assert traffic.repair_shards(timedelta()) == []
            kill(stores, 1)()
            assert traffic.repair_shards(timedelta()) == [1]
            assert stores.restart(1)
            assert traffic.repair_shards(PATIENCE) == []
            assert traffic.counters().rows_rebuilt > 0


@pytest.mark.parametrize(
    ("rebuilding", "found", "message"),
    [
        (False, Marker(1, 1), "is 1, must be 1, with the parity of 2"),
        (False, Marker(2, 1, True), "is 1, with the parity of 2, being rebuilt, must be 1, with the parity of 2"),
        (True, Marker(2, 2), "is 2, must be 1, with the parity of 2, being rebuilt"),
    ],
)
def test_a_stale_shard_is_lost_and_the_marker_that_it_must_have_is_named(
    stores: LocalStores, rebuilding: bool, found: Marker, message: str
) -> None:
    with Store(stores.urls, timedelta(seconds=5)) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        failover = Failover(stored, Ownership(), Monitor(), lambda change: None, Patience())
        try:
            if rebuilding:
                stored.shards.advance(0, 1, 0)
            store.exchange([], [Write(1, stored.key(0, 1), *NO_ROWS, found.stored())])
            read = Read(1, stored.key(0, 1), *NO_ROWS)
            failover.exchange([(0, read)], [], lambda lane: [Marker(2, 1), Marker(2, 2)])
            assert stored.shards.snapshot.lost == [1]
            assert stored.shards.snapshot.shards[1].why.endswith(f"is stale: its marker for lane 0 {message}")
        finally:
            failover.close()


def test_a_store_whose_shards_are_optional_begins_without_those_that_do_not_answer(stores: LocalStores) -> None:
    kill(stores, 0)()
    kill(stores, 1, signal.SIGSTOP)()
    try:
        with Store(stores.urls, timedelta(seconds=0.3), timedelta(), optional=True) as store:
            assert sorted(store.down) == [0, 1]
            assert store.command(2, "PING") == "PONG"
            read = Read(2, b"k", *NO_ROWS)
            assert sorted(store.attempt([read, Read(0, b"k", *NO_ROWS)], [])) == [0]
    finally:
        kill(stores, 1, signal.SIGCONT)()

"""Store shards that are lost during the traffic of lanes: what happens to their servers, and what all servers hold in the end."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from lane_program import LAYOUTS, SEED, make_program
from lane_runs import contents, plan, run_lane
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import LOST, Patience, ShardNews, ShardSnapshot
from foreload.cache.traffic import Counters, Traffic

LANES = (0, 3)
IDENTITY = Ownership(0, {"run": "x"})
PATIENCE = timedelta(seconds=20)

Contents = dict[int, list[dict[bytes, bytes]]]
Events = Mapping[tuple[str, int], Callable[[], object]]
"""What is done at the n-th time of an action of the traffic's thread."""


class Urls(Protocol):
    """Something that has the URLs of servers."""

    @property
    def urls(self) -> Sequence[str]: ...


class Disturber:
    """Does things at the n-th time of an action of the traffic's thread."""

    def __init__(self, events: Events) -> None:
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


def kill(stores: LocalStores, shard: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a shard's server; one that is killed is gone afterwards."""
    pid = stores.pids[shard]
    assert pid is not None
    os.kill(pid, number)
    if number == signal.SIGKILL:
        stores._processes[shard].wait()


def restart(stores: LocalStores, shard: int) -> None:
    """Kill a shard's server, and start it again, empty, before that is noticed."""
    kill(stores, shard)
    assert stores.restart(shard)


def asked(stores: Urls, shard: int, *words: str | int) -> None:
    """Have a server do something, as its administrator would."""
    with Store(stores.urls[shard : shard + 1], timedelta(seconds=5)) as other:
        other.command(0, *words)


def empty(stores: Urls, shard: int) -> None:
    """Have a server forget everything, under the connections that it has."""
    asked(stores, shard, "FLUSHALL")


def held(stored: StoredRows, traffic: Traffic, lanes: Sequence[int] = LANES) -> Contents:
    """What every shard that is up holds of each lane, but for the marker, which says that it holds everything."""
    found = {lane: contents(stored.store, stored, lane) for lane in lanes}
    for lane, shards in found.items():
        for shard, fields in enumerate(shards):
            if shard not in stored.store.down:
                # How many batches there were is a matter of time.
                assert Marker.parse(fields.pop(MARKER)) == Marker(traffic.last_batch(lane), traffic.last_batch(lane))
    return found


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


@cache
def undisturbed(shards: int, k: int, r: int) -> Contents:
    """What shards hold after a run that nothing happened to."""
    with tempfile.TemporaryDirectory() as folder, LocalStores(shards, Path(folder) / "stores") as stores:
        return run(stores, Path(folder) / "logs", k, r)[0]


def check_rebuilt(stores: Urls, logs: Path, events: Events, shard: int = 1, **how: Any) -> Counters:
    """Train 2+1 on three servers: with these events the shard is lost and rebuilt, once, and all servers end with what they hold undisturbed.

    how: as `run` takes it.
    """
    disturber = Disturber(events)
    found, counters, lost = run(stores, logs, 2, 1, disturber, grace=PATIENCE, **how)
    assert lost == []
    assert disturber.states == [(shard, "lost"), (shard, "rebuilding"), (shard, "ok")]
    assert found == undisturbed(3, 2, 1)
    return counters


def check_lost(stores: Urls, logs: Path, events: Events, shard: int, **how: Any) -> None:
    """The same, but the shard stays lost, and the others end with what they hold undisturbed."""
    disturber = Disturber(events)
    found, counters, lost = run(stores, logs, 2, 1, disturber, **how)
    assert lost == [shard]
    assert disturber.states == [(shard, "lost")]
    assert counters.rows_decoded > 0
    for lane, expected in undisturbed(3, 2, 1).items():
        for other in {0, 1, 2} - {shard}:
            assert found[lane][other] == expected[other]


def check_unharmed(stores: Urls, logs: Path, k: int, r: int, disturber: Disturber, **how: Any) -> None:
    """Train on three servers: no shard is lost for a moment, and all end with what they hold undisturbed."""
    found, counters, lost = run(stores, logs, k, r, disturber, **how)
    assert (lost, disturber.states, counters.rows_decoded) == ([], [], 0)
    assert found == undisturbed(3, k, r)

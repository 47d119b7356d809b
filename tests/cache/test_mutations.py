"""Bugs put back on purpose: the checks of the other tests find each of them on real servers, so these checks can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, LaneProgram, make_program
from lost_shards import IDENTITY, PATIENCE, Disturber, empty, kill, restart, run
from serving import serving
from test_parity import EVALUATION_SLOTS, SLOTS, Recording, check_stripes, plan, run_lane
from test_traffic import ending

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import CacheError
from foreload.cache.parity import decoding
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import Selected, select_rows
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds import lanes
from foreload.cache.protocol.rounds.lanes import LanePlan, WriteBackBatch
from foreload.cache.protocol.rounds.reconnection import Reconnection
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_table import ShardTable

Check = Callable[[LocalStores, Path], None]


@contextmanager
def lane_trained(stores: LocalStores, folder: Path) -> Iterator[tuple[Recording, StoredRows, LaneProgram]]:
    """The store after a lane was trained on it, 2+1."""
    program = make_program(7, 15, SLOTS, SLOTS, EVALUATION_SLOTS)
    with Recording(stores.urls) as store, closing(FileLog(folder)) as log:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=log) as traffic:
            run_lane(traffic, 0, program)
        yield store, stored, program


def phases_stay_apart(stores: LocalStores, folder: Path) -> None:
    """No exchange carries the parity rows and the rows of one batch."""
    with lane_trained(stores, folder) as (store, _, _):
        exchanges = store.exchanges
    for _, writes in exchanges:
        sent = {Marker.parse(write.marker) for write in writes}
        assert len(sent) <= 1


def stripes_agree(stores: LocalStores, folder: Path) -> None:
    """Every parity row in the store is that of its members."""
    with lane_trained(stores, folder) as (store, stored, program):
        assert check_stripes(store, stored, 0, program)


def a_lost_shard_is_decoded(stores: LocalStores, folder: Path) -> None:
    """Every row used is the true one, though a shard is lost."""
    run(stores, folder, 2, 1, Disturber({("parity acknowledged", 9): partial(kill, stores, 1)}))


def a_lost_shard_is_rebuilt(stores: LocalStores, folder: Path) -> None:
    """A shard that was lost holds in the end what one of an undisturbed run holds."""
    disturbed = run(stores, folder / "a", 2, 1, Disturber({("parity leaves", 9): partial(restart, stores, 1)}), grace=PATIENCE)[0]
    with LocalStores(3, folder / "stores") as others:
        assert disturbed == run(others, folder / "b", 2, 1)[0]


def an_emptied_shard_is_rebuilt(stores: LocalStores, folder: Path) -> None:
    """A shard that is emptied before the last write-back is not taken for whole."""
    first = ending(60, 7)
    first = replace(first, base_weights=np.zeros_like(first.weights), base_state=np.zeros_like(first.state))
    again = replace(first, tag=first.tag + 1, stored_tag=first.tag, base_weights=first.weights, base_state=first.state)
    again = again.select(np.arange(20))  # whole stripes: nothing is read
    with Store(stores.urls) as store:
        claim(store, "t", {"run": "x"}, "overwrite")
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, iter([]))], SEED, log=FileLog(folder), ownership=IDENTITY) as traffic:
            traffic.write_back(0, 1, first)
            traffic.flush()
            before = [store.command(shard, "HLEN", stored.key(0, shard)) for shard in range(3)]
            empty(stores, 1)
            traffic.write_back(0, 2, again)
            traffic.flush()
            assert traffic.repair_shards(PATIENCE) == []
            assert [store.command(shard, "HLEN", stored.key(0, shard)) for shard in range(3)] == before


def parity_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """The parity rows of a batch leave together with its rows."""
    exchange = Rounds.exchange
    held: list[tuple[int, Write]] = []

    def late(self: Rounds, reads: Sequence[tuple[int, Read]], out: Sequence[tuple[int, Write]]) -> None:
        if self._phase:
            held.extend(out)
            return
        some, held[:] = list(held), []
        exchange(self, reads, [*some, *out])

    patch.setattr(Rounds, "exchange", late)


def the_difference_is_added_twice(patch: pytest.MonkeyPatch) -> None:
    update = WriteBackBatch.update

    def twice(self: WriteBackBatch, code: Code) -> None:
        update(self, code)
        update(self, code)

    patch.setattr(WriteBackBatch, "update", twice)


def a_range_is_left_out_of_the_rebuild(patch: pytest.MonkeyPatch) -> None:
    def fewer(stripes: LaneStripes, table: int, first: int, most: int, shards: int, shard: int | None = None) -> Selected:
        rows = select_rows(stripes, table, first, most, shards, shard)
        left = {name: getattr(rows, name)[2:] for name in ("fields", "stripe", "place", "source", "target")}
        return replace(rows, **left)

    patch.setattr("foreload.cache.protocol.handover.migration.select_rows", fewer)


def sums_are_of_floats(patch: pytest.MonkeyPatch) -> None:
    """Parity is a sum of values and not of bits: what is decoded is nearly right."""

    def difference(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            values: np.ndarray = (a.view(np.float32) - np.where(where[:, None], b.view(np.float32), 0)).astype(np.float32)
        return values.view(np.uint8)

    def into_parity(source: np.ndarray, places: np.ndarray, factors: np.ndarray, target: np.ndarray, targets: np.ndarray) -> None:
        for place, to in zip(places, targets, strict=True):
            if to >= 0:
                with np.errstate(all="ignore"):
                    target.view(np.float32)[to] += source.view(np.float32)[place]

    def out_of_parity(
        source: np.ndarray, places: np.ndarray, factors: np.ndarray, target: np.ndarray, targets: np.ndarray
    ) -> None:
        # With one parity row the wanted one is the parity less the others; which of the sources is the parity, its size does not say.
        for to in np.unique(targets):
            rows = source.view(np.float32)[places[targets == to]]
            with np.errstate(all="ignore"):
                target.view(np.float32)[to] = rows[np.argmax(np.abs(rows).sum(axis=1))] * 2 - rows.sum(axis=0)

    patch.setattr(lanes, "difference", difference)
    patch.setattr(lanes, "accumulate", into_parity)
    patch.setattr(decoding, "accumulate", out_of_parity)


def a_marker_is_trusted_unseen(patch: pytest.MonkeyPatch) -> None:
    """A server that came back empty counts as if it had everything."""
    patch.setattr(Reconnection, "expected", lambda self, lane, shard, marker, markers: True)
    what_a_write_brought_is_not_counted(patch)
    patch.setattr(Reconnection, "_as_it_was", lambda *_: True)
    patch.setattr(Ownership, "has", lambda *_: True)
    # However slow the machine, so that it is not lost for being late.
    patch.setattr("foreload.cache.protocol.rounds.reconnection.RECONNECT", PATIENCE)


def what_a_write_brought_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A write that was acknowledged counts as one that changed what it was meant to change, and a row that is missing as one alone."""
    patch.setattr(Write, "surprise", None)
    patch.setattr(ShardTable, "covers", lambda *_: False)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], Check]] = [
    (parity_is_not_awaited, phases_stay_apart),
    (parity_is_not_awaited, stripes_agree),
    (the_difference_is_added_twice, stripes_agree),
    (the_difference_is_added_twice, a_lost_shard_is_decoded),
    (a_range_is_left_out_of_the_rebuild, a_lost_shard_is_rebuilt),
    (sums_are_of_floats, stripes_agree),
    (sums_are_of_floats, a_lost_shard_is_decoded),
    (a_marker_is_trusted_unseen, a_lost_shard_is_rebuilt),
    (what_a_write_brought_is_not_counted, an_emptied_shard_is_rebuilt),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in MUTATIONS), ids=lambda check: check.__name__)
def test_without_a_bug_each_check_passes(stores: LocalStores, tmp_path: Path, check: Check) -> None:
    check(stores, tmp_path / "logs")


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=lambda value: value.__name__)
def test_a_bug_is_found(
    stores: LocalStores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    check: Check,
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, CacheError)):
        check(stores, tmp_path / "logs")

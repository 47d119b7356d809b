"""A store shard whose answers come later than the others', or that has much more to do, is named; equal ones never are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from delay_proxy import delayed

from foreload.cache.client.load import ShardLoad, slower, together
from foreload.cache.client.store import Store, Write
from foreload.cache.rows.row_bytes import fields
from foreload.trainer.run import shard_loads

EXCHANGES = 60
LATER_SECONDS = (0.05, 0.5, 5.0)
"""By how much answers come later: the least that is more than what else keeps answers on this machine."""


def exchanged(urls: Sequence[str], rows_of: Sequence[int] = (100, 100, 100)) -> dict[int, ShardLoad]:
    """What a store notes of so many exchanges of so many rows with each shard."""
    with Store(urls) as store:
        for number in range(EXCHANGES):
            writes = [
                Write(shard, b"loads", fields(0, np.arange(count)), np.full((count, 400), number, np.uint8))
                for shard, count in enumerate(rows_of)
            ]
            store.exchange([], writes)
        loads = store.loads
        for shard in range(store.shards):
            store.command(shard, "UNLINK", "loads")
    return loads


def test_a_shard_with_slow_answers_is_named_with_what_it_costs(urls: Sequence[str]) -> None:
    for seconds in LATER_SECONDS:
        with delayed(urls[2], seconds) as slow:
            told = shard_loads.reports(exchanged([*urls[:2], slow]), EXCHANGES)
        if told[2]["slow"] is not None:
            break
    assert [one["exchanges"] for one in told] == [EXCHANGES] * 3
    assert [one["slow"] is not None for one in told] == [False, False, True]
    assert told[2]["ms_answer"] >= 30
    (line,) = shard_loads.lines(told)
    assert line.startswith("store shard 2 is slow: its answers take ")
    assert line.endswith(" ms a step")


def test_a_shard_with_more_than_its_share_is_named(urls: Sequence[str]) -> None:
    told = shard_loads.reports(exchanged(urls, (100, 2000, 100)), EXCHANGES)
    assert [one["hot"] is not None for one in told] == [False, True, False]
    assert "store shard 1 is hot: it has " in "\n".join(shard_loads.lines(told))


def test_equal_shards_are_never_named() -> None:
    """What a busy machine makes of equal servers: means differ by a tenth, or, where answers are quick, by more, but not by much time."""
    mean = {0: 0.0055, 1: 0.0060, 2: 0.0058}
    loads = {shard: ShardLoad(1000, 1000 * seconds, 0.5, 20 << 20) for shard, seconds in mean.items()}
    quick = {0: ShardLoad(1000, 0.1, 0.01, 1 << 24), 1: ShardLoad(1000, 0.4, 0.2, 1 << 24)}
    for counted in (loads, quick, together([loads, loads]), {}, {0: ShardLoad(1000, 1.0, 0.0, 1 << 30)}):
        assert shard_loads.lines(shard_loads.reports(counted, 1000)) == []


def test_answers_of_late_count_also_where_one_shard_alone_is_asked(urls: Sequence[str]) -> None:
    for seconds in LATER_SECONDS:
        with delayed(urls[2], seconds) as slow, Store([*urls[:2], slow]) as store:
            for _ in range(4):
                store.exchange(
                    [], [Write(shard, b"loads", fields(0, np.arange(1)), np.zeros((1, 4), np.uint8)) for shard in range(2)]
                )
                store.command(2, "PING")
            recent = dict(store.recent_seconds)
            assert 2 not in store.loads  # which is of those that are asked together
            store.forget_loads()
            assert not store.recent_seconds
            store.command(0, "UNLINK", "loads")
            store.command(1, "UNLINK", "loads")
        slow_ones = [shard for shard in range(3) if slower(shard, recent, 3.0, 0.015) is not None]
        if slow_ones == [2]:
            break
    assert slow_ones == [2]

"""The store client against real servers."""

from __future__ import annotations

import numpy as np
import pytest

from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import Fenced, RowError


def rows(n: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes)).astype(np.uint8)


@pytest.mark.parametrize("n", [0, 1, 5, 2048, 2049, 9000])
@pytest.mark.parametrize("row_bytes", [12, 16, 144, 1100])
def test_what_is_written_is_read_back(store: Store, n: int, row_bytes: int) -> None:
    fields, values = np.arange(n, dtype=np.uint64) * 7919, rows(n, row_bytes)
    writes, reads = [], []
    for shard in range(3):
        for start in range(0, max(n, 1), 2048):
            part = slice(start, start + 2048)
            writes.append(Write(shard, b"{a:1}:0", fields[part], values[part], marker=b"%08d" % (start + 2048)))
        reads.append(Read(shard, b"{a:1}:0", fields, np.zeros_like(values)))
    store.exchange([], writes)
    store.exchange(reads, [])
    for read in reads:
        assert read.missing is None
        assert int(read.marker or 0) == len(range(0, max(n, 1), 2048)) * 2048
        assert np.array_equal(read.rows, values)


def test_reads_go_before_writes_of_the_same_exchange(store: Store) -> None:
    fields, values = np.arange(10, dtype=np.uint64), rows(10, 20)
    store.exchange([], [Write(1, b"k", fields, values, b"before")])
    read = Read(1, b"k", fields, np.zeros_like(values))
    store.exchange([read], [Write(1, b"k", fields, rows(10, 20, seed=1), b"after")])
    assert read.marker == b"before"
    assert np.array_equal(read.rows, values)


def test_missing_rows_are_told_apart(store: Store) -> None:
    fields, values = np.arange(6000, dtype=np.uint64), rows(6000, 40)
    there = np.random.default_rng(1).random(6000) < 0.5
    there[:2048] = True
    chosen = np.flatnonzero(there)
    store.exchange([], [Write(0, b"k", fields[part], values[part], b"12345678") for part in np.array_split(chosen, 3)])
    read = Read(0, b"k", fields, np.zeros_like(values))
    store.exchange([read], [])
    assert read.missing is not None
    assert np.array_equal(read.missing, ~there)
    assert np.array_equal(read.rows[there], values[there])
    assert not read.rows[~there].any()
    nothing = Read(0, b"none", fields[:3], np.zeros((3, 8), np.uint8))
    store.exchange([nothing], [])
    assert nothing.missing is not None
    assert nothing.missing.all()
    assert nothing.marker is None


def test_a_value_of_another_length_is_an_error_and_the_connection_goes_on(store: Store) -> None:
    fields, values = np.arange(9, dtype=np.uint64), rows(9, 40)
    store.exchange([], [Write(0, b"k", fields, values)])
    for row_bytes in (36, 44, 400):
        with pytest.raises(RowError, match=rf"0x0000000000000000 of k has 40 bytes.*{row_bytes}"):
            store.exchange([Read(0, b"k", fields, np.zeros((9, row_bytes), np.uint8))], [])
    store.command(0, "HSET", "k", b"\0" * 7 + b"\5", b"x" * 3_000_000)
    with pytest.raises(RowError, match="0x0000000000000005 of k has 3000000 bytes"):
        store.exchange([Read(0, b"k", fields, np.zeros_like(values))], [])
    assert store.command(0, "PING") == "PONG"


def test_a_fenced_key_says_so(store: Store) -> None:
    store.command(2, "SET", "k", "fenced")
    fields, values = np.arange(9, dtype=np.uint64), rows(9, 40)
    with pytest.raises(Fenced):
        store.exchange([], [Write(2, b"k", fields, values)])
    with pytest.raises(Fenced):
        store.exchange([Read(2, b"k", fields, values)], [Write(1, b"k", fields, values)])
    assert store.command(1, "HLEN", "k") == 9


def test_arrays_that_do_not_fit_are_refused_before_anything_is_sent(store: Store) -> None:
    fields, values = np.arange(4, dtype=np.uint64), rows(4, 20)
    for wrong in [
        Write(0, b"k", fields[:3], values),
        Write(0, b"k", fields.astype(np.int64), values),
        Write(0, b"k", fields, values.astype(np.int8)),
        Write(0, b"k", fields, np.asfortranarray(values)),
        Write(0, b"k", fields[:0], values[:0]),
        Write(0, b"k", np.arange(2049, dtype=np.uint64), rows(2049, 4)),
    ]:
        with pytest.raises(ValueError):
            store.exchange([], [Write(0, b"k", fields, values), wrong])
    got = np.zeros_like(values)
    got.flags.writeable = False
    with pytest.raises(ValueError):
        store.exchange([Read(0, b"k", fields, got)], [Write(0, b"k", fields, values)])
    assert store.command(0, "EXISTS", "k") == 0


def test_rows_of_a_wider_array_are_written_and_read_in_place(store: Store) -> None:
    wide = rows(50, 100)
    fields, part = np.arange(100, dtype=np.uint64)[::2], wide[:, 8:48]
    got = np.zeros((50, 64), np.uint8)
    store.exchange([], [Write(0, b"k", fields, part)])
    store.exchange([Read(0, b"k", fields, got[:, 16:56])], [])
    assert np.array_equal(got[:, 16:56], part)
    assert not got[:, :16].any()
    assert not got[:, 56:].any()

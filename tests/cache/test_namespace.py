"""Namespaces on real servers: taken once, kept apart, resumed only by the run that they belong to."""

from __future__ import annotations

import numpy as np
import pytest

from foreload.cache.client.store import Store, Write
from foreload.cache.errors import Fenced, NamespaceInUse, RowsLost, StoreError
from foreload.cache.protocol.shards.fence import fence_all
from foreload.cache.protocol.shards.namespace import (
    Note,
    claim,
    lane_key,
    owner,
    remove,
    run_key,
)

IDENTITY = {"run": "r1", "lanes": 4, "row_bytes": [76, 140]}


def write_lanes(store: Store, namespace: str) -> None:
    """Rows of four lanes, on each of the three shards."""
    rows = np.zeros((3, 16), np.uint8)
    writes = [Write(s, lane_key(namespace, lane, 0), np.arange(3, dtype=np.uint64), rows) for s in range(3) for lane in range(4)]
    store.exchange([], writes)


def keys(store: Store) -> int:
    """How many keys all shards have."""
    return sum(int(str(store.command(shard, "DBSIZE"))) for shard in range(store.shards))


def test_a_namespace_is_taken_once(store: Store) -> None:
    claim(store, "clicks", IDENTITY, "new")
    with pytest.raises(NamespaceInUse, match=r"namespace clicks .*--resume.*--overwrite"):
        claim(store, "clicks", {"run": "r2"}, "new")
    claim(store, "clicks2", {"run": "r2"}, "new")
    assert [note.shard for shard in range(3) if (note := owner(store, "clicks", shard)) is not None] == [0, 1, 2]


def test_a_refused_claim_leaves_nothing_behind(store: Store) -> None:
    store.command(2, "SET", run_key("clicks"), "{}")
    with pytest.raises(NamespaceInUse):
        claim(store, "clicks", IDENTITY, "new")
    assert keys(store) == 1


def test_overwriting_removes_that_namespace_and_no_other(store: Store) -> None:
    for namespace in ("clicks", "clicks2", "clicks.b", "a.b", "axb"):
        claim(store, namespace, IDENTITY, "new")
        write_lanes(store, namespace)
    before = keys(store)
    claim(store, "clicks", {"run": "r2"}, "overwrite")
    assert before - keys(store) == 3 * 4
    assert owner(store, "clicks", 1) == Note(1, 1, 3, {"run": "r2"})
    assert remove(store, "a.b") == 12
    assert store.command(0, "HLEN", lane_key("axb", 0, 0)) == 3
    assert remove(store, "nothing") == 0


def test_a_run_that_takes_the_place_of_another_begins_with_a_lower_term_and_a_later_epoch(store: Store) -> None:
    claim(store, "clicks", IDENTITY, "new")
    first = fence_all(store, 1, "clicks", [0], term=7)[0]
    with pytest.raises(Fenced):
        fence_all(store, 1, "clicks", [0], term=1)[0]
    claim(store, "clicks", {"run": "r2"}, "overwrite")
    assert fence_all(store, 1, "clicks", [0], term=1)[0].epoch == first.epoch + 1


def test_only_the_same_run_resumes(store: Store) -> None:
    claim(store, "clicks", IDENTITY, "new")
    claim(store, "clicks", {**IDENTITY, "row_bytes": (76, 140)}, "resume")
    with pytest.raises(NamespaceInUse, match="lanes there is 4, here 2"):
        claim(store, "clicks", {**IDENTITY, "lanes": 2}, "resume")
    with pytest.raises(StoreError, match="has no namespace other"):
        claim(store, "other", IDENTITY, "resume")


def test_resuming_goes_without_as_many_shards_as_parity_covers_and_no_more(store: Store) -> None:
    claim(store, "clicks", IDENTITY, "new")
    store.command(0, "DEL", run_key("clicks"))
    claim(store, "clicks", IDENTITY, "resume", spared=1)
    store.command(2, "DEL", run_key("clicks"))
    with pytest.raises(
        RowsLost, match=r"store shards 0, 2 are lost \(.*no namespace clicks\), but parity covers only 1: rows"
    ) as lost:
        claim(store, "clicks", IDENTITY, "resume", spared=1)
    assert (lost.value.shards, lost.value.covered) == ([0, 2], 1)
    claim(store, "clicks", IDENTITY, "resume", spared=2)


def test_resuming_with_the_shards_in_another_order_is_refused(store: Store) -> None:
    claim(store, "clicks", IDENTITY, "new")
    for urls in (store.urls[::-1], store.urls[:2]):
        with Store(urls) as other, pytest.raises(StoreError, match="same order as before"):
            claim(other, "clicks", IDENTITY, "resume")


def test_a_namespace_is_a_plain_name(store: Store) -> None:
    for name in ("", "a b", "a*", "a:b", "{a}", "x" * 101):
        with pytest.raises(StoreError, match="namespace: must be"):
            claim(store, name, IDENTITY, "new")


def test_what_a_run_claimed_before_it_was_killed_is_still_its_own(store: Store) -> None:
    claim(store, "killed", {"run": "a", "lanes": 2}, "new")
    claim(store, "killed", {"run": "a", "lanes": 4}, "new")
    assert owner(store, "killed", 2) == Note(1, 2, 3, {"run": "a", "lanes": 4})
    with pytest.raises(NamespaceInUse):
        claim(store, "killed", {"run": "b", "lanes": 4}, "new")
    remove(store, "killed")

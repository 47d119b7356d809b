"""The store protocol has no wrong state in any setting explored, and each of its rules is needed: without it there are some."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from protocol_explorer import Findings, explore
from protocol_model import Row, Rules, Setting

# First writes of a row and of a whole stripe; a row that returns at once beside the second row of a stripe; one that returns later, beside a
# stripe of which one row is new.
BATCHES: tuple[tuple[Row, ...], ...] = (((0, 0), (1, 0), (1, 1)), ((0, 1), (1, 0), (2, 0)), ((0, 0), (2, 0), (2, 1)))
STORED: tuple[Row, ...] = ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))


def setting(k: int, r: int, shards: int, batches: int, stripes: int = 3, **others: object) -> Setting:
    """The first of BATCHES, and of their stripes."""
    rows = tuple(tuple(row for row in batch if row[0] < stripes) for batch in BATCHES[:batches])
    return replace(Setting(k, r, shards, stripes, rows), **others)  # type: ignore[arg-type]


CRASH = {
    "2+1 on 3": setting(2, 1, 3, 3),
    "2+1 on 5": setting(2, 1, 5, 3),
    "2+2 on 4": setting(2, 2, 4, 3),
}
LIVE = {
    "2+1 on 3, a loss": setting(2, 1, 3, 3, kills=1),
    "2+1 on 3, a loss and another": setting(2, 1, 3, 1, kills=2),
    "2+1 on 3, a broken connection": setting(2, 1, 3, 2, cuts=1),
    "2+1 on 5, a loss": setting(2, 1, 5, 1, kills=1),
    "2+2 on 4, a loss": setting(2, 2, 4, 2, kills=1, stripes=2),
    "1+2 on 3, two losses": Setting(1, 2, 3, 1, (((0, 0),), ((0, 0),)), kills=2),
    "2+1 on 3, rows stored before, a loss": setting(2, 1, 3, 2, kills=1, stored=STORED),
    "2+1 on 3, rows vanish": setting(2, 1, 3, 2, wipes=1),
    "2+1 on 3, rows vanish and a connection breaks": setting(2, 1, 3, 1, stripes=2, wipes=1, cuts=1),
}
FULL = {
    "2+1 on 3, two losses": setting(2, 1, 3, 3, kills=2),
    "2+1 on 3, three losses": setting(2, 1, 3, 1, kills=3),
    "2+1 on 3, a loss and a broken connection": setting(2, 1, 3, 2, kills=1, cuts=1),
    "2+1 on 3, two broken connections": setting(2, 1, 3, 1, cuts=2),
    "2+1 on 5, a loss in two batches": setting(2, 1, 5, 2, kills=1),
    "2+1 on 5, a loss and another": setting(2, 1, 5, 1, stripes=2, kills=2),
    "2+1 on 5, a broken connection": setting(2, 1, 5, 1, stripes=2, cuts=1),
    "2+2 on 4, two losses": setting(2, 2, 4, 1, kills=2, stripes=1),
    "2+2 on 4, two losses in two stripes": setting(2, 2, 4, 1, stripes=2, kills=2),
    "2+2 on 4, two losses in two batches": setting(2, 2, 4, 2, stripes=2, kills=2),
    "2+2 on 4, a loss and a broken connection": setting(2, 2, 4, 1, stripes=2, kills=1, cuts=1),
    "2+1 on 3, rows stored before, two losses": setting(2, 1, 3, 2, kills=2, stored=STORED),
    "2+1 on 3, rows vanish twice": setting(2, 1, 3, 1, wipes=2),
    "2+1 on 3, rows vanish and a loss": setting(2, 1, 3, 1, wipes=1, kills=1),
    "2+1 on 3, rows stored before vanish, and a connection breaks": setting(2, 1, 3, 2, wipes=1, cuts=1, stored=STORED),
    "2+2 on 4, rows vanish and a loss": setting(2, 2, 4, 1, stripes=1, wipes=1, kills=1),
}
SETTINGS = CRASH | LIVE | FULL


# (rule left out, how, a setting that shows it)
LEFT_OUT = [
    ("the log", Rules(log=False), "2+1 on 3"),
    ("a batch is in the log before its first byte leaves", Rules(log_first=False), "2+1 on 3"),
    ("it stays there until its data is acknowledged", Rules(held_until_stored=False), "2+1 on 3"),
    ("p and d apart", Rules(two_markers=False), "2+1 on 3"),
    ("marker and rows in one command: marker first", Rules(first_alone="marker"), "2+1 on 3"),
    ("marker and rows in one command: rows first", Rules(first_alone="rows"), "2+1 on 3"),
    ("parity acknowledged before the next read phase", Rules(parity_awaited=False), "2+1 on 3"),
    ("parity before data", Rules(parity_first=False), "2+1 on 3"),
    ("a parity row counts as never written only before the first batch of its stripe", Rules(written_noted=False), "2+1 on 3"),
    ("a difference is applied once, by p", Rules(p_heeded=False), "2+1 on 3"),
    ("markers compared at a takeover", Rules(marker_compared=False), "2+1 on 3"),
    ("the batch before stays in the log until the next is there as a whole", Rules(records_in_turn=False), "2+1 on 3"),
    ("the fence", Rules(fence=False), "2+1 on 3"),
    ("after a broken connection only a marker of this phase", Rules(exact_resend=False), "2+1 on 3, a loss"),
    ("nothing is decoded while a batch is under way", Rules(flushed_first=False), "2+1 on 3, a loss"),
    ("every stripe is rebuilt", Rules(every_stripe=False), "2+1 on 3, a loss"),
    ("a batch is cut after the stripes before it are rebuilt", Rules(cut_after_chunk=False), "2+1 on 3, a loss"),
    ("a rebuilding shard's marker says so", Rules(rebuilding_noted=False), "2+1 on 3, a loss"),
    ("a rebuild starts over after a broken connection", Rules(restart=False), "2+1 on 3, a loss and another"),
    ("once data is acknowledged, the marker must say so", Rules(narrowed=False), "1+2 on 3, two losses"),
    ("how many fields were new is compared", Rules(answers_counted=False), "2+1 on 3, rows vanish"),
    ("how many rows there are is compared", Rules(rows_counted=False), "2+1 on 3, rows vanish and a connection breaks"),
]


def explored(name: str, rules: Rules | None = None) -> Findings:
    """Explore a setting, and say what was found."""
    found = explore(SETTINGS[name], rules)
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", [*CRASH, *LIVE, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_state_is_wrong(name: str) -> None:
    found = explored(name)
    assert found.found == 0
    assert found.worlds >= (100 if name in CRASH else 300)
    assert found.cases >= (2000 if name in CRASH else 500)
    assert found.finished
    if SETTINGS[name].kills or SETTINGS[name].wipes:
        assert min(found.degraded, found.rebuilding, found.restored) > 0


@pytest.mark.parametrize("name", [*CRASH, "2+1 on 3, a loss"])
def test_reads_may_be_served_after_the_data_they_leave_with(name: str) -> None:
    assert explored(name, Rules(reads_leave_first=False)).found == 0


@pytest.mark.parametrize(("rules", "name"), [case[1:] for case in LEFT_OUT], ids=[case[0] for case in LEFT_OUT])
def test_without_a_rule_wrong_states_are_found(rules: Rules, name: str) -> None:
    found = explored(name, rules)
    print(f"wrong: {found.wrong} of {found.cases}, {found.wrong_reads} reads, {found.unnoticed} not noticed")
    assert found.found > 0


@pytest.mark.parametrize("rules", [Rules(parity_first=False), Rules(parity_awaited=False)], ids=["data first", "not awaited"])
@pytest.mark.parametrize("name", CRASH)
def test_with_the_log_the_order_of_parity_and_data_matters_to_the_reads_beside_them_only(name: str, rules: Rules) -> None:
    assert explored(name, rules).found > 0
    assert explored(name, replace(rules, reads_leave_first=False)).found == 0


SUBSETS = (((0, 0),), ((0, 1),), ((0, 0), (0, 1)))


@pytest.mark.parametrize(
    ("batches", "stored"),
    [
        *product(product(SUBSETS, repeat=2), ((), ((0, 0),))),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product(product(SUBSETS, repeat=3), ((), ((0, 1),), SUBSETS[2]))
        ),
    ],
)
def test_any_order_of_writes_to_one_stripe(batches: tuple[tuple[Row, ...], ...], stored: tuple[Row, ...]) -> None:
    found = explore(Setting(2, 1, 3, 1, batches, stored, kills=1))
    assert found.found == 0
    assert found.cases > 2000


@pytest.mark.parametrize(("k", "r", "shards"), [(2, 1, 3), (2, 1, 5), (4, 1, 5), (2, 2, 4), (4, 2, 6)])
def test_the_model_decodes_after_any_loss_of_up_to_r_shards(k: int, r: int, shards: int) -> None:
    batches = (tuple((g, m) for g in range(3) for m in range(k)),)
    coded = Setting(k, r, shards, 3, batches)
    for count in range(r + 1):
        for lost in combinations(range(shards), count):
            left = tuple(None if shard in lost else cells for shard, cells in enumerate(coded.truth[1]))
            assert tuple(coded.decode(stripe, left) for stripe in range(3)) == coded.versions[1]

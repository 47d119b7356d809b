"""Samples cut, put together and chosen, in memory and on disk, against lists of Python objects."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.pieces import Samples, read_piece, write_piece

Drawn = tuple[int, Samples]  # the number of features, and samples of so many


@st.composite
def samples(draw: st.DrawFn) -> Drawn:
    """A number of features and samples of any shape, with labels, and perhaps weights and groups, that number them."""
    n, f, w, l = draw(st.integers(0, 7)), draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    counts = draw(st.lists(st.integers(1, 3) if draw(st.booleans()) else st.just(1), min_size=n * f, max_size=n * f))
    ids = np.array(draw(st.lists(st.integers(-5, 5), min_size=sum(counts), max_size=sum(counts))), np.int64)
    dense = np.arange(n * w, dtype=np.float32).reshape(n, w)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64) if max(counts, default=1) > 1 else None
    labels = np.arange(n * l, dtype=np.float32).reshape(n, l)
    weights = np.arange(n, dtype=np.float32) if draw(st.booleans()) else None
    groups = np.arange(n) << 40 if draw(st.booleans()) else None
    return f, Samples(labels, dense, ids, offsets, weights, groups)


def plain(f: int, s: Samples) -> list[tuple[object, ...]]:
    """Samples as a list of (labels, dense, weight, group, lists of ids)."""
    offsets = np.arange(len(s) * f + 1) if s.offsets is None else s.offsets
    assert offsets[0] == 0
    assert offsets[-1] == len(s.ids)
    weights, groups = ([None] * len(s) if column is None else column.tolist() for column in (s.weights, s.groups))
    return [
        (
            s.labels[i].tolist(),
            s.dense[i].tolist(),
            weights[i],
            groups[i],
            [s.ids[offsets[i * f + k] : offsets[i * f + k + 1]].tolist() for k in range(f)],
        )
        for i in range(len(s))
    ]


@given(samples(), st.data())
def test_slices_put_together_are_the_whole(drawn: Drawn, data: st.DataObject) -> None:
    f, whole = drawn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    bounds = [0, *cuts, len(whole)]
    parts = [whole.slice(a, b) for a, b in pairwise(bounds)]
    assert [x for part in parts for x in plain(f, part)] == plain(f, whole)
    assert plain(f, Samples.concat(parts)) == plain(f, whole)


@given(samples(), st.data())
def test_take_gives_the_samples_asked_for(drawn: Drawn, data: st.DataObject) -> None:
    f, whole = drawn
    places = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)) if len(whole) else []
    assert plain(f, whole.take(np.array(places, np.int64))) == [plain(f, whole)[i] for i in places]


@given(samples())
def test_a_piece_reads_back_as_written_and_is_a_function_of_its_contents(
    tmp_path_factory: pytest.TempPathFactory, drawn: Drawn
) -> None:
    f, written = drawn
    folder = tmp_path_factory.mktemp("pieces")
    keys = pa.array([None if i % 3 == 0 else f"k{i}" for i in range(len(written))], pa.string())
    for name in ("a", "b"):
        write_piece(folder / name, written, keys, {"rows": len(written), "file": "x"})
    read, read_keys, meta = read_piece(folder / "a")
    assert plain(f, read) == plain(f, written)
    assert read_keys is not None
    assert read_keys.equals(keys)
    assert meta == {"rows": len(written), "file": "x"}
    assert read.dense.shape == written.dense.shape
    assert not read.ids.flags.writeable
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("keys", [None, np.arange(3), np.array([0.5, 1.5, 2.5])])
def test_keys_may_be_numbers_or_left_out(tmp_path: Path, keys: np.ndarray | None) -> None:
    write_piece(tmp_path / "p", Samples(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.float32), np.arange(3)), keys, {})
    read = read_piece(tmp_path / "p")[1]
    if keys is None:
        assert read is None
    else:
        assert read is not None
        assert np.array_equal(read.to_numpy(), keys)


def test_what_is_no_piece_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"nothing of the kind")
    with pytest.raises(ScheduleError, match="not a readable piece"):
        read_piece(tmp_path / "p")
    with pytest.raises(ValueError, match=r"must lie within 0 .. 1"):
        Samples(np.zeros((1, 1), np.float32), np.zeros((1, 0), np.float32), np.zeros(1, np.int64)).slice(0, 2)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    one = Samples(np.zeros((1, 1), np.float32), np.zeros((1, 0), np.float32), np.zeros(1, np.int64))
    (tmp_path / "p").mkdir()
    with pytest.raises(OSError):
        write_piece(tmp_path / "p", one, None, {})
    assert [p.name for p in tmp_path.iterdir()] == ["p"]

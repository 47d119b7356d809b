"""The kernels of rows against loops in float32 scalars, and the two implementations against each other, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import reference_rates
import reference_tables
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.base import compiled
from foreload.base.errors import SettingError
from foreload.cache.rows.layout import ROW_OPTIMIZERS, RowLayout
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.compiled_kernels import CompiledKernels
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import MEAN, SINGLE, BlockLayout, Lookups, UpdateRules
from foreload.trainer.compute.row_optimizers import RowOptimizer
from foreload.trainer.compute.torch_kernels import TorchKernels

f32 = np.float32


class OnDevice:
    """TorchKernels for rows on a CUDA device, of tensors on the CPU: they are brought there, and what they are then comes back."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(TorchKernels("cuda"), name)

        def run(*arguments: Any) -> None:
            there = [_on_device(argument) for argument in arguments]
            kernel(*there)
            for here, copy in zip(arguments, there, strict=True):
                for tensor, result in zip(_tensors(here), _tensors(copy), strict=True):
                    tensor.detach().copy_(result.detach())

        return run


def _tensors(argument: Any) -> list[torch.Tensor]:
    return [argument] if isinstance(argument, torch.Tensor) else list(argument) if type(argument) is tuple else []


def _on_device(argument: Any) -> Any:
    if type(argument) is tuple:  # not UpdateRules
        return tuple(tensor.to("cuda") for tensor in argument)
    return argument.to("cuda") if isinstance(argument, torch.Tensor) else argument


VARIANTS: list[Kernels] = [
    CompiledKernels(),
    TorchKernels("cpu"),
    *([cast("Kernels", OnDevice())] if torch.cuda.is_available() else []),
]


def bits(tensor: torch.Tensor | np.ndarray, kernels: Kernels | None = None) -> list[int]:
    """As integers, so that NaNs and the sign of zero count. Which NaN it is counts not where a CUDA device is concerned, whose own is another one."""
    values = np.ascontiguousarray(np.asarray(tensor), np.float32)
    if isinstance(kernels, OnDevice):
        values = np.where(np.isnan(values), f32(np.nan), values)
    return values.view(np.uint32).ravel().tolist()


def block_layout(widths: list[int], pooling: list[int]) -> BlockLayout:
    names = tuple(f"f{i}" for i in range(len(widths)))
    parts = tuple((("weights", width),) for width in widths)
    return BlockLayout(names, parts, np.array(widths, np.int32), np.array(pooling, np.int8), max(widths))


def readonly(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@st.composite
def slices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, BlockLayout, int]:
    """A slice: rows [n, W]; index: of each lookup its row; offsets: where each bag begins in it, None where every bag has one; layout; samples."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples, features, n = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    widths = [draw(st.integers(1, 35))] * features if draw(st.booleans()) else [draw(st.integers(1, 19)) for _ in range(features)]
    bags = draw(st.booleans())
    pooling = [draw(st.integers(0, 2)) if bags else SINGLE for _ in range(features)]
    lengths = np.array([1 if kind == SINGLE else rng.integers(1, 6) for _ in range(samples) for kind in pooling])
    rows = rng.standard_normal((n, max(widths))).astype(f32)
    index = rng.integers(0, n, lengths.sum()).astype(np.int32)
    offsets = readonly(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)) if bags else None
    return rows, readonly(index), offsets, block_layout(widths, pooling), samples


def rows_looked_up(index: np.ndarray, offsets: np.ndarray | None, place: int) -> list[int]:
    return [int(index[place])] if offsets is None else index[offsets[place] : offsets[place + 1]].tolist()


def expected_block(
    rows: np.ndarray, index: np.ndarray, offsets: np.ndarray | None, layout: BlockLayout, samples: int
) -> np.ndarray:
    features = len(layout.widths)
    block = np.zeros((samples, features, layout.width), f32)
    for place in range(samples * features):
        i, f = divmod(place, features)
        looked_up = rows_looked_up(index, offsets, place)
        total = rows[looked_up[0]].copy()
        for row in looked_up[1:]:
            total += rows[row]
        if layout.pooling[f] == MEAN:
            total /= f32(len(looked_up))
        block[i, f, : layout.widths[f]] = total[: layout.widths[f]]
    return block


def expected_gradients(
    gradient: np.ndarray, index: np.ndarray, offsets: np.ndarray | None, layout: BlockLayout, n: int
) -> np.ndarray:
    features = len(layout.widths)
    sums: dict[int, np.ndarray] = {}
    for place in range(gradient.shape[0] * features):
        i, f = divmod(place, features)
        looked_up = rows_looked_up(index, offsets, place)
        term = gradient[i, f] / f32(len(looked_up)) if layout.pooling[f] == MEAN else gradient[i, f]
        for row in looked_up:
            sums[row] = sums[row] + term if row in sums else term.copy()
    # -0 is the sum without a term: whatever is added to it stays as it is.
    return np.stack([sums.get(row, np.full(layout.width, -0.0, f32)) for row in range(n)])


@settings(max_examples=60)
@given(slices())
def test_block_and_gradients_follow_the_order_of_lookups(
    case: tuple[np.ndarray, np.ndarray, np.ndarray | None, BlockLayout, int],
) -> None:
    rows, index, offsets, layout, samples = case
    block = expected_block(rows, index, offsets, layout, samples)
    gradient = np.random.default_rng(0).standard_normal(block.shape).astype(f32)
    sums = expected_gradients(gradient, index, offsets, layout, len(rows))
    for kernels in VARIANTS:
        out = torch.full(block.shape, torch.nan).requires_grad_()
        kernels.gather_block(torch.from_numpy(rows), Lookups(index, offsets, layout), out)
        assert bits(out.detach()) == bits(block), type(kernels).__name__
        spread_out = np.concatenate([np.full_like(rows, np.nan), rows[::-1]])
        places = np.arange(len(spread_out) - 1, len(rows) - 1, -1, dtype=np.int32)
        kernels.gather_block(torch.from_numpy(spread_out), Lookups(index, offsets, layout), out, places)
        assert bits(out.detach()) == bits(block), type(kernels).__name__
        summed = torch.full(rows.shape, torch.nan)
        kernels.row_gradients(torch.from_numpy(gradient), Lookups(index, offsets, layout), summed)
        assert bits(summed) == bits(sums), type(kernels).__name__


@pytest.mark.parametrize("kernels", VARIANTS, ids=lambda kernels: type(kernels).__name__)
def test_an_empty_bag_is_zeros_and_has_no_part_in_gradients(kernels: Kernels) -> None:
    layout = block_layout([3], [MEAN])
    index, offsets = np.array([0, 1], np.int32), np.array([0, 0, 2], np.int32)
    block, sums = torch.full((2, 1, 3), torch.nan), torch.empty(2, 3)
    kernels.gather_block(torch.ones(2, 3), Lookups(index, offsets, layout), block)
    assert block[:, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
    kernels.row_gradients(torch.ones(2, 1, 3), Lookups(index, offsets, layout), sums)
    assert sums.tolist() == [[0.5] * 3] * 2


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(0, 20), st.integers(1, 18))
def test_parts_are_added_in_lane_order_from_the_first(seed: int, lanes: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = sorted(rng.choice(64, lanes, replace=False).tolist())
    used = rng.random((lanes, rows)) < 0.6
    users = np.zeros(rows, np.uint64)
    for lane, by in zip(numbers, used, strict=True):
        users[by] |= np.uint64(1 << lane)
    parts = [rng.standard_normal((int(by.sum()), width)).astype(f32) for by in used]
    expected = np.full((rows, width), np.nan, f32)
    for row in range(rows):
        terms = [part[int(by[:row].sum())] for part, by in zip(parts, used, strict=True) if by[row]]
        for place, term in enumerate(terms):
            expected[row] = expected[row] + term if place else term
    for kernels in VARIANTS:
        total = torch.full((rows, width), torch.nan)
        for lane, part in zip(numbers, parts, strict=True):
            kernels.add_part(total, readonly(users), lane, torch.from_numpy(part))
        assert bits(total) == bits(expected), type(kernels).__name__


def swapped_sum(order: list[int]) -> list[int]:
    """The bits of the sum of three lanes' parts, added in this order."""
    rng = np.random.default_rng(1)
    parts = [torch.from_numpy(rng.standard_normal((50, 4)).astype(f32)) for _ in range(3)]
    total = torch.empty(50, 4)
    users = np.full(50, 0b111, np.uint64)
    for lane, part in enumerate(order):
        CompiledKernels().add_part(total, users, lane, parts[part])
    return bits(total)


def test_swapping_the_last_two_of_three_parts_changes_bits() -> None:
    assert swapped_sum([0, 1, 2]) == swapped_sum([1, 0, 2])
    assert swapped_sum([0, 1, 2]) != swapped_sum([0, 2, 1])


def sum_of_squares(g: np.ndarray) -> np.float32:
    """Q(g) of docs/definitions.md: eight running sums, and then a tree."""
    p = [f32(0)] * 8
    for j, value in enumerate(g):
        p[j % 8] = p[j % 8] + value * value
    for half in (4, 2, 1):
        p = [p[j] + p[j + half] for j in range(half)]
    return p[0]


OPTIONS: dict[str, dict[str, float]] = {
    "adagrad": {"decay": 0.75, "epsilon": 1e-3},
    "rowwise_adagrad": {"decay": 0.9},
    "adam": {"beta1": 0.5, "beta2": 0.97, "epsilon": 1e-4},
    "ftrl": {"l1": 0.2, "l2": 0.1, "beta": 0.5},
}


def expected_update(row: RowLayout, of: RowOptimizer, step: int, w: np.ndarray, s: np.ndarray, g: np.ndarray) -> None:
    """A step of a row's optimizer in place: w, its weights; s, its state; g, its gradient."""
    lr, option, width = f32(of.lr), {name: f32(of.option(name)) for name in reference_tables.DEFAULTS[of.name]}, row.width
    if of.penalised:
        embedding = row.parts[0][1]
        penalised = (g[:embedding] + f32(of.l2) * w[:embedding]) + f32(of.l1) * np.sign(w[:embedding])
        g = np.concatenate([penalised, g[embedding:]])
    start = 0
    for own, (_, columns) in enumerate(row.parts):
        if of.name == "rowwise_adagrad":
            s[own] = option["decay"] * s[own] + sum_of_squares(g[start : start + columns]) / f32(columns)
        for j in range(start, start + columns):
            if of.name == "sgd":
                w[j] = w[j] - lr * g[j]
            elif of.name == "adam":
                s[j] = option["beta1"] * s[j] + f32(1 - of.option("beta1")) * g[j]
                s[width + j] = option["beta2"] * s[width + j] + f32(1 - of.option("beta2")) * (g[j] * g[j])
                rate = f32(of.lr / (1 - reference_rates.power(of.option("beta1"), step + 1)))
                root = f32(1 / math.sqrt(1 - reference_rates.power(of.option("beta2"), step + 1)))
                w[j] = w[j] - (rate * s[j]) / (np.sqrt(s[width + j]) * root + option["epsilon"])
            elif of.name == "ftrl" and lr > 0:
                n = s[width + j] + g[j] * g[j]
                s[j] = s[j] + (g[j] - ((np.sqrt(n) - np.sqrt(s[width + j])) / lr) * w[j])
                s[width + j] = n
                less = np.copysign(option["l1"], s[j]) - s[j]
                w[j] = f32(0) if abs(s[j]) <= option["l1"] else less / ((option["beta"] + np.sqrt(n)) / lr + option["l2"])
            elif of.name in ("adagrad", "rowwise_adagrad"):
                if of.name == "adagrad":
                    s[j] = option["decay"] * s[j] + g[j] * g[j]
                w[j] = w[j] - (lr * g[j]) / (np.sqrt(s[own if of.name == "rowwise_adagrad" else j]) + option["epsilon"])
        start += columns


@settings(max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from([0, 16, 32, 24]), st.integers(0, 5000), st.sampled_from([30, 30, 1, 0]), st.booleans()
)
def test_updates_are_those_of_each_tables_optimizer(seed: int, alike: int, step: int, count: int, penalties: bool) -> None:
    """alike: all tables have rows of one part of this width, under row-wise Adagrad; 0: they differ. penalties: some tables have them."""
    rng = np.random.default_rng(seed)
    tables = [
        RowLayout(k, f"t{k}", 9, (("weights", alike),), "rowwise_adagrad")
        if alike
        else RowLayout(
            k,
            f"t{k}",
            9,
            (("weights", int(rng.integers(1, 40))), ("linear", 1))[: 1 + k % 2],
            ROW_OPTIMIZERS[int(rng.integers(len(ROW_OPTIMIZERS)))],
        )
        for k in range(4)
    ]
    optimizers = [
        RowOptimizer(
            row.optimizer,
            0.1 * k + 0.01 * (row.optimizer == "ftrl"),
            OPTIONS.get(row.optimizer, {}) if k % 3 else {},
            *((0.3 * (k > 1), 0.7 * (k % 2)) if penalties and row.optimizer != "ftrl" else ()),
        )
        for k, row in enumerate(tables)
    ]
    rules = UpdateRules.of(tables, optimizers).at(optimizers, step, 1.0)
    assert rules.rowwise or not alike
    weights = (rng.standard_normal((50, rules.width)) * rng.choice([0, -0.0, 1], (50, rules.width))).astype(f32)
    state = rng.random((50, rules.state_width)).astype(f32)
    slots, numbers = rng.permutation(50)[:count].astype(np.int32), rng.integers(0, 4, count).astype(np.int16)
    gradient = (rng.standard_normal((count, rules.width)) * rng.choice([0, 1e-30, 1e-3, 1, 1e20], (count, 1))).astype(f32)
    w, s = weights.copy(), state.copy()
    with np.errstate(all="ignore"):
        for slot, k, g in zip(slots, numbers, gradient, strict=True):
            expected_update(tables[k], optimizers[k], step, w[slot], s[slot], g)
    for kernels in VARIANTS:
        before = torch.empty(count, rules.width), torch.empty(count, rules.state_width)
        for kept in (None, before):
            updated, new_state = torch.from_numpy(weights.copy()), torch.from_numpy(state.copy())
            given = torch.from_numpy(gradient.copy())
            kernels.apply(updated, new_state, readonly(slots), readonly(numbers), given, rules, kept)
            updated_bits, expected = ([bits(of, kernels) for of in both] for both in ((updated, new_state), (w, s)))
            assert updated_bits == expected, type(kernels).__name__
        assert (bits(before[0]), bits(before[1])) == (bits(weights[slots]), bits(state[slots])), type(kernels).__name__


@pytest.mark.parametrize("kernels", VARIANTS, ids=lambda kernels: type(kernels).__name__)
def test_ftrl_leaves_rows_as_they_are_where_its_rate_is_zero(kernels: Kernels) -> None:
    """A schedule may come down to it; the settings of a table may not."""
    rows, optimizers = [RowLayout(0, "t", 9, (("weights", 3),), "ftrl")], [RowOptimizer("ftrl", 0.1)]
    weights, state = torch.randn(4, 3), torch.rand(4, 6)
    updated, now = weights.clone(), state.clone()
    rules = UpdateRules.of(rows, optimizers).at(optimizers, 7, 0.0)
    kernels.apply(updated, now, np.arange(4, dtype=np.int32), np.zeros(4, np.int16), torch.randn(4, 3), rules)
    assert torch.equal(updated, weights)
    assert torch.equal(now, state)


def test_adam_and_adagrad_are_torchs_but_for_rounding() -> None:
    """A row that every step uses goes as a parameter of torch.optim's; so the options mean what they mean there."""
    generator = torch.Generator().manual_seed(5)
    for name, options, theirs in (
        ("adam", {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}, (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6})),
        ("adagrad", {"epsilon": 1e-6}, (torch.optim.Adagrad, {"eps": 1e-6})),
    ):
        weights = torch.randn(3, 8, generator=generator)
        row = RowLayout(0, "t", 9, (("weights", 8),), name)
        parameter, state = torch.nn.Parameter(weights.clone()), torch.zeros(3, row.state_width)
        torchs = theirs[0]([parameter], lr=0.05, **theirs[1])
        optimizers = [RowOptimizer(name, 0.05, options)]
        for step in range(50):
            gradient = torch.randn(3, 8, generator=generator)
            parameter.grad = gradient.clone()
            torchs.step()
            rules = UpdateRules.of([row], optimizers).at(optimizers, step, 1.0)
            CompiledKernels().apply(weights, state, np.arange(3, dtype=np.int32), np.zeros(3, np.int16), gradient, rules)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", VARIANTS, ids=lambda kernels: type(kernels).__name__)
def test_rows_are_taken_and_put_as_they_are(kernels: Kernels) -> None:
    rows = torch.arange(12.0).view(4, 3).clone()
    places = readonly(np.array([3, 1], np.int32))
    out = torch.empty(2, 3)
    kernels.take_rows(rows, places, out)
    assert out.tolist() == [[9, 10, 11], [3, 4, 5]]
    kernels.put_rows(rows, places, -out)
    assert rows.tolist() == [[0, 1, 2], [-3, -4, -5], [6, 7, 8], [-9, -10, -11]]


def test_the_variant_is_chosen_by_device_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORELOAD_KERNELS", raising=False)
    assert isinstance(kernels_for("cpu"), CompiledKernels)
    monkeypatch.setenv("FORELOAD_KERNELS", "torch")
    assert isinstance(kernels_for("cpu"), TorchKernels)
    monkeypatch.setenv("FORELOAD_KERNELS", "compiled")
    with pytest.raises(SettingError, match="compiled on the CPU"):
        kernels_for("cuda")


def test_kernels_are_compiled_again_if_anything_changes_that_they_are_compiled_from(tmp_path: Path) -> None:
    """Constants may be made of those of other files."""
    files = {
        "kernel.py": "from foreload.base.compiled import nb\nfrom foreload.rules import KIND\n",
        "rules.py": "from foreload.cache.layout import NAMES\nfrom foreload.cache import (\n    row_bytes,\n)\nKIND = NAMES.index('adam')\n",
        "cache/row_bytes.py": "def pack(): ...\n",
        "cache/layout.py": "NAMES = ('sgd', 'adam')\n",
        "others.py": "from foreload.kernel import run\n",
    }
    (tmp_path / "cache").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def sources() -> str:
        # It reads a file once in a process.
        compiled._read.cache_clear()
        return compiled.sources.__wrapped__("kernel.py", tmp_path)

    before = sources()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}# changed\n")
        assert (sources() != before) == (name != "others.py"), name
        (tmp_path / name).write_text(text)

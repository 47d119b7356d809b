"""Equal records have equal scores, to the bit, in whatever company: so the AUC of k distinct records in any order is that of ties, exactly."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from command_line import done
from served_model import model_of
from torch import Tensor

from foreload.trainer.models.inference import TILE, in_tiles

HERE = Path(__file__).parent / "trainer"
FEATURES = """
label = "clicked"
[[dense]]
name = "price"
[[feature]]
name = "user"
rows = 1000
[[feature]]
name = "ad"
rows = 1000
[[feature]]
name = "tags"
rows = 1000
pooling = "sum"
"""


def records(random: np.random.Generator, count: int, distinct: int) -> list[tuple[str, ...]]:
    """Records of `distinct` kinds, in any order, each clicked or not."""
    kinds = [
        (f"{random.integers(90)}", f"u{k}", f"a{random.integers(9)}", "|".join(f"t{t}" for t in range(k % 4)))
        for k in range(distinct)
    ]
    return [(str(int(random.random() < 0.3)), *kinds[int(random.integers(distinct))]) for _ in range(count)]


def write(path: Path, rows: list[tuple[str, ...]]) -> Path:
    path.write_text("\n".join(["clicked,price,user,ad,tags", *map(",".join, rows)]) + "\n", encoding="utf-8")
    return path


def auc_of_ties(rows: list[tuple[str, ...]], scores: np.ndarray) -> float:
    """Of all pairs of a click and none, how many are ranked rightly, one half of those whose records are equal; by counting."""
    of_kind: dict[tuple[str, ...], list[int]] = {}
    score_of: dict[tuple[str, ...], float] = {}
    for row, score in zip(rows, scores.tolist(), strict=True):
        of_kind.setdefault(row[1:], [0, 0])[int(row[0])] += 1
        score_of[row[1:]] = score
    right = Fraction(0)
    for one, other in product(of_kind, of_kind):
        pairs = of_kind[one][1] * of_kind[other][0]
        right += pairs * (
            Fraction(1, 2) if one == other or score_of[one] == score_of[other] else int(score_of[one] > score_of[other])
        )
    clicks = sum(counts[1] for counts in of_kind.values())
    return float(right / (clicks * (len(rows) - clicks)))


@pytest.mark.parametrize("model", ["dlrm", "wide_deep", "mixing_cases.py:Apart"])
@pytest.mark.parametrize("distinct", [1, 5])
def test_the_auc_of_records_that_repeat_is_that_of_ties(tmp_path: Path, model: str, distinct: int) -> None:
    random = np.random.default_rng(distinct)
    training, held_out = records(random, 300, 40), records(random, 777, distinct)
    (tmp_path / "features.toml").write_text(FEATURES)
    log = write(tmp_path / "held-out.csv", held_out)
    # Lanes' slices, and the last step's, have sizes of all kinds.
    done(
        "prepare", write(tmp_path / "training.csv", training), "--format", "csv", "--features", tmp_path / "features.toml", "--eval-source", log,
        "--batch-size", 300, "--lanes", 3, "--slots", "min", "--out", tmp_path / "schedule",
    )  # fmt: skip
    done(
        "train", tmp_path / "schedule", "--run", tmp_path / "run", "--store", "local:1", "--dim", 8, "--model", model, "--model-folder", HERE,
    )  # fmt: skip
    done("predict", tmp_path / "run", log, "--logits", "--out", tmp_path / "logits.parquet")
    logits = pq.read_table(tmp_path / "logits.parquet").column("logit").to_numpy()
    by_record: dict[tuple[str, ...], set[float]] = {}
    for row, logit in zip(held_out, logits.tolist(), strict=True):
        by_record.setdefault(row[1:], set()).add(logit)
    assert all(len(of_record) == 1 for of_record in by_record.values())
    expected = auc_of_ties(held_out, logits)
    done("evaluate", tmp_path / "run", "--json", tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text())["auc"] == pytest.approx(expected, abs=1e-15)
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["auc"] for line in reversed(last) if "auc" in line) == pytest.approx(expected, abs=1e-15)
    # Alone, in other company, and by the exported model.
    few = write(tmp_path / "few.csv", held_out[:3])
    done("predict", tmp_path / "run", few, "--logits", "--out", tmp_path / "few.parquet")
    assert pq.read_table(tmp_path / "few.parquet").column("logit").to_numpy().tolist() == logits[:3].tolist()
    done("export", tmp_path / "run", "--format", "torch", "--out", tmp_path / "model")
    columns = dict(zip(("clicked", "price", "user", "ad", "tags"), map(list, zip(*held_out, strict=True)), strict=True))
    served: Any = model_of(tmp_path / "model").predict(columns, logits=True)
    np.testing.assert_allclose(served, logits, rtol=1e-5, atol=1e-6)
    assert len(set(served.tolist())) == len(set(logits.tolist()))


@pytest.mark.parametrize("samples", [1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE, 3 * TILE + 7])
@pytest.mark.parametrize("labels", [1, 2])
def test_tiles_are_of_one_size_in_order_and_filled_up(samples: int, labels: int) -> None:
    dense, block = torch.randn(samples, 3), torch.randn(samples, 2, 5)
    tiles: list[tuple[Tensor, Tensor]] = []

    def forward(of_tile: Tensor, rows: Tensor) -> Tensor:
        tiles.append((of_tile, rows))
        outputs = of_tile.sum(1) + rows.sum((1, 2))
        return outputs if labels == 1 else torch.stack([outputs, -outputs], 1)

    outputs = in_tiles(forward, dense, block)
    assert {len(tile) for of_tile in tiles for tile in of_tile} == {TILE}
    whole_dense, whole_block = (torch.cat([tile[place] for tile in tiles]) for place in (0, 1))
    assert torch.equal(whole_dense[:samples], dense)
    assert torch.equal(whole_block[:samples], block)
    assert (whole_dense[samples:] == dense[-1]).all()
    assert (whole_block[samples:] == block[-1]).all()
    assert torch.equal(
        outputs.reshape(samples, -1)[:, 0], forward(whole_dense, whole_block).reshape(len(whole_dense), -1)[:samples, 0]
    )

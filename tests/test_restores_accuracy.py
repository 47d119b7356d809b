"""The measurement of what restores cost in accuracy does them in memory: they are what real ones are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
@pytest.mark.parametrize("row_optimizer", ["rowwise_adagrad", "adagrad"])
def test_restores_in_memory_give_the_digest_of_real_ones(row_optimizer: str, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "restores_accuracy.py"), "--check-only", "--bits", "2", "8"]
    ended = subprocess.run(
        [*script, "--row-optimizer", row_optimizer, "--out", str(tmp_path / "out.jsonl")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    digests = re.findall(r"digest (\w+) with a store, (\w+) in memory", ended.stderr)
    assert len(digests) == 2
    assert all(real == made for real, made in digests)
    assert digests[0] != digests[1]

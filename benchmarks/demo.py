"""`make demo`: prepares made-up clicks, trains on them, evaluates, and shows that the rows have learned."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

PREPARE = "prepare --format synthetic --rows 200000 --eval-fraction 0.1 --batch-size 1024 --lanes 4 --slots 6000 --overwrite --out {schedule}"
TRAIN = "train {schedule} --run {run} --store local:3 --trainers 2 --dim 8 --row-optimizer adagrad --lr {lr} --overwrite --json {summary}"


def foreload(command: str, **paths: Path | float) -> None:
    """Show a command and run it; ends the demo if it fails."""
    words = command.format(**paths).split()
    print(f"\n$ foreload {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "foreload.trainer.cli", *words], check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Run the demo in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="demo", type=Path, help="folder for what it writes")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    schedule = out / "schedule"
    foreload(PREPARE, schedule=schedule)
    aucs = {}
    for name, lr in (("run", 0.05), ("untrained-rows", 0.0)):
        foreload(TRAIN, schedule=schedule, run=out / name, lr=lr, summary=out / f"{name}.json")
        aucs[name] = json.loads((out / f"{name}.json").read_text())["auc"]
    foreload("evaluate {run}", run=out / "run")
    trained, untrained = aucs["run"], aucs["untrained-rows"]
    print(f"\nAUC {trained:.4f}; with --lr 0, so that rows stay as they were at first: {untrained:.4f}; guessing: 0.5")
    if not trained > max(untrained, 0.5) + 0.01:
        sys.exit("demo: the trained rows should give a clearly better AUC")


if __name__ == "__main__":
    main()

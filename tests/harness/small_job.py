"""A small `foreload train` on made-up clicks: its schedule, its command line, what it leaves, and what its trainers tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from command_line import SMALL, free_port, main
from held import HeldRun

from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.fence import read_epochs
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.cache.rows.row_bytes import PARITY_BIT
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.run.directory import Run

BATCH = 128


def synthetic_schedule(folder: Path, rows: int, lanes: int = 2, slots: int = 900, further: str = "") -> Path:
    """Prepare so many synthetic clicks in batches of BATCH, with so few slots that rows come back from the store; returns the schedule's folder.

    further: options of `foreload prepare`. Segments are small, so that a run can be held at most steps (`held`).
    """
    out = folder / "clicks"
    options = f"--format synthetic --rows {rows} --batch-size {BATCH} --lanes {lanes} --slots {slots} --out {out}"
    if "--segment-bytes" not in further:
        options += " --segment-bytes 100KB"
    prepare.run([*options.split(), *further.split()])
    return out


def arguments(schedule: Path, run: Path, *further: str) -> list[str]:
    """The command line, without the program's name, that trains a small model, with a moving average of its dense part."""
    return ["train", str(schedule), "--run", str(run), *SMALL, "--dense-ema", "0.9", *further]


def train_undisturbed(schedule: Path, folder: Path) -> Path:
    """Train a small model with one trainer and one store shard to the end, with nothing happening to it; returns the run, which has a digest."""
    run = folder / "undisturbed"
    assert main(arguments(schedule, run, "--store", "local:1", "--digest")) == 0
    return run


def scheduler_environment(trainers: int = 2) -> dict[str, Any]:
    """What a scheduler sets for each of its trainers, but for RANK: how many they are, and where they meet."""
    return {"WORLD_SIZE": str(trainers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def under_torchrun(*words: str) -> list[str]:
    """The arguments of torch.distributed.run for two trainers of such a `foreload train`."""
    assert words[0] == "train"
    return ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "--", "foreload.trainer.launch", *words[1:]]


def summary(run: Path) -> dict[str, Any]:
    """What the run's summary.json says."""
    told: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return told


def check_end(run: HeldRun, undisturbed: str, trainers: int) -> str:
    """Let a run go on to its end; assert that it is the undisturbed model, every step reported once. Returns what it said."""
    status, _, err = run.end()
    assert status == 0, err
    assert "Traceback" not in err
    told = summary(run.path)
    steps = Schedule(run.schedule.path).header.end_step
    assert [told[name] for name in ("digest", "steps", "state", "trainers")] == [undisturbed, steps, "ended", trainers]
    return err


def rows_of(store: Store, run: Path, lane: int, shard: int) -> tuple[bytes, list[bytes]]:
    """The key of a lane's hash on a shard of the store, and the fields of its rows in order; neither parity rows nor markers."""
    manifest = Run.open(run).manifest
    (epoch,) = read_epochs(store, shard, manifest.namespace, [lane])
    key = lane_key(manifest.namespace, lane, epoch or 0)
    names = store.command(shard, "HKEYS", key)
    assert isinstance(names, list)
    return key, sorted(name for name in names if len(name) == 8 and not int.from_bytes(name, "big") & int(PARITY_BIT))


def step_report(step: int, **changed: Any) -> StepReport:
    """What a trainer tells of a step."""
    report = StepReport(
        step=step, epoch=0, samples=100, loss=0.5, rows_used=40, rows_arrived=10, rows_fetched=5, rows_written_back=6,
        seconds=0.5, seconds_compute=0.25, seconds_exchange=0.125, seconds_waiting=0.125, bytes_sent=1000,
    )  # fmt: skip
    return replace(report, **changed)


def no_rows(first: int, last: int) -> dict[int, dict[str, int]]:
    """The `rows_of` of a RunReport whose trainers all tell of every step."""
    raise AssertionError(f"steps {first} to {last} were told of")


def failing_model(step: int) -> str:
    """The module of a model `Fails`, which evaluates what the file "fails" of the working directory says, where there is one, in a training step."""
    return f"""
import os
import torch
from torch import nn

class Fails(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings, step: int):
        if step == {step} and os.path.exists("fails"):
            eval(open("fails").read())
        return self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""

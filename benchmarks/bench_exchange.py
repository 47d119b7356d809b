"""Bytes exchanged between trainers per step, beside the least possible.

python benchmarks/bench_exchange.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comparison import Cell, Claim, Results, Series, Table, arguments, save, tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.cluster.messages.facts import contiguous_lanes
from foreload.trainer.job.job import TrainJob
from workload import BATCH, DIM, LR, MODELS, ROOT, SEED, SHARDS, SLOTS, events_of, job

MODEL = "small"
SETTINGS = ((2, 2), (4, 4), (2, 4))  # trainers, lanes
POLL_SECONDS = 0.2
BAR = 1.05
_SOCKET = re.compile(r"(\S+:\d+) +(\S+:\d+) +users:\(\(.*?pid=(\d+)")
_SENT = re.compile(r"\bbytes_sent:(\d+)")


@dataclass(frozen=True, slots=True)
class Least:
    """What must cross between trainers in all steps together. rows_used: distinct rows of each step, summed over the steps."""

    rows_used: int
    rows: int  # sent: each row once to each other trainer that uses it
    parts: int  # of gradients: one for each row and each lane that uses it on another trainer than its owner's
    dense_bytes: int

    @property
    def bytes(self) -> int:
        """All of it; a row goes without its optimizer state."""
        return 4 * DIM * (self.rows + self.parts) + self.dense_bytes


def least(schedule: Schedule, trainers: int, dense_numbers: int) -> Least:
    """The least exchange of a schedule's training steps, from its masks of users."""
    lane_map = contiguous_lanes(schedule.header.lanes, trainers)
    masks = [sum(1 << lane for lane, host in enumerate(lane_map) if host == trainer) for trainer in range(trainers)]
    used = rows = parts = steps = 0
    for event in events_of(schedule):
        steps += 1
        for lane, host in enumerate(lane_map):
            users = schedule.lane(event, lane).users
            used += len(users)
            for trainer in range(trainers):
                if trainer != host:
                    theirs = users & masks[trainer]
                    rows += int(np.count_nonzero(theirs))
                    parts += int(np.bitwise_count(theirs).sum())
    # Every trainer adds one chunk: a lane's part of it comes from every lane elsewhere, its sum goes to every other trainer.
    chunks = sum(lane_map.count(trainer) * (trainers - 1) / trainers for trainer in range(trainers)) + (trainers - 1)
    return Least(used, rows, parts, int(4 * dense_numbers * chunks * steps))


class SocketBytes:
    """Bytes that the processes of one program have sent each other by TCP, as the kernel tells through `ss`, by pair of addresses."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._sent: dict[tuple[str, str], int] = {}
        self.known = shutil.which("ss") is not None

    def look(self) -> None:
        """Note how far every connection is."""
        if not self.known:
            return
        listed = subprocess.run(["ss", "-tinpH", "state", "established"], capture_output=True, text=True, check=False).stdout
        sockets: dict[tuple[str, str], tuple[int, int]] = {}
        # A socket takes two lines, the second indented.
        for first, second in zip(listed.splitlines(), listed.splitlines()[1:], strict=False):
            ends, sent = _SOCKET.search(first), _SENT.search(second)
            if ends and sent and second[:1].isspace():
                sockets[ends[1], ends[2]] = int(ends[3]), int(sent[1])
        for (here, there), (pid, count) in sockets.items():
            other = sockets.get((there, here))
            if other is not None and other[0] != pid and self._is_program(pid) and self._is_program(other[0]):
                self._sent[here, there] = max(count, self._sent.get((here, there), 0))

    def _is_program(self, pid: int) -> bool:
        try:
            return self._program in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return False

    @property
    def total(self) -> int | None:
        """Bytes over all connections; None where there is no `ss`, or it told nothing."""
        return sum(self._sent.values()) or None


def foreload(arguments: Sequence[str], sockets: SocketBytes | None = None) -> None:
    """Run a command of the command line to its end."""
    command = [sys.executable, "-m", "foreload.trainer.cli", *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        if sockets is not None:
            sockets.look()
    if process.returncode:
        raise SystemExit(f"foreload {' '.join(arguments)}: exit status {process.returncode}")


def prepare(folder: Path, lanes: int, steps: int) -> Path:
    """A schedule with the reference's slots shared out to the lanes."""
    out = folder / f"lanes-{lanes}"
    if not out.exists():
        tell(f"preparing {lanes} lanes")
        given = ["--format", "synthetic", "--rows", str(steps * BATCH), "--batch-size", str(BATCH), "--lanes", str(lanes)]
        foreload(["prepare", *given, "--slots", str(SLOTS // lanes), "--out", str(out)])
    return out


def measure(folder: Path, trainers: int, lanes: int, steps: int) -> tuple[float, list[Cell]]:
    """Train a schedule from beginning to end: bytes sent over the least, and the line of the table."""
    path = prepare(folder, lanes, steps)
    schedule = Schedule(path)
    run = folder / f"run-{trainers}-{lanes}"
    options = [f"{name}={value}" for name, value in MODELS[MODEL].items()]
    given = ["--run", str(run), "--store", f"local:{SHARDS}", "--parity", "off", "--trainers", str(trainers)]
    given += [
        "--dim",
        str(DIM),
        "--lr",
        str(LR),
        "--row-optimizer",
        "rowwise_adagrad",
        "--seed",
        str(SEED),
        "--model-options",
        *options,
    ]
    tell(f"training with {trainers} trainers, {lanes} lanes")
    sockets = SocketBytes("foreload.trainer.cluster.member.worker")
    foreload(["train", str(path), *given], sockets)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "step"]
    sent = sum(line["bytes_sent"] for line in lines)
    module = DenseModel.build(TrainJob.of(job(path, MODEL)), schedule).module
    bound = least(schedule, trainers, sum(parameter.numel() for parameter in module.parameters()))
    # The first steps compile, and wait for the first rows.
    late = lines[len(lines) // 4 :]
    times = [statistics.median(line[name] for line in late) for name in ("ms", "ms_compute", "ms_exchange", "ms_waiting")]
    crossed = sockets.total
    return sent / bound.bytes, [
        trainers,
        lanes,
        round(sent / len(lines)),
        round(bound.bytes / len(lines)),
        f"{sent / bound.bytes:.4f}",
        "-" if crossed is None else f"{crossed / bound.bytes:.4f}",
        f"{bound.rows / bound.rows_used:.1%}",
        f"{bound.dense_bytes / bound.bytes:.1%}",
        *(f"{value:.3g}" for value in times),
    ]


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__)
    steps = 32 if given.quick else 240
    with tempfile.TemporaryDirectory(dir=given.out, prefix="exchange-") as name:
        measured = {setting: measure(Path(name), *setting, steps) for setting in SETTINGS[: 2 if given.quick else 3]}
    claims = [
        Claim(
            f"bytes exchanged per step, {trainers} trainers" + (f" of {lanes // trainers} lanes" if lanes > trainers else ""),
            "the least possible",
            f"<= {BAR}",
            value,
            most=BAR,
        )
        for (trainers, lanes), (value, _) in measured.items()
    ]
    columns = [
        "trainers", "lanes", "bytes sent a step", "least", "ratio", "ratio on the sockets", "rows sent / rows used", "dense part of the least",
        "ms a step", "compute", "exchange", "waiting for rows",
    ]  # fmt: skip
    table = Table("Exchange between trainers", columns, [line for _, line in measured.values()])
    plot = Series(
        "Where a step's time goes with several trainers on 2 cores",
        "trainers / lanes",
        "ms a step",
        "stacked",
        {
            part: [(f"{trainers} / {lanes}", float(str(line[place]))) for (trainers, lanes), (_, line) in measured.items()]
            for place, part in ((9, "compute"), (10, "exchange"), (11, "waiting for rows"))
        },
    )
    notes = [
        f"`foreload train` on {steps} steps of the reference workload's data (first epoch, batch {BATCH:,}, dim {DIM}, small model, {SLOTS:,} "
        "slots in all), samples placed by locality as is the default.",
        "The least: each row once to each other trainer that uses it, one gradient part back per lane that is elsewhere, each number of the "
        "dense part once to the trainer that adds it and once back. Counted from the schedule's masks.",
        "Bytes sent are those of the trainers' messages, which pass through shared memory between trainers of one host. On the sockets: what the "
        "kernel says each TCP connection between two trainers sent, which is how they come together, and what gloo needs to.",
    ]
    settings: dict[str, str | int | float | bool] = {"steps": steps, "model": MODEL, "slots": SLOTS}
    save(Results("exchange", "Exchange between trainers", claims, [table], [plot], settings, notes), given.out)


if __name__ == "__main__":
    main()

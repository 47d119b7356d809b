"""Replicas under torchft of which some are killed: a training of dense gradients alone, without any embedding state, for bench_lost_trainer.py.

    PYTHON benchmarks/torchft_contender.py '{"replicas": 3, "kills": 2, ...}'

It needs torch, torchft and this file alone. The controller answers with a line of JSON: for each kill the longest time between two steps that any
survivor committed, and the median step before; seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

CALM_SECONDS = 3.0  # before each kill, and after it
# How long a quorum waits for those that it knows, how often it looks, and after what silence one is gone (5,000 by default), for which it waits where
# it would be half of all or less.
JOIN_MS, TICK_MS, HEARTBEAT_MS = 100, 10, 500
TIMEOUT = timedelta(seconds=5)


def replica(spec: dict[str, Any]) -> None:
    """A replica: it prints the time of every step that is committed."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weights = torch.zeros(spec["parameters"])
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=lambda state: None, state_dict=lambda: {"weights": weights},
        min_replica_size=1, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=spec["lighthouse"], replica_id=f"replica-{spec['replica']}", init_sync=False,
        heartbeat_interval=timedelta(milliseconds=100), hostname="127.0.0.1",
    )  # fmt: skip
    block = torch.rand(256, 256)
    while True:
        manager.start_quorum()
        until = time.perf_counter() + spec["step_seconds"]
        while time.perf_counter() < until:  # forward and backward
            block = torch.tanh(block @ block)
        gradient = torch.rand_like(weights)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights.sub_(gradient, alpha=0.01)
            print(f"{time.monotonic()} {manager.num_participants()}", flush=True)


class Replicas:
    """The replicas' processes, and the times at which each has committed its steps."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.processes, self.times = [], [[] for _ in range(spec["replicas"])]  # type: ignore[var-annotated]
        for number in range(spec["replicas"]):
            command = [sys.executable, os.path.abspath(__file__), json.dumps({**spec, "replica": number})]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.processes.append(process)
            threading.Thread(target=self._read, args=(process, self.times[number]), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], times: list[tuple[float, int]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if len(words) == 2:
                times.append((float(words[0]), int(words[1])))

    def alive(self) -> list[int]:
        """Those that run."""
        return [number for number, process in enumerate(self.processes) if process.poll() is None]

    def await_together(self, deadline: float) -> None:
        """Wait until each that runs has trained with all of them for the time of calm."""
        while time.monotonic() < deadline:
            there = self.alive()
            since = time.monotonic() - CALM_SECONDS
            if not there:
                return
            if all(
                self.times[number]
                and (recent := [by for at, by in self.times[number] if at > since])
                and set(recent) == {len(there)}
                for number in there
            ):
                return
            time.sleep(0.05)
        raise SystemExit("the replicas do not come together")

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


def control(spec: dict[str, Any]) -> list[dict[str, float]]:
    """Start the replicas, kill some one after the other; what each kill did."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS, quorum_tick_ms=TICK_MS, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    replicas = Replicas({**spec, "lighthouse": lighthouse.address()})
    moments = random.Random(spec.get("seed", 0))
    gaps = []
    try:
        for _ in range(spec["kills"]):
            replicas.await_together(time.monotonic() + 120)
            time.sleep(0.2 * moments.random())
            victim = replicas.alive()[-1]
            killed = time.monotonic()
            replicas.processes[victim].send_signal(signal.SIGKILL)
            replicas.processes[victim].wait()
            replicas.await_together(killed + 60)
            if not replicas.alive():
                gaps.append({"gap": float("inf"), "step": 0.0})  # none has survived it
                break
            longest, steps = 0.0, []
            for number in replicas.alive():
                ends = [at for at, _ in replicas.times[number]]
                longest = max(longest, *(b - max(a, killed) for a, b in pairwise(ends) if b > killed))
                steps += [b - a for a, b in pairwise(ends) if killed - CALM_SECONDS < b < killed]
            gaps.append({"gap": longest, "step": statistics.median(steps)})
    finally:
        replicas.close()
        lighthouse.shutdown()
    return gaps


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "replica" in given:
        replica(given)
    else:
        print(json.dumps(control(given)), flush=True)

"""Whether the rows that a run has on its store are those of its last clean stop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership.ownership import stale_shards
from foreload.trainer.errors import RunRefused
from foreload.trainer.run.directory import METRICS, STORES, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.reported import reported_step


def check_rows(run: Run, store: Store, status: Status) -> None:
    """Raise RunError unless the rows on an open store are those of the last clean stop, wherever trainers died since.

    They are where no trainer wrote any back, and where local stores were started again from what they saved then.
    """
    if status.state != "training":
        return
    manifest, placement = run.manifest, run.placement
    stale = stale_shards(store, manifest.namespace, status.last_batches)
    gone = np.isin(placement.members, stale).sum(axis=1).max(initial=0) if stale else 0
    if gone > placement.r:
        raise RunRefused(_broken_off(run, status, stale))


def _broken_off(run: Run, status: Status, stale: Sequence[int]) -> str:
    first = run.manifest.stages[0].first_step
    anew = status.step < first
    of = "of no step, for it never stopped cleanly" if anew else f"of step {status.step}, where it last stopped cleanly"
    reported = reported_step(run.path / METRICS)
    to = "" if reported is None else f" (steps up to {reported} were reported)"
    message = (
        f"run {run.path}: was broken off: its dense part is {of}, but rows on store shard {', '.join(map(str, stale))} are of later steps{to}, "
        "and the dense part of those is nowhere; "
    )
    local = LocalStores.find(run.path / STORES)
    # What local stores have saved is of the last clean stop, and goes before an older checkpoint.
    if (newest := run.newest_checkpoint(after=-1 if local is None else status.step)) is not None:
        return message + f"--resume goes on from checkpoint {newest}"
    running = [str(pid) for pid in local.pids if pid] if local is not None else []
    if not running:
        return (
            message
            + f"the rows stay where they are, in namespace {run.manifest.namespace}; --overwrite would delete them and train anew"
        )
    then = "begins again" if anew else f"goes on from step {status.step}, of which the rows are saved"
    return message + f"the rows are in servers that still run ({', '.join(running)}): once these are ended, --resume {then}"

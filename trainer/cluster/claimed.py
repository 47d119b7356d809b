"""A run's name on the servers, held while a call uses it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal

from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.namespace import FolderId, claim, remove
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import LOG, Run
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.servers import asked
from foreload.trainer.saved.row_check import check_rows
from foreload.trainer.saved.run_rows import check_not_training, own_rows


@contextlib.contextmanager
def claimed(job: TrainJob, run: Run, manifest: Manifest, start: Status, urls: Sequence[str]) -> Iterator[None]:
    """While entered, the run's namespace on the servers is this run's; on --resume its rows were found to be those of its last clean stop."""
    # A run that goes on may do so without the shards whose rows parity has.
    goes_on = job.resume and any(start.batches.values())
    spared = run.placement.r if goes_on else 0
    with Store.connect(asked(urls), job.store_silence, spared, job.patience.time) as store:
        mode: Literal["new", "resume", "overwrite"] = "resume" if goes_on else "overwrite" if job.overwrite else "new"
        own_rows(run, store, job.folder_moved)
        if mode == "overwrite":
            check_not_training(manifest.namespace, store, FolderId.of(run.path))
        claim(store, manifest.namespace, manifest.identity, mode, spared, FolderId.of(run.path))
        if job.resume:
            before = run.saved_status()
            check_rows(run, store, before)
            if before.state == "training":
                # The log's batches are later than the rows, so replaying them would be wrong.
                shutil.rmtree(run.path / LOG, ignore_errors=True)
                where = "from the beginning" if before.step < manifest.stages[0].first_step else after_step(before.step)
                sys.stderr.write(
                    f"resumed {where}: the run was broken off since, and the rows are those of its last clean stop\n"
                )
    try:
        yield
    except BaseException:
        # A call that failed before it began leaves the name free, so that the next one needs no --overwrite.
        if run.status is None:
            with contextlib.suppress(Exception), Store(asked(urls), job.store_silence, timedelta(seconds=1)) as store:
                remove(store, manifest.namespace)
        raise

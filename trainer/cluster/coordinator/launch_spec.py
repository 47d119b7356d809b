"""What the trainers of a call are started with, put together from the job and the run."""

from __future__ import annotations

from foreload.base.codec import FormError, of_json
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.folder_over_hosts import run_facts
from foreload.trainer.cluster.messages.trainers import LaunchSpec
from foreload.trainer.compute.reports import Totals
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run
from foreload.trainer.run.manifest import Status, code_sums


def launch_spec(call: TrainingCall, servers_return: bool) -> LaunchSpec:
    """What trainers are told of a call, as it begins. servers_return: as LaunchSpec has it."""
    job, run, manifest, start = call.job, call.run, call.manifest, call.start
    return LaunchSpec(
        # Other hosts' trainers bring their own credentials, and their own address; those of this call never reach the rendezvous store.
        job=job.to_dict() | {"store": manifest.job["store"], "spare": None, "address": None},
        first_term=start.term,
        start_step=start.step,
        last_batches=tuple(int(start.batches[str(lane)]) for lane in range(manifest.lanes)),
        fingerprint=None if job.accept_numerics else manifest.fingerprint,
        resumes=start.step >= manifest.stages[0].first_step,
        servers_return=servers_return,
        faults=tuple(call.observer.faults),
        totals=_totals(run, start),
        hosts=run_facts(run, manifest) if job.coordinator is not None else None,
        watched=manifest.watched,
        code=code_sums(manifest.code),
    )


def _totals(run: Run, start: Status) -> Totals:
    try:
        return of_json(start.totals, Totals)
    except FormError as error:
        raise RunError(f"run {run.path}: status.json is damaged ({error}); restore the folder from a copy") from error

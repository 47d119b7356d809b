"""The numbers of trainers and local servers with which `train --auto` begins.

They are chosen by the profiles of like jobs in the history, as `foreload plan` chooses, but without
short runs, and with the schedule's own slots. What the user gives is not chosen, and neither is
anything that the bits of the model depend on, unless --auto-may names it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreload.base.progress import duration
from foreload.pipelines.schedule.format import MOST_LANES
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.job_shape import machine, settings_of_job
from foreload.trainer.compute import numerics
from foreload.trainer.errors import HistoryError, PlanError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Parity, Pool, Servers
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.resources.choices import Choice, choose
from foreload.trainer.run import history


def started(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, with the trainers and the store that it begins with.

    Without --auto, and where both are given, they are as they were.

    The user reads why on stderr.

    Args:
        values: the settings by name.

    Raises:
        ForeloadError: a setting is malformed, or the schedule or the model cannot be read.
    """
    given = dict(values)
    if given.get("auto") is not True or given.get("resume"):
        return given
    # Trainers on other hosts cannot reach local servers.
    own_store = not given.get("store") and not given.get("coordinator")
    own_trainers = "trainers" not in given
    own_threads = given.get("auto_may") == "threads" and "threads" not in given
    if own_store:
        # The parity of a run is never changed, so it is not switched on by the number of shards.
        given.setdefault("parity", "off")
        parity = Parity.parse("--parity", given["parity"])
        given["store"] = f"{'engine' if given.get('engine') == 'ray' else 'local'}:{sum(parity)}"
    job = TrainJob.of(given)
    if (
        not (own_store or own_trainers or own_threads)
        or not job.store.local
        or job.is_over_hosts
        or under_scheduler()
        or job.follow
    ):
        return given
    try:
        chosen, reason = _choice(job, own_store, own_trainers, own_threads)
    except (PlanError, HistoryError) as error:
        sys.stderr.write(f"auto: begins with {_size(job.trainers, job.store.local, job.threads)}: {error}\n")
        return given
    sys.stderr.write(f"auto: begins with {_size(chosen.trainers, chosen.shards, chosen.threads)}: {reason}\n")
    threads = {"threads": chosen.threads} if own_threads else {}
    return given | threads | {"trainers": chosen.trainers, "store": str(Servers(chosen.shards))}


def _size(trainers: int, shards: int | None, threads: int) -> str:
    of = "" if threads == 1 else f" of {threads} threads"
    return f"{trainers} trainer{'s' * (trainers != 1)}{of}, local:{shards}"


def _advise(job: TrainJob, lanes: int, most: int) -> None:
    """Say so if a schedule with more lanes could keep twice as many cores busy, or more."""
    more = min(most // job.threads, MOST_LANES)
    if more >= 2 * lanes:
        sys.stderr.write(
            f"auto: the schedule's {lanes} lane{'s' * (lanes != 1)} can keep {lanes * job.threads} of {most} cores busy; "
            f"prepare with --lanes {more} to let --auto use {more * job.threads} (other lanes are another model)\n"
        )


def _choice(job: TrainJob, own_store: bool, own_trainers: bool, own_threads: bool) -> tuple[Choice, str]:
    """Return the choice and the reason.

    Raises:
        PlanError: nothing is known of jobs like this one, or nothing fits the pool.
    """
    numerics.set_environment(job.cpu_capability, job.threads)
    # These imports load torch, which reads the environment that was just set.
    from foreload.trainer.assembly.assembly import DenseModel
    from foreload.trainer.commands import plan
    from foreload.trainer.resources.features import step_counts

    schedule = Schedule(job.schedule)
    model = DenseModel.build(replace(job, device="cpu"), schedule)
    settings, path, here = settings_of_job(job, schedule, model), history.history_path(job.history), machine()
    pool = plan.Pool.of(job.pool or Pool())
    _advise(job, settings["lanes"], pool.cores)
    profiles = [one for one in ([] if path is None else history.read(path)) if plan.is_usable(one, settings, here)]
    if not profiles:
        raise PlanError("the history has no profile of a job like this one")
    shards = job.store.local
    assert shards is not None
    parity = job.code(shards)
    # How trainers share a machine is hard to predict, so only numbers that were tried are chosen.
    tried = {(int(one.settings["trainers"]), int(one.settings["threads"])) for one in profiles}
    setups = [
        one
        for threads in (sorted({threads for _, threads in tried if threads <= pool.cores}) if own_threads else [job.threads])
        for one in plan.setups_of(
            replace(job, parity=parity, threads=threads), settings, replace(pool, stores=max(pool.stores, shards))
        )
        if ((one.trainers, threads) in tried or not (own_trainers or own_threads))
        and (own_trainers or one.trainers == job.trainers)
        and (own_store or one.shards == shards)
    ]
    if not setups:
        raise PlanError("the history has no profile of a job like this one with so many trainers as the pool has cores for")
    choices, _ = plan.predicted_choices(job, schedule, model.layouts, settings, setups, [step_counts(schedule)], profiles)
    within = [one for one in choices if one.memory_bytes <= pool.memory_bytes]
    if not within:
        raise PlanError("nothing that fits the pool's memory is predicted")
    deadline = None if job.deadline is None else job.deadline.seconds
    chosen, reason = choose(within, plan.GB_PRICE, deadline, job.budget)
    return chosen, f"{reason}, {duration(chosen.seconds)} as predicted from {len(profiles)} profile{'s' * (len(profiles) != 1)}"

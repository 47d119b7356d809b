"""`foreload history`, `foreload plan`, `foreload pool` and `foreload report`.

They list what runs took, predict what the next one will take, show what jobs share, and draw pages about runs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from foreload.base.errors import SettingError
from foreload.base.settings import add_arguments, given, number, positive
from foreload.trainer.command_line.shared import a_path, add_group, add_json, add_plain, print_result
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Interval, Pool

_OF_THE_JOB = (
    *(
        "model",
        "model_folder",
        "dim",
        "model_options",
        "loss",
        "label_weights",
        "seed",
        "row_optimizer",
        "row_options",
        "lr",
        "dense_optimizer",
        "dense_lr",
        "dense_options",
    ),
    *("parity", "threads", "cpu_capability", "copies"),
)


def add_to(commands: Any) -> None:
    """Declare the commands."""
    listed = add_plain(
        commands, "history", (_history, "history"), "list the steps, times and memory of past runs",
        "Lists the profiles that runs record at their end, the oldest first: model, schedule, trainers and store, milliseconds a step, memory. "
        "`foreload plan` predicts from them.",
    )  # fmt: skip
    _add_history(listed)
    add_json(listed, "profiles")
    plan = add_plain(
        commands, "plan", (_plan, "plan"), "choose the numbers of trainers, store shards and slots for a schedule",
        "Predicts how long a schedule would train with other numbers of trainers, store shards and slots, and what that costs, from the schedule's "
        "steps and from profiles of runs on this machine. Prints the choices that no other one beats in both time and cost, the one to take and why, "
        "and the command lines. If a profile is missing, trains a few seconds of the schedule to measure one.",
    )  # fmt: skip
    plan.add_argument("schedule", metavar="SCHEDULE", type=a_path("SCHEDULE"), help="the folder that `foreload prepare` wrote")
    group = plan.add_argument_group("resources and goals")
    group.add_argument(
        "--pool",
        metavar="cores=N,memory=SIZE,stores=N",
        help="resources that may be used; by default those of this machine, and up to 5 store shards",
    )
    group.add_argument(
        "--deadline", metavar="TIME", help="choose the cheapest that ends within this time, such as 90s, 10m or 2h"
    )
    group.add_argument("--budget", metavar="X", help="choose the fastest that costs at most this many core hours")
    group.add_argument("--gb-price", metavar="X", default="0.13", help="price of a GB hour, in core hours (default 0.13)")
    group.add_argument("--plot", metavar="FILE", help="draw all choices by time and cost to this file")
    _add_history(group)
    add_arguments(plan, TrainJob, _OF_THE_JOB)
    plan.add_argument("--job", metavar="FILE.toml", type=a_path("--job"), help="take settings of the training from this file")
    add_json(plan, "plan")
    shared = add_plain(
        add_group(commands, "pool", "show the jobs that share a Ray cluster"), "status", (_pool_status, "pool"), "show each job's share",
        "Lists the jobs of `foreload train --engine ray --auto` on a Ray cluster: weight, and the cores that each needs at least, uses, may use now, "
        "and is to have once others have given back what is too much.",
    )  # fmt: skip
    shared.add_argument(
        "--ray-address", metavar="HOST:PORT", help="the cluster's head; by default RAY_ADDRESS, or the cluster of this machine"
    )
    add_json(shared, "shares")
    _add_report(commands)


def _pool_status(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import pool

    shared = pool.run(parsed.ray_address)
    return print_result(parsed, shared, shared.text())


def _add_report(commands: Any) -> None:
    report = add_plain(
        commands, "report", (_report, "report"), "write an HTML page about a run, two runs, or a schedule",
        "Writes one self-contained HTML file. For a run, which may be training: losses and metrics, throughput, where step time goes, the cache, "
        "store shards over time, slots and memory, calibration, and the settings. For two runs: the same, side by side. For a schedule: rows by "
        "frequency, the working set over time, arrivals against slots, and each table's share.",
    )  # fmt: skip
    report.add_argument(
        "place", metavar="RUN|SCHEDULE", type=a_path("RUN|SCHEDULE"), help="the folder of a run, or of a schedule"
    )
    report.add_argument("beside", metavar="RUN2", nargs="?", type=a_path("RUN2"), help="the folder of another run")
    report.add_argument(
        "--out",
        metavar="FILE",
        help="file to write; by default report.html in RUN, or, for two runs or a schedule, NAME-report.html in the working directory",
    )


def _report(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import report

    print(report.run([parsed.place, *([parsed.beside] if parsed.beside else [])], parsed.out))
    return 0


def _add_history(command: Any) -> None:
    command.add_argument(
        "--history",
        metavar="FILE",
        type=a_path("--history"),
        help="file of the profiles; by default the one in the user's data folder",
    )


def _history(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import history

    listed = history.run(parsed.history) if parsed.json else history.run(parsed.history, history.FOR_TEXT)
    return print_result(parsed, listed, listed.text())


def _plan(parsed: argparse.Namespace) -> int:
    if parsed.deadline is not None and parsed.budget is not None:
        raise SettingError(
            "--deadline and --budget: only one of them can be given; --deadline minimises the cost, --budget the time"
        )
    deadline = None if parsed.deadline is None else Interval.parse_time("--deadline", parsed.deadline).seconds
    budget = None if parsed.budget is None else positive("--budget", parsed.budget)
    price = number(0)("--gb-price", parsed.gb_price)
    pool = Pool() if parsed.pool is None else Pool.parse("--pool", parsed.pool)
    if pool.weight is not None:
        raise SettingError("--pool: weight is for jobs that share a cluster; leave it out")
    from foreload.trainer.commands import plan

    plan.check_writable(parsed.plot)
    request = plan.request_of(
        parsed.schedule, given(parsed, TrainJob), parsed.job, plan.Pool.of(pool), deadline=deadline, budget=budget, history=parsed.history,
        gb_price=price,
    )  # fmt: skip
    planned = plan.run(request, lambda line: print(f"plan: {line}", file=sys.stderr, flush=True))
    if parsed.plot is not None:
        plan.draw(planned, parsed.plot)
    return print_result(parsed, planned, plan.text(planned))

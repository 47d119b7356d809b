"""`foreload train`, `status`, `join`, `scale` and `drill`: commands about a training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError
from foreload.base.json_log import log_as
from foreload.base.settings import add_arguments, given, path
from foreload.trainer.command_line.shared import a_path, add_group, add_json, add_plain, check_json, print_result
from foreload.trainer.compute.reports import metric_lines
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import AUTO
from foreload.trainer.run import shard_loads
from foreload.trainer.run.manifest import caveat_lines

if TYPE_CHECKING:
    from foreload.trainer.commands.drill import Drill

PERMANENT = 6
"""The exit status of a training with --resume=auto that would fail again if it were repeated."""
FULL = 5
"""The exit status of a training with --until-full that stopped before a store shard was full."""


def add_to(commands: Any) -> None:
    """Declare the commands."""
    train = add_plain(
        commands, "train", (_train, "train"), "train a model from a schedule",
        "Trains a model from a schedule. Ctrl-C stops after the current step, with everything saved; --resume continues.",
    )  # fmt: skip
    train.epilog = (
        'Every flag can also be set in the table [train] of a job file, as in `row-optimizer = "adagrad"`; flags take precedence.'
    )
    train.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_settings(train)
    status = add_plain(
        commands, "status", (_status, "status"), "show how far a run is, and which trainer has which lanes",
        "Shows how far a run is. If it trains, also shows its term, its trainers with their lanes and processes, which trainers have copies of which "
        "lanes and how complete these are, and whether the run would survive the loss of a trainer now.",
    )  # fmt: skip
    status.add_argument("run", metavar="RUN", type=a_path("RUN"), help="the folder that `foreload train --run` wrote")
    add_json(status, "result")
    _add_join(commands)
    _add_drill(add_group(commands, "drill", "practise a failure"))
    _add_scale(commands)


def _add_join(commands: Any) -> None:
    join = add_plain(
        commands, "join", (_join, "join"), "train as one more trainer of a job on another host",
        "Joins `foreload train --coordinator HOST:PORT` with a trainer on this host, before training begins or during it, and stays until training "
        "has ended. Ctrl-C hands the trainer's lanes over to the others, and leaves. The run's folder is not needed on this host.",
    )  # fmt: skip
    join.add_argument("coordinator", metavar="HOST:PORT", help="the address given to `foreload train --coordinator`")
    join.add_argument(
        "--token-file",
        metavar="FILE",
        type=a_path("--token-file"),
        help="a copy of RUN/token of the coordinator's host; by default the token in FORELOAD_JOB_TOKEN",
    )
    join.add_argument(
        "--schedule",
        metavar="PATH",
        type=a_path("--schedule"),
        help="path of the schedule on this host, if it differs from that on the coordinator's host",
    )
    join.add_argument(
        "--address",
        metavar="HOST",
        help="address at which other trainers reach this host; by default the one from which this host reaches the coordinator",
    )
    join.add_argument(
        "--store",
        metavar="URL,...",
        help="URLs by which this host reaches the store shards, in the coordinator's order, if they differ from the coordinator's",
    )
    join.add_argument("--wait", metavar="S", type=float, default=300.0, help="seconds to wait for the coordinator (default 300)")


def _join(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import join

    given = (parsed.coordinator, parsed.token_file, parsed.schedule, parsed.address, parsed.store, parsed.wait)
    join.run(*given, parsed.start_process)
    return 0


def _add_scale(commands: Any) -> None:
    scale = add_plain(
        commands, "scale", (_scale, "scale"), "change the number of trainers while a run trains",
        "Changes the number of trainers of a run that trains, or has another trainer take the place of one. New trainers are started and first get "
        "copies of lanes; then they take lanes over. Trainers that are no longer needed hand their lanes over and leave. The model does not depend "
        "on the number of trainers. Returns when the change is done.",
    )  # fmt: skip
    scale.add_argument("run", metavar="RUN", type=a_path("RUN"), help="the folder of a run that trains")
    what = scale.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "trainers", metavar="N", nargs="?", type=int, help="the new number of trainers, 1 to the number of the schedule's lanes"
    )
    what.add_argument(
        "--replace", metavar="TRAINER", type=int, help="the trainer that is to leave; another one is started in its place"
    )
    scale.add_argument("--no-wait", action="store_true", help="return at once, without waiting for the change")


def _scale(parsed: argparse.Namespace) -> int:
    from foreload.trainer.cluster.messages.control import AskScale
    from foreload.trainer.commands import scale

    scale.run(parsed.run, AskScale(parsed.trainers, parsed.replace), not parsed.no_wait, print)
    return 0


def _add_drill(drills: Any) -> None:
    lost = add_plain(
        drills, "lost-shard", (_drill_shard, "lost_shard"), "train, kill a store shard during training, and measure the effect",
        "Trains, kills a local store shard after a step, and trains on. Reports the longest gap between steps and the throughput meanwhile, "
        "and draws them in RUN/drill.png. Without SCHEDULE, it generates synthetic clicks. By default, --run is drill and --store is local:3.",
    )  # fmt: skip
    group = lost.add_argument_group("the drill")
    group.add_argument(
        "--at", type=int, metavar="STEP", help="kill it after this step (default: a step in the second quarter, drawn by --seed)"
    )
    group.add_argument("--shard", type=int, metavar="N", help="kill this store shard (default: drawn by --seed)")
    group.add_argument(
        "--stop", action="store_true", help="stop it (SIGSTOP) and continue it later, instead of killing it (SIGKILL)"
    )
    group.add_argument(
        "--down",
        type=float,
        metavar="S",
        help="seconds until its server is back (default 1; with --stop 1 more than --store-timeout)",
    )
    _add_check(group)
    _add_settings(lost)
    trainer = add_plain(
        drills, "lost-trainer", (_drill_trainer, "lost_trainer"), "train, kill a trainer during training, and measure the effect",
        "Trains with copies, kills a trainer during a step, and trains on. Reports the longest gap between steps and which trainer took over which "
        "lanes, and draws the throughput in RUN/drill.png. Without SCHEDULE, it generates synthetic clicks. By default, --run is drill, --store is "
        "local:3, and --trainers and --copies are 2.",
    )  # fmt: skip
    group = trainer.add_argument_group("the drill")
    group.add_argument(
        "--at", type=int, metavar="STEP", help="kill it during this step (default: a step in the second quarter, drawn by --seed)"
    )
    group.add_argument("--trainer", type=int, metavar="N", help="kill this trainer (default: drawn by --seed)")
    group.add_argument("--stop", action="store_true", help="stop it for good (SIGSTOP), instead of killing it (SIGKILL)")
    _add_check(group)
    _add_settings(trainer)
    _add_drill_scale(drills)


def _add_drill_scale(drills: Any) -> None:
    scale = add_plain(
        drills, "scale", (_drill_scale, "scale_drill"), "train with more and fewer trainers and store shards, and measure what each change costs",
        "Trains while trainers join and leave, and store shards are added, moved and removed. Reports the longest gap between steps during each "
        "change and the throughput after it, and draws them in RUN/drill.png. Without SCHEDULE, it generates synthetic clicks. By default, --run is "
        "drill and --store is local:3.",
    )  # fmt: skip
    group = scale.add_argument_group("the drill")
    group.add_argument(
        "--to",
        default="1,2,4,2,1",
        metavar="N,N|Ns|move-N|replace,...",
        help="numbers of trainers in turn, of which training begins with the first, numbers of local store shards, as 4s, shards that move to "
        "another server, as move-0, and replace, by which another trainer takes the place of the oldest (default 1,2,4,2,1)",
    )
    _add_check(group)
    _add_settings(scale)


def _add_check(group: Any) -> None:
    group.add_argument("--check", action="store_true", help="train again, undisturbed, and compare the digests of the two models")


def _add_settings(command: argparse.ArgumentParser) -> None:
    add_arguments(command, TrainJob)
    command.add_argument("--job", metavar="FILE.toml", type=a_path("--job"), help="take settings from this file")
    add_json(command, "summary")


def job_values(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a call, by name.

    If the job file says where the summary is to be written, and --json does not, `parsed.json` is
    set.

    Raises:
        SettingError: a setting or the job file is malformed.
        RunError: the run to resume cannot be opened.
        CheckpointError: the checkpoint to start from cannot be opened.
    """
    from foreload.trainer.commands.train import call_values

    values, summary = call_values(given(parsed, TrainJob), parsed.job)
    if parsed.json is None and summary is not None:
        parsed.json = path("--json", summary)
        check_json(parsed.json)
    return values


def _train(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands.train import as_it_stands, is_permanent
    from foreload.trainer.commands.warm_start import started

    auto, run = parsed.resume == AUTO, parsed.run
    try:
        values = job_values(parsed)
        log_as(values.get("log_format"))
        auto, run = values.get("resume") == AUTO, values.get("run")
        return _end_of(parsed, TrainJob.of(started(as_it_stands(values))))
    except ForeloadError as error:
        if auto and is_permanent(error, run):
            error.exit_status = PERMANENT
        raise


def _end_of(parsed: argparse.Namespace, job: TrainJob) -> int:
    from foreload.trainer.commands.train import train

    ending = train(job, parsed.observer, parsed.start_process)
    if ending is None:
        return 0
    print_result(parsed, ending.summary, _summary_text(ending.summary))
    if ending.early is not None:
        print(f"stopped early {after_step(ending.step)}: {ending.early}", file=sys.stderr)
    elif ending.stopped:
        why = "" if ending.full is None else f", for {ending.full}"
        print(
            f"stopped {after_step(ending.step)}{why}; go on with: foreload train {job.schedule} --run {job.run} --resume",
            file=sys.stderr,
        )
    if ending.no_digest is not None:
        raise ending.no_digest
    if ending.full is not None:
        return FULL
    return 128 + ending.signal_number if ending.signal_number is not None else 0


def _status(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import status

    found = status.run(parsed.run)
    return print_result(parsed, found, found.text())


def _summary_text(summary: dict[str, Any]) -> str:
    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{summary['steps']:,} steps, {summary['samples']:,} samples, {shown(summary['samples_per_second'], ',.0f')} a second",
        *metric_lines(summary, "   "),
        f"rows: {summary['rows_used']:,} used, {summary['rows_arrived']:,} arrived, {summary['rows_fetched']:,} of them fetched, "
        f"{summary['rows_written_back']:,} written back, {summary['rows_flushed']:,} more at the end",
        f"cache hits {shown(summary['cache_hit_rate'], '.1%')}",
        f"a step {shown(summary['ms_step'], '.2f')} ms: compute {shown(summary['ms_compute'], '.2f')}, exchange "
        f"{shown(summary['ms_exchange'], '.2f')}, waiting for rows {shown(summary['ms_waiting'], '.2f')} "
        f"({shown(summary['wait_fraction'], '.2%')} of the time)",
    ]
    lines += shard_loads.lines(summary["store_shards"])
    if summary.get("digest"):
        lines.append(f"digest {summary['digest']}")
    return "\n".join(lines + caveat_lines(summary))


def _drill_shard(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands.lost_shard import LostShard

    return _drill(parsed, lambda job: LostShard(job, parsed.at, parsed.shard, parsed.stop, parsed.down))


def _drill_trainer(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands.lost_trainer import LostTrainer

    return _drill(parsed, lambda job: LostTrainer(job, parsed.at, parsed.trainer, parsed.stop), trainers=2, copies=2)


def _drill_scale(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands.scale_drill import ScaleDrill

    return _drill(parsed, lambda job: ScaleDrill(job, parsed.to))


def _drill(parsed: argparse.Namespace, kind: Callable[[TrainJob], Drill], **defaults: Any) -> int:
    """Run a drill.

    Args:
        kind: makes the drill of a job.
        defaults: further settings of the job, used where the user gives none.
    """
    from foreload.trainer.commands import drill

    values = {"run": "drill", "store": "local:3"} | defaults | job_values(parsed)
    make = not values.get("schedule")
    if make:
        values["schedule"] = f"{values['run']}-schedule"
    played = kind(TrainJob.of(values))
    summary = drill.run(played, parsed.check, make, parsed.start_process)
    return print_result(parsed, summary, drill.text(played, summary))

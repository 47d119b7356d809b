"""The command line: prepare, train, evaluate, export, digest, stores, scrub, drill."""

from __future__ import annotations

import argparse
import errno
import json
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from foreload.pipelines.base.files import is_full, unwritable
from foreload.pipelines.base.interrupts import Interrupts
from foreload.pipelines.errors import ForeloadError, SettingError
from foreload.trainer.compute import numerics
from foreload.trainer.run.job import (
    Setting,
    TrainJob,
    flag,
    masked,
    read_job_file,
    settings,
)

_GROUPS = {
    "what to train": ("run", "model", "model_folder", "dim", "model_options", "seed"),
    "how it learns": ("row_optimizer", "lr", "dense_optimizer", "dense_lr", "dense_options"),
    "where it runs": (
        "store",
        "parity",
        "spare",
        "no_restart",
        "trainers",
        "threads",
        "cpu_capability",
        "device",
        "memory",
        "namespace",
        "address",
        "store_timeout",
        "peer_timeout",
    ),
    "this call": ("follow", "resume", "accept_numerics", "overwrite", "allow_nan", "digest"),
}
_NAMED = 20  # stripes that scrub names on the terminal
_REPLACE_TIMEOUT = timedelta(minutes=1)  # the launcher looks at the new server first
DAMAGED = 4  # exit status
_SERVERS_HELP = "servers, as --store takes them"
_STORE_HELP = "URLs of the run's store shards, where they need a password that FORELOAD_STORE_PASSWORD does not give"

ABOUT = """\
Trains click models whose embedding tables live in Redis. The order of the data is known before training begins, so `prepare` compiles it into a
schedule that says, for every step, which rows the trainers need; `train` follows it, and always has them in time."""

EXAMPLES = """\
a first training, which needs nothing but this package:
  foreload prepare --format synthetic --rows 200000 --eval-fraction 0.1 --batch-size 1024 --lanes 4 --out clicks
  foreload train clicks --run first --store local:3 --trainers 2 --dim 16
  foreload evaluate first

`foreload COMMAND --help` explains each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 2 after one line that says what is wrong, or 128 + the number of the signal that stopped it.

    3: more store shards are lost than parity covers, so rows are gone. 4: `scrub` found a stripe that it cannot repair.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with Interrupts() as interrupts:
            if given[:1] == ["prepare"]:
                # Beam takes long to import, and only prepare needs it.
                from foreload.pipelines.prepare import run

                run(given[1:])
                return 0
            parsed = parser().parse_args(given)
            _check_json(getattr(parsed, "json", None))
            command: Callable[[argparse.Namespace], int] = parsed.command
            return command(parsed)
    except ForeloadError as error:
        print(f"foreload: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("foreload: stopped", file=sys.stderr)
        return 128 + (interrupts.received or [int(signal.SIGINT)])[0]
    except BrokenPipeError:
        # Whoever read the output has had enough; Python would complain while flushing it.
        sys.stdout = None
        return 141
    except OSError as error:
        if is_full(error):
            print("foreload: error: the disk is full: free space where this command writes, and start it again", file=sys.stderr)
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            print(
                f"foreload: error: {error.filename}: {error.strerror}; give a place that can be read and written", file=sys.stderr
            )
        else:
            raise
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others, and show no password of a store URL."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{masked(message)}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The whole command line, but for the flags of prepare."""
    top = _Parser(
        prog="foreload",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("prepare", help="compile click logs into a schedule", add_help=False)
    _add_train(commands)
    evaluate = _add(
        commands, "evaluate", _evaluate, "measure a run's model on held-out data",
        "Computes log loss, AUC and normalised entropy of the model on the evaluation steps of a schedule.",
    )  # fmt: skip
    evaluate.add_argument("schedule", nargs="?", metavar="SCHEDULE", help="evaluate on this one instead of the run's own")
    export = _add(
        commands, "export", _export, "write a run's model to files",
        "Writes every trained row as Parquet, one file a table with columns id, weight and state, and the dense part as safetensors.",
    )  # fmt: skip
    export.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")
    _add(
        commands, "digest", _digest, "print a fingerprint of a run's model",
        "Prints the SHA-256 of every bit of the model: equal digests mean equal models (docs/definitions.md).",
    )  # fmt: skip
    stores = commands.add_parser("stores", help="look at a run's store shards")
    of_stores = stores.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(
        of_stores, "status", _stores_status, "whether each shard is up, and what it holds",
        "Asks each store shard of a run for its state, rows and memory. Exits with 2 if one is down or lost.",
    )  # fmt: skip
    replaced = of_stores.add_parser(
        "replace", help="use another server in place of a shard's, while the run trains", allow_abbrev=False,
        description="Has a run that trains use another, empty server in place of a store shard's; its rows are rebuilt there from parity.",
    )  # fmt: skip
    replaced.add_argument("run", metavar="RUN", help="the folder of a run that trains")
    replaced.add_argument("old", metavar="OLD", help="the URL of the shard's server now, or the shard's number")
    replaced.add_argument("new", metavar="NEW", help="the URL of an empty server")
    replaced.set_defaults(command=_stores_replace)
    listed = of_stores.add_parser(
        "list", help="what runs have rows on servers", allow_abbrev=False,
        description="Names every namespace that has rows on the servers, with its size and the run that it is of. Exits with 2 if one is down.",
    )  # fmt: skip
    listed.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    listed.add_argument("--json", metavar="FILE", help="write the result there too, for programs")
    listed.set_defaults(command=_stores_list)
    gone = of_stores.add_parser(
        "delete", help="delete the rows of a run whose folder is gone", allow_abbrev=False,
        description="Deletes a namespace from servers, whatever run it is of; asks nothing. Exits with 2 if rows are left.",
    )  # fmt: skip
    gone.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    gone.add_argument("namespace", metavar="NAMESPACE", help="as `foreload stores list` names it")
    gone.add_argument("--json", metavar="FILE", help="write the result there too, for programs")
    gone.set_defaults(command=_stores_delete)
    _add(
        commands, "delete", _delete, "delete a run, its rows on the store too",
        "Deletes a run's rows on its store shards, its local stores and its folder; asks nothing. A run that trains is refused. Where a shard "
        "cannot be reached, it says what is left there, and exits with 2.",
    )  # fmt: skip
    _add(
        commands, "scrub", _scrub, "check the parity of a run's rows, and repair them",
        "Reads every stripe of a run, also while it is trained. Repairs a row that is missing, or has a wrong id or tag, a parity row that is "
        "missing, and what several parity rows single out; names every other stripe that does not agree, leaves it alone, and exits with 4.",
    )  # fmt: skip
    drills = commands.add_parser("drill", help="practise a failure").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    _add_drill(drills)
    return top


def _add(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], help: str, description: str
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description, allow_abbrev=False)
    added.add_argument("run", metavar="RUN", help="the folder that `foreload train --run` wrote")
    added.add_argument("--store", metavar="URL,...", help=_STORE_HELP)
    added.add_argument("--json", metavar="FILE", help="write the result there too, for programs")
    added.set_defaults(command=command)
    return added


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train", help="train a model from a schedule", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains a model from a schedule. Ctrl-C stops after the step, with everything saved; --resume goes on.",
        epilog="Every flag can also stand in the table [train] of a job file, as in `row-optimizer = \"adagrad\"`; flags win.",
    )  # fmt: skip
    _add_settings(train)
    train.set_defaults(command=_train)


def _add_drill(drills: Any) -> None:
    lost = drills.add_parser(
        "lost-shard", help="train, kill a store shard on the way, and see what that does to the training", allow_abbrev=False,
        description="Trains, kills a local store shard at a step, and goes on. Tells the longest gap between steps and the throughput meanwhile, "
        "and draws it in RUN/drill.png. Without SCHEDULE, clicks are made up; without --run and --store, these are drill and local:3.",
    )  # fmt: skip
    group = lost.add_argument_group("the drill")
    group.add_argument(
        "--at", type=int, metavar="STEP", help="after this step (default: one of the second quarter, drawn by --seed)"
    )
    group.add_argument("--shard", type=int, metavar="N", help="kill this store shard (default: drawn by --seed)")
    group.add_argument(
        "--stop", action="store_true", help="stop it (SIGSTOP) and let it go on later, instead of killing it (SIGKILL)"
    )
    group.add_argument(
        "--down",
        type=float,
        metavar="S",
        help="seconds until its server is back (default 1; with --stop 1 more than --store-timeout)",
    )
    group.add_argument("--check", action="store_true", help="train again, undisturbed, and compare the digests of the two models")
    _add_settings(lost)
    lost.set_defaults(command=_drill)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", nargs="?", metavar="SCHEDULE", help=settings()["schedule"].help)
    defaults = {item.name: item.default for item in TrainJob.__dataclass_fields__.values()}
    for title, names in _GROUPS.items():
        group = command.add_argument_group(title)
        for name in names:
            _add_setting(group, name, settings()[name], defaults[name])
    command.add_argument("--job", metavar="FILE.toml", help="take settings from this file")
    command.add_argument("--json", metavar="FILE", help="write the summary there too, for programs")


def _add_setting(group: Any, name: str, setting: Setting, default: Any) -> None:
    if setting.kind == "switch":
        group.add_argument(flag(name), action="store_const", const=True, help=setting.help)
        return
    kinds = {"integer": int, "number": float}
    shown = f" (default {default})" if setting.kind in ("text", "integer", "number") and default not in ("", None) else ""
    options: dict[str, Any] = {"help": setting.help + shown}
    if setting.kind == "options":
        options |= {"nargs": "+", "action": "extend"}
    else:
        options["type"] = kinds.get(setting.kind, str)
    if setting.choices:
        options["choices"] = setting.choices
    else:
        options["metavar"] = setting.metavar
    group.add_argument(flag(name), **options)


def job_of(parsed: argparse.Namespace) -> TrainJob:
    """The job of a call: flags, else the job file, else (with --resume) what the run was started with. Raises SettingError and RunError."""
    return TrainJob.of(_values(parsed))


def _values(parsed: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(parsed, name, None) for name in settings()}
    flags = {name: value for name, value in given.items() if value is not None}
    for name in ("model_options", "dense_options"):
        if name in flags:
            from foreload.trainer.models import key_values

            flags[name] = key_values(flag(name), flags[name])
    in_file = read_job_file(parsed.job) if parsed.job else {}
    summary_file = in_file.pop("json", None)
    if parsed.json is None:
        parsed.json = summary_file
        _check_json(parsed.json)
    values = in_file | flags
    if values.get("resume"):
        from foreload.trainer.run.directory import Run

        if not values.get("run"):
            raise SettingError("--run: is missing; give the run that --resume goes on with")
        manifest = Run.open(values["run"]).manifest
        values = manifest.job | {"schedule": manifest.stages[-1].path} | values
    return values


def _check_json(path: str | None) -> None:
    """Find out before the work whether its result can be written there."""
    if path is not None and (why := unwritable(Path(path))):
        raise SettingError(f"--json: cannot write {path}: {why}")


def _train(parsed: argparse.Namespace) -> int:
    job = job_of(parsed)
    from foreload.trainer.commands.train import train

    ending = train(job)
    if ending is None:
        return 0
    _tell(parsed, ending.summary, _summary_text(ending.summary))
    if ending.stopped:
        print(
            f"stopped after step {ending.step}; go on with: foreload train {job.schedule} --run {job.run} --resume",
            file=sys.stderr,
        )
    return 128 + ending.signal_number if ending.signal_number is not None else 0


def _summary_text(summary: dict[str, Any]) -> str:
    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{summary['steps']:,} steps, {summary['samples']:,} samples, {shown(summary['samples_per_second'], ',.0f')} a second",
        f"log loss {shown(summary['log_loss'], '.5f')}   AUC {shown(summary['auc'], '.4f')}   "
        f"normalised entropy {shown(summary['normalized_entropy'], '.4f')}",
        f"rows: {summary['rows_used']:,} used, {summary['rows_arrived']:,} arrived, {summary['rows_fetched']:,} of them fetched, "
        f"{summary['rows_written_back']:,} written back, {summary['rows_flushed']:,} more at the end",
        f"cache hits {shown(summary['cache_hit_rate'], '.1%')}",
        f"a step {shown(summary['ms_step'], '.2f')} ms: compute {shown(summary['ms_compute'], '.2f')}, exchange "
        f"{shown(summary['ms_exchange'], '.2f')}, waiting for rows {shown(summary['ms_waiting'], '.2f')} "
        f"({shown(summary['wait_fraction'], '.2%')} of the time)",
    ]
    if summary.get("digest"):
        lines.append(f"digest {summary['digest']}")
    if summary["mixed_numerics"]:
        lines.append(numerics.mixed_text(summary["mixed_numerics"]))
    return "\n".join(lines)


def _evaluate(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import evaluate

    found = evaluate.run(parsed.run, parsed.store, parsed.schedule)
    text = (
        f"log loss {found['log_loss']:.5f}   AUC {found['auc']:.4f}   normalised entropy {found['normalized_entropy']:.4f}   "
        f"({found['samples']:,} samples, after step {found['step']})"
    )
    return _tell(parsed, found, text)


def _export(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import export

    about = export.run(parsed.run, parsed.store, parsed.out)
    rows = sum(table["rows"] for table in about["tables"])
    return _tell(
        parsed,
        about,
        f"{parsed.out}: {rows:,} rows of {len(about['tables'])} tables, and the dense part, after step {about['step']}",
    )


def _digest(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import digest

    found = digest.run(parsed.run, parsed.store)
    mixed = [numerics.mixed_text(found["mixed_numerics"])] if found["mixed_numerics"] else []
    return _tell(parsed, found, "\n".join([found["digest"], *mixed]))


def _stores_status(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import stores

    found = stores.run(parsed.run, parsed.store)
    parity = found["parity"]
    lines = [
        f"run {found['run']}: {found['state']}, namespace {found['namespace']}, parity {parity['code']} {parity['state'] or ''}".rstrip()
    ]
    for shard in found["shards"]:
        facts = [
            f"{shard[name]:,} {name.replace('_', ' ')}"
            for name in ("rows", "parity_rows", "row_bytes", "memory_bytes", "saved_bytes")
            if shard.get(name) is not None
        ]
        if "rebuilt" in shard:
            facts.insert(0, f"{shard['rebuilt']:.0%} rebuilt")
        lines.append("  ".join([f"shard {shard['shard']}", shard["state"], *facts, shard.get("why") or shard["url"]]))
    if found["lag"] is not None:
        lag = found["lag"]
        lines.append(
            f"on the way to the store: {lag['rows']:,} rows of {lag['boundaries']:,} boundaries, {lag['batches']:,} batches not yet "
            "released"
        )
    if found["forecast"] is not None:
        end = found["forecast"]
        lines.append(
            f"at the end of the schedule: {end['rows']:,} rows and {end['parity_rows']:,} parity rows, {end['memory_bytes'] / 2**20:,.1f} MiB in all "
            f"shards ({end['overhead_bytes_a_row']:.0f} bytes a row beyond its own{', measured' if end['overhead_measured'] else ''})"
        )
    _tell(parsed, found, "\n".join(lines))
    return 2 if any(shard["state"] in ("down", "lost") for shard in found["shards"]) else 0


def _stores_replace(parsed: argparse.Namespace) -> int:
    from foreload.trainer.cluster.board import ask
    from foreload.trainer.errors import RunError

    answer = ask(Path(parsed.run), {"do": "replace", "old": parsed.old, "new": parsed.new}, _REPLACE_TIMEOUT)
    if answer is None:
        raise RunError(f"run {parsed.run}: is not being trained; name its servers to --resume, in order")
    if "error" in answer:
        raise RunError(f"stores replace: {answer['error']}")
    print(f"shard {answer['replacing']}: {answer['by']} takes its place")
    return 0


def _stores_list(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    found = rows.listed(parsed.urls)
    _tell(parsed, found, rows.listed_text(found))
    return 2 if any(server["why"] for server in found["servers"]) else 0


def _stores_delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    return _tell_deleted(parsed, rows.deleted(parsed.urls, parsed.namespace))


def _delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    return _tell_deleted(parsed, rows.run(parsed.run, parsed.store))


def _tell_deleted(parsed: argparse.Namespace, found: dict[str, Any]) -> int:
    from foreload.trainer.commands import rows

    _tell(parsed, found, rows.deleted_text(found))
    return 2 if any(shard["why"] for shard in found["shards"]) else 0


def _scrub(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import scrub

    found = scrub.run(parsed.run, parsed.store)
    lines = [
        f"{found['stripes']:,} stripes, {found['rows']:,} rows and {found['parity_rows']:,} parity rows checked: "
        f"{found['stripes_repaired']:,} stripes repaired, {found['stripes_damaged']:,} damaged"
    ]
    if found["lost_shards"]:
        lines.append(f"not checked: store shard {', '.join(map(str, found['lost_shards']))}, which is lost")
    for kind in ("repaired", "damaged"):
        for one in found[kind][:_NAMED]:
            first, last = one["ordinals"]
            shards = ", ".join(map(str, one["shards"]))
            lines.append(
                f"{kind}: lane {one['lane']}, table {one['table']}, ordinals {first} to {last}, shards {shards}: {one['what']}"
            )
        if found[f"stripes_{kind}"] > _NAMED:
            lines.append(f"{kind}: {found[f'stripes_{kind}'] - _NAMED:,} more; --json has the first 1,000")
    _tell(parsed, found, "\n".join(lines))
    return DAMAGED if found["stripes_damaged"] else 0


def _drill(parsed: argparse.Namespace) -> int:
    values = _values(parsed)
    values = {"run": "drill", "store": "local:3"} | values
    make = not values.get("schedule")
    if make:
        values["schedule"] = f"{values['run']}-schedule"
    job = TrainJob.of(values)
    from foreload.trainer.commands import drill

    plan = drill.Drill(parsed.at, parsed.shard, parsed.stop, parsed.down, parsed.check, make)
    found = drill.run(job, plan)
    return _tell(parsed, found, drill.text(found))


def _tell(parsed: argparse.Namespace, found: dict[str, Any], text: str) -> int:
    print(text)
    if parsed.json:
        try:
            Path(parsed.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingError(f"--json: cannot write {parsed.json}: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())

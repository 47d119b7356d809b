"""`foreload check-model`, `adapt`, `evaluate`, `predict`, `lookup`, `export`, `apply` and `digest`.

They try, measure, use and publish a model.
"""

from __future__ import annotations

import argparse
from typing import Any

from foreload.base.errors import SettingError
from foreload.base.settings import add_arguments, given, settings_of
from foreload.trainer.command_line.shared import (
    a_path,
    add_accept_model,
    add_command,
    add_json,
    add_plain,
    add_schedule,
    print_result,
)
from foreload.trainer.compute.reports import metric_lines
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.manifest import inexact_text

_OF_MODELS = ("model_folder", "dim", "model_options", "seed", "loss", "drop_weights")
"""The settings of `foreload train` with which a model is built, and its loss computed."""


def add_to(commands: Any) -> None:
    """Declare the commands."""
    _add_check(commands)
    _add_adapt(commands)
    evaluate = add_command(
        commands, "evaluate", (_evaluate, "evaluate"), "measure a run's model on held-out data",
        "Computes the model's log loss, AUC and normalised entropy, or RMSE and MAE if the label is a number, on the evaluation steps of a schedule.",
        or_checkpoint=True,
    )  # fmt: skip
    evaluate.add_argument(
        "schedule",
        nargs="?",
        metavar="SCHEDULE",
        type=a_path("SCHEDULE"),
        help="schedule to evaluate on, instead of the run's own",
    )
    _add_best(evaluate)
    add_accept_model(evaluate)
    _add_predict(commands)
    lookup = add_command(
        commands, "lookup", (_lookup, "lookup"), "print rows of a run's model by raw value",
        "Encodes each value as the schedule says and prints its embedding: value, id, whether the row was trained (if not, it has its initial "
        "weights), and the vector.", or_checkpoint=True,
    )  # fmt: skip
    lookup.add_argument(
        "table",
        metavar="TABLE",
        help="name of the table in the feature file; if a feature does not share its table, the table has the feature's name",
    )
    lookup.add_argument("values", nargs="+", metavar="VALUE", help="raw values; an empty one is a missing value")
    lookup.add_argument("--ids", action="store_true", help="the values are ids")
    _add_best(lookup)
    add_schedule(lookup)
    _add_export(commands)
    _add_apply(commands)
    add_command(
        commands, "digest", (_digest, "digest"), "print a fingerprint of a run's model",
        "Prints the SHA-256 of every bit of the model of a run, or of a checkpoint: equal digests mean equal models (docs/definitions.md).",
        or_checkpoint=True,
    )  # fmt: skip


def _add_check(commands: Any) -> None:
    check = add_plain(
        commands, "check-model", (_check_model, "check_model"), "try a model of your own on synthetic samples",
        "Builds a model for a feature file and runs it forward and backward on synthetic samples. Needs no data, store or run. With --loss, also "
        "tries a loss of your own. Prints what is wrong in one line, or a summary of the model if nothing is.",
    )  # fmt: skip
    check.add_argument(
        "model", metavar="MODEL", help="file.py:Class or package.module:Class, as `foreload train --model` takes it"
    )
    check.add_argument(
        "--features",
        required=True,
        metavar="FILE.toml",
        type=a_path("--features"),
        help="the feature file of the data",
    )
    add_arguments(check, TrainJob, _OF_MODELS)
    add_json(check, "result")


def _add_adapt(commands: Any) -> None:
    adapt = add_plain(
        commands, "adapt", (_adapt, "adapt"), "write the skeleton of a model for a module that wrap refuses",
        "Writes a model by the contract of docs/models.md for a PyTorch module: its tables are features, its other layers stay, and forward is to be "
        "completed. Beside it, its feature file. Both pass `foreload check-model` at once.",
    )  # fmt: skip
    adapt.add_argument(
        "model",
        metavar="MODEL",
        help="file.py:Class or package.module:Class of the module, or a function that builds it; without arguments",
    )
    adapt.add_argument(
        "--out", required=True, metavar="FILE.py", type=a_path("--out"), help="file to write, beside the module's; FILE.toml too"
    )
    adapt.add_argument("--overwrite", action="store_true", help="replace existing files")
    add_arguments(adapt, TrainJob, ("model_folder",))
    add_json(adapt, "result")


def _add_export(commands: Any) -> None:
    export = add_command(
        commands, "export", (_export, "export"), "write a run's model to files",
        "Writes every trained row as Parquet, one file per table with the columns id, weight and state, and value if the table has a vocabulary, and "
        "the dense part as safetensors. encoding.json says how values become ids. With --since, writes an increment for `foreload apply`: only the "
        "rows that changed since.", or_checkpoint=True,
    )  # fmt: skip
    export.add_argument(
        "--since",
        metavar="STEP|CHECKPOINT|EXPORT",
        help="write an increment, based on the model after this step, or on that of this checkpoint or export",
    )
    _add_best(export)
    _add_torch(export)
    add_schedule(export)
    add_accept_model(export)
    export.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")


def _add_torch(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "--format", choices=("parquet", "torch"), default="parquet",
        help="torch: a model for serving, with a model.py that loads it and takes raw records; it needs neither foreload nor the model's class",
    )  # fmt: skip
    export.add_argument("--onnx", action="store_true", help="with torch: also write the dense part as dense.onnx")
    export.add_argument(
        "--dense", choices=("program", "weights"), default="program",
        help="with torch: the dense part as a program that torch.export traces (default), or only its parameters, to load into the model's class",
    )  # fmt: skip
    export.add_argument(
        "--most-rows",
        type=int,
        metavar="N",
        help="with torch: keep tables with more rows than this as Parquet, or at --rows-at (default: no limit)",
    )
    export.add_argument(
        "--rows-at", metavar="URL", help="with torch: the Redis server to which `foreload apply` writes these tables, under --key"
    )
    export.add_argument("--key", metavar="TEMPLATE", help="with --rows-at: the pattern of the keys there, as in `foreload apply`")


def _add_apply(commands: Any) -> None:
    apply = add_plain(
        commands, "apply", (_apply, "apply"), "write an export to the folder or server that serves it",
        "Writes a full export to a folder or a Redis server that has none yet, or an increment to the place that has the model on which it is based. "
        "Refuses an increment that is out of order, already applied, or after a gap, and changes nothing then. Readers see either the old model or "
        "the new one.",
    )  # fmt: skip
    apply.add_argument("export", metavar="EXPORT", type=a_path("EXPORT"), help="a folder that `foreload export` wrote")
    apply.add_argument(
        "--to",
        required=True,
        metavar="DIR|URL",
        help="the folder, or the Redis server, as redis://..., rediss://... or unix://...",
    )
    apply.add_argument(
        "--key", metavar="TEMPLATE",
        help="pattern of the keys: with {table} and {id}, such as emb:{table}:{id}, a string for each row; with {table} alone, a hash for each table",
    )  # fmt: skip
    apply.add_argument(
        "--keep", type=int, default=0, metavar="N", help="how many older versions stay readable beside the new one (default: 0)"
    )
    add_json(apply, "result")


def _add_predict(commands: Any) -> None:
    predict = add_command(
        commands, "predict", (_predict, "predict"), "predict raw records with a run's model",
        "Writes the predicted probability of each record, in order, or the predicted number if the label is a number. Records are read and encoded "
        "like those that the run was trained on; they need no labels. Values never seen in training are treated as in evaluation. Malformed records "
        "are skipped, up to the schedule's --max-rejects.",
        or_checkpoint=True,
    )  # fmt: skip
    predict.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        type=a_path("FILE"),
        help="files or quoted globs, read in the order given; may be .gz or .zst",
    )
    predict.add_argument(
        "--out",
        required=True,
        metavar="SCORES",
        help="file to write, .csv or .parquet, with a column score, or, with several labels, a column for each, named after it",
    )
    predict.add_argument(
        "--format", metavar="NAME", help="criteo, csv, tsv or parquet (default: as the files' names or the schedule say)"
    )
    predict.add_argument(
        "--steps-of", metavar="SCHEDULE", type=a_path("--steps-of"),
        help="schedule whose evaluation samples these records are, in order; the logits are then those of `foreload evaluate`, bit for bit",
    )  # fmt: skip
    predict.add_argument(
        "--logits", action="store_true", help="write logits instead of probabilities; the column score is then called logit"
    )
    _add_best(predict)
    add_schedule(predict)
    add_accept_model(predict)


def _add_best(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--best", action="store_true", help="for a run: use its checkpoint with the best evaluation (`train --keep-best`) instead"
    )
    command.add_argument(
        "--last",
        action="store_true",
        help="for a run that ended with --stop-early and --keep-best: use the model of its end, instead of the best",
    )


def _chosen(parsed: argparse.Namespace) -> str:
    from foreload.trainer.commands.chosen_model import chosen_model

    return chosen_model(parsed.run, parsed.best, parsed.last)


def _check_model(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import check_model

    words, known = given(parsed, TrainJob), settings_of(TrainJob)
    folder, dim, options, seed, loss, drop_weights = (
        known[name].parse(known[name].flag, words[name]) if name in words else known[name].default for name in _OF_MODELS
    )
    about = check_model.run(parsed.model, folder, parsed.features, dim, options, seed, loss, drop_weights)
    return print_result(parsed, about, about.text())


def _adapt(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import adapt

    folder = given(parsed, TrainJob).get("model_folder", "")
    about = adapt.run(parsed.model, str(folder), str(parsed.out), parsed.overwrite)
    return print_result(parsed, about, about.text())


def _evaluate(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import evaluate

    metrics = evaluate.run(_chosen(parsed), parsed.store, parsed.schedule, parsed.accept_model)
    lines = []
    for name, of_set in metrics.get("sets", {"": metrics}).items():
        lines += [f"{name}: {line}" if name else line for line in metric_lines(of_set, "   ")]
        lines[-1] += f"   ({of_set['samples']:,} samples, {after_step(metrics['step'])})"
    return print_result(parsed, metrics, "\n".join(lines))


def _predict(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import predict

    predict.check_out(parsed.out)
    records = predict.Records(tuple(parsed.sources), parsed.format, parsed.steps_of)
    with predict.run(_chosen(parsed), parsed.store, records, parsed.schedule, parsed.logits, parsed.accept_model) as predictions:
        written = predict.write(parsed.out, predictions)
    return print_result(parsed, written, f"{parsed.out}: {written.records:,} {'logits' if parsed.logits else 'scores'}")


def _lookup(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import lookup

    values, ids = (None, parsed.values) if parsed.ids else (parsed.values, None)
    found = lookup.run(_chosen(parsed), parsed.store, parsed.table, values, ids, parsed.schedule)
    return print_result(parsed, found.as_json(parsed.table, parsed.values), found.text(parsed.values))


def _export(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import export

    path = _chosen(parsed)
    if parsed.format == "torch":
        return _export_torch(parsed, path)
    for_torch = ("onnx", "rows_at", "key", "most_rows")
    if parsed.dense != "program" or any(getattr(parsed, name) not in (None, False) for name in for_torch):
        raise SettingError(
            "--format: must be torch with --onnx, --dense, --most-rows, --rows-at and --key; got parquet; add --format torch"
        )
    about = export.run(path, parsed.store, parsed.out, parsed.since, parsed.schedule, parsed.accept_model)
    rows = sum(table["rows"] for table in about["tables"])
    if "since" in about:
        whole = sum(table["whole_rows"] for table in about["tables"])
        counted = f"{rows:,} of {whole:,} rows, those changed {after_step(about['since']['step'])},"
    else:
        counted = f"{rows:,} rows"
    text = f"{parsed.out}: {counted} of {len(about['tables'])} tables, and the dense part, {after_step(about['step'])}"
    return print_result(parsed, about, text if about["inexact"] is None else f"{text}\n{inexact_text(about['inexact'])}")


def _export_torch(parsed: argparse.Namespace, path: str) -> int:
    from foreload.trainer.commands import export_torch
    from foreload.trainer.serving.torch_folder import TorchOptions

    if parsed.since is not None:
        raise SettingError("--since: is for --format parquet; --format torch writes the whole model; leave one of them out")
    options = TorchOptions(parsed.dense == "program", parsed.onnx, parsed.most_rows, parsed.rows_at, parsed.key)
    about = export_torch.run(path, parsed.store, parsed.out, options, parsed.schedule, parsed.accept_model)
    rows = sum(table["rows"] for table in about["tables"])
    text = (
        f"{parsed.out}: {rows:,} rows of {len(about['tables'])} tables, and the dense part, {after_step(about['step'])}; "
        f"from model import load; load({parsed.out!r}).predict(records)"
    )
    return print_result(parsed, about, text if about["inexact"] is None else f"{text}\n{inexact_text(about['inexact'])}")


def _apply(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import apply

    applied = apply.run(parsed.export, parsed.to, parsed.key, parsed.keep)
    return print_result(parsed, applied, applied.text())


def _digest(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import digest

    answer = digest.run(parsed.run, parsed.store)
    return print_result(parsed, answer, answer.text())

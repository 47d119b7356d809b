"""What fails: every error's code and exit status; and of real commands the error, the field that it names first, and which of the words given."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from clicks import Clicks
from command_line import flip, run_here
from golden import pinned, replaced
from test_errors import listed

from foreload.base.errors import ForeloadError, all_errors

PREPARE = "prepare {log} --format csv --features {features} --batch-size 10 --out {new}"
TRAIN = "train {schedule} --run {new} --store local:1 --dim 4"
FAILING = (
    "prepare {log} --format csv --features {features} --batch-size -3 --out {new}",
    "prepare {log} --format csv --features {features} --out {new}",
    "prepare {log} --format xml --batch-size 10 --out {new}",
    "prepare {log} --format csv --batch-size 10 --out {new}",
    "prepare --format synthetic --batch-size 10 --out {new}",
    "prepare {log} --format synthetic --rows 9 --batch-size 10 --out {new}",
    "prepare {home}/none.csv --format csv --features {features} --batch-size 10 --out {new}",
    "prepare {log} --format csv --features {home}/none.toml --batch-size 10 --out {new}",
    "prepare {log} --format csv --features {wrong_features} --batch-size 10 --out {new}",
    "prepare {wrong_log} --format csv --features {features} --batch-size 10 --out {new}",
    "prepare {wrong_log} --format csv --features {features} --batch-size 10 --max-rejects 1 --out {new}",
    "prepare --after {home} --epochs 1 --out {new}",
    "prepare --after {schedule} --epochs 1 --shuffle-seed 3 --out {new}",
    f"{PREPARE} --slots 3",
    f"{PREPARE} --slots 7x",
    f"{PREPARE} --slots 40 --memory 1GiB",
    f"{PREPARE} --lanes 65",
    f"{PREPARE} --eval-fraction 1.5",
    f"{PREPARE} --memory 1KiB",
    f"{PREPARE} --window 9 --slots all",
    f"{PREPARE} --json {{home}}/none/told.json",
    f"{PREPARE} --job {{home}}/none.toml",
    "train {home}/none --run {new} --store local:1",
    "train {schedule} --run {new}",
    "train {schedule} --run s3://bucket/run --store local:1",
    "train {damaged} --run {new} --store local:1 --dim 4",
    "train {unfinished} --run {new} --store local:1 --dim 4",
    f"{TRAIN} --resume",
    f"{TRAIN} --trainers -5",
    f"{TRAIN} --trainers 33",
    f"{TRAIN} --parity 2+1",
    f"{TRAIN} --parity 2-1",
    f"{TRAIN} --lr -1",
    f"{TRAIN} --row-optimizer nadam",
    f"{TRAIN} --row-options beta1=x",
    f"{TRAIN} --dense-optimizer Nothing",
    f"{TRAIN} --model none",
    f"{TRAIN} --model {{home}}/none.py:Model",
    f"{TRAIN} --model-options middle=8-1",
    f"{TRAIN} --model-options top=8-4",
    f"{TRAIN} --lr-schedule warmup:x",
    f"{TRAIN} --stop-early auc",
    f"{TRAIN} --keep-best beauty",
    f"{TRAIN} --checkpoint-every -5",
    f"{TRAIN} --from {{home}}/none",
    f"{TRAIN} --unknown",
    "train {schedule} --run {home} --store local:1 --dim 4",
    "status {home}/none",
    "digest {home}",
    "evaluate {home}/none {schedule}",
    "lookup {home}/none user u1",
    "export {home}/none --out {new}",
    "export {home}/none --out {new} --onnx",
    "apply {home}/none --to {new}",
    "checkpoint verify {home}/none",
    "checkpoint save {home}/none --bits 55",
    "checkpoint list {home}/none",
    "checkpoint list s3://",
    "report {schedule} {schedule}",
    "report {home}/none",
    "plan {schedule} --pool cpus=3",
    "plan {schedule} --deadline soon",
    "history --history {log}",
    "scale {home}/none 2",
    "stores list redis://127.0.0.1:1",
    "check-model {home}/none.py:Model --features {features}",
    "adapt {home}/none.py:Model --out {home}/adapted.py",
    "join 127.0.0.1",
    "drill lost-shard {schedule} --run {new} --store local:1 --dim 4",
    "report {schedule} --out {home}/none/page.html",
    "nothing",
)


def test_codes_and_exit_statuses_of_all_errors() -> None:
    assert listed()
    kinds = {kind.code: [kind.exit_status, kind.permanent, kind.__bases__[0].__dict__.get("code", "")] for kind in all_errors()}
    pinned("errors.json", dict(sorted(kinds.items())))


@pytest.fixture(scope="module")
def places(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders by the names that stand for them in FAILING."""
    home = tmp_path_factory.mktemp("failing")
    known = {"log": clicks.log, "features": clicks.features, "schedule": clicks.schedule, "home": home, "new": home / "new"}
    made = {name: home / name for name in ("damaged", "unfinished", "wrong_features", "wrong_log")}
    for name in ("damaged", "unfinished"):
        clicks.copy(made[name])
    (made["unfinished"] / "schedule.json").unlink()
    flip(made["damaged"] / "header.json", 40)
    made["wrong_features"].write_text(clicks.features.read_text().replace('"id"', '"ids"'), encoding="utf-8")
    made["wrong_log"].write_text(clicks.log.read_text().replace("\n0,", "\n2,", 2), encoding="utf-8")
    return known | made


def outcome(command: str, places: dict[str, Path], codes: list[str]) -> dict[str, Any]:
    """Exit status, code, the flag named first and the values named of a command that fails; the texts of its error may change."""
    codes.clear()
    status, _, err = run_here(*(word.format(**places) for word in command.split()))
    shutil.rmtree(places["new"], ignore_errors=True)
    wrong = replaced(err, {str(path): f"{{{name}}}" for name, path in places.items()})
    (line,) = [line.removeprefix("foreload: error: ") for line in wrong.splitlines() if line.startswith("foreload: error: ")] or [
        ""
    ]
    flag = re.match(r"--[a-z-]+|[A-Z]+(?=[: ])", line)
    values = [word for word in command.split()[1:] if len(word) > 1 and not word.startswith("--")]
    named = [word for word in values if re.search(rf"(?<![\w{{]){re.escape(word)}(?!\w)", line)]
    return {"status": status, "code": codes[-1] if codes else None, "flag": flag and flag[0], "named": named}


def test_failing_commands(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[str] = []
    written = print

    def note(*arguments: Any, **how: Any) -> None:
        error = sys.exc_info()[1]
        codes.extend([error.code] if isinstance(error, ForeloadError) else [])
        written(*arguments, **how)

    monkeypatch.setattr("builtins.print", note)
    pinned("failing.json", {command: outcome(command, places, codes) for command in FAILING})

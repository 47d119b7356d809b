"""What a run leaves, and what commands tell programs of it: keys, types and order, and of values those that neither time nor arithmetic decides.

A trained model has the same floats only under one numerics fingerprint (docs/definitions.md), so neither these are compared nor what is made of them,
such as digests and checksums.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from clicks import write_features
from command_line import done
from golden import files_of, masked, pinned, shape
from inputs import MODEL, RUN_SCHEDULE, write_clicks
from test_help import commands

from foreload.cache.client.local import LocalStores
from foreload.trainer import cli

THEIRS = """
from torch import nn


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.ad = nn.Embedding(9, 4), nn.Embedding(5, 4)
"""

STORY = {
    "prepare": f"prepare log.csv {RUN_SCHEDULE} --out clicks",
    "train": "train clicks --run first --store local:3 --store-timeout 60 --model mine.py:Mine --dim 4 --dense-ema 0.9 --digest",
    "status": "status first",
    "stores-status": "stores status first",
    "digest": "digest first",
    "evaluate": "evaluate first",
    "lookup": "lookup first user u1 nobody",
    "predict": "predict first new.csv --out scores.csv",
    "export": "export first --out parquet",
    "export-torch": "export first --format torch --dense weights --out torch",
    "checkpoint-save": "checkpoint save first --to saved",
    "checkpoint-save-8": "checkpoint save first --to eight --bits 8",
    "checkpoint-save-4": "checkpoint save first --to four --bits 4",
    "prepare-more": "prepare --after clicks --epochs 1 --out more",
    "train-resumed": "train more --run first --resume",
    "checkpoint-save-increment": "checkpoint save first --to saved --policy consecutive",
    "export-increment": "export first --since parquet --out since",
    "apply": "apply parquet --to served",
    "apply-increment": "apply since --to served --keep 1",
    "checkpoint-list": "checkpoint list saved",
    "checkpoint-verify": "checkpoint verify saved/step-107",
    "checkpoint-compact": "checkpoint compact saved/step-107 --to whole",
    "checkpoint-restore": "checkpoint restore saved/step-107 --run again --store local:2 --parity off",
    "scrub": "scrub first",
    "stores-add": "stores add first local",
    "stores-move": "stores move first 3 local",
    "stores-remove": "stores remove first 4",
    "history": "history",
    "check-model": "check-model mine.py:Mine --features features.toml --dim 4 --model-options width=3",
    "adapt": "adapt theirs.py:Theirs --out adapted.py",
    "checkpoint-delete": "checkpoint delete whole/step-107",
    "delete": "delete again",
    "checkpoint-restore-apart": "checkpoint restore saved/step-107 --run apart --store {servers} --parity off",
    "stores-list": "stores list {servers}",
    "stores-delete": "stores delete {servers} apart",
}
"""What is called, one after the other, each with --json; by the names of what it tells."""
SLOW = {
    "drill-lost-shard": "drill lost-shard clicks --run d1 --store local:3 --trainers 1 --model mine.py:Mine --dim 4 --at 40",
    "drill-lost-trainer": "drill lost-trainer clicks --run d2 --store local:1 --trainers 2 --model mine.py:Mine --dim 4 --at 40",
    "plan": "plan clicks --model mine.py:Mine --dim 4 --pool cores=1,stores=1",
}
"""Those of which only the form is compared: what they tell is times. They have a schedule of their own."""
TIMED = """
seconds seconds_compute seconds_exchange seconds_waiting seconds_waited samples_per_second wait_fraction time finished ms ms_step ms_compute
ms_exchange ms_waiting ms_processor ms_thread store_traffic store_shards batches
"""
ARITHMETIC = "loss log_loss auc normalized_entropy predicted_over_observed calibration digest vector bytes total_bytes"
MACHINE = "fingerprint versions beam trainers_peak_bytes saved_bytes memory_bytes overhead_bytes_a_row profiles"
VARYING = {*TIMED.split(), *ARITHMETIC.split(), *MACHINE.split()}
"""Keys whose values are not compared, only their types. bytes: of files that are compressed, among others."""
UNSIZED = r".*\.(parquet|py|md|log|rdb|html)|lock|.*tfevents.*"
UNHASHED = r".*\.(safetensors|arrow)"


def begun(home: Path) -> Path:
    """A folder with what the commands are given."""
    write_clicks(home / "log.csv", 400)
    write_clicks(home / "new.csv", 50, 400)
    write_features(home / "features.toml")
    (home / "mine.py").write_text(MODEL, encoding="utf-8")
    (home / "theirs.py").write_text(THEIRS, encoding="utf-8")
    (home / "told").mkdir()
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, three: LocalStores) -> Path:
    """The folder in which all of STORY was called; told/NAME.json: what each told."""
    home = begun(tmp_path_factory.mktemp("golden"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        for name, command in STORY.items():
            done(*command.format(servers=",".join(three.urls)).split(), "--json", f"told/{name}.json")
    return home


def shown(value: Any, home: Path) -> Any:
    """JSON of a run as it is on every machine: without what varies, its folder and its number, its servers' places, and checksums."""
    # A shard that answers late, as on a busy machine, is called slow or hot.
    calm = json.loads(re.sub(r'"(slow|hot)": [^,}\s]+', r'"\1": null', json.dumps(value)))
    text = json.dumps(masked(calm, VARYING)).replace(str(home), "HOME")
    for pattern, name in (
        (r"redis://[^,\"' ]*?:\d+|unix://[^,\"' ]*\.sock", "SERVER"),
        (r'(?<="run": ")[0-9a-f]{16}(?=")|(?<="run_id": ")[0-9a-f]{16}(?=")', "RUN_ID"),
        (r"\b[0-9a-f]{64}\b", "(checksum)"),
        (r"tfevents\.[^\"/]*", "tfevents"),
    ):
        text = re.sub(pattern, name, text)
    return json.loads(text)


@pytest.mark.parametrize("name", list(STORY))
def test_what_a_command_tells_programs(name: str, home: Path) -> None:
    pinned(f"told-{name}.json", shown(json.loads((home / "told" / f"{name}.json").read_text()), home))


@pytest.mark.parametrize("name", ["first", "saved", "eight", "four", "whole", "parquet", "torch", "since", "served"])
def test_files_that_are_left(name: str, home: Path) -> None:
    pinned(f"files-{name}.json", shown(files_of(home / name, VARYING, unhashed=UNHASHED, unsized=UNSIZED), home))


def test_every_command_that_tells_programs_is_called() -> None:
    """But the drill of scaling, which needs more steps than fit here, and what needs a Ray cluster: test_drill.py and test_pool.py call these."""
    telling = [command.prog.split()[1:] for command in commands(cli.parser()) if "--json" in command._option_string_actions]
    called = [command.split() for command in (*STORY.values(), *SLOW.values())]
    silent = [words for words in telling if not any(command[: len(words)] == words for command in called)]
    assert silent == [["drill", "scale"], ["pool", "status"]]


@pytest.mark.full
@pytest.mark.parametrize("name", list(SLOW))
def test_the_form_of_what_a_slow_command_tells(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    done(*STORY["prepare"].split())
    done(*SLOW[name].split(), "--json", "told.json")
    pinned(f"told-{name}.json", shape(json.loads((tmp_path / "told.json").read_text())))

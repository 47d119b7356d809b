"""Log loss and AUC of foreload's DeepFM beside those of DeepCTR-Torch's, on the same splits of public click logs, with time and memory.

    python benchmarks/peers_accuracy.py --data ml-100k|talkingdata [--seeds N] [--trials N] [--out FILE.jsonl] [--report-only]

The data is split by time: 80 % to train on, 10 % to choose epochs and settings by, 10 % to report. ml-100k comes with RecBole's wheel
(peers_environment.py); talkingdata is the sample of 100,000 clicks in the folder FORELOAD_DATA. Three comparisons, each over N seeds, which give
the initial values and the order of the samples: `equal`: the same settings; `default`: each one's own; `best`: the best of N trials of Optuna on the
validation split, over equal ranges (Foreload's have the rates of rows and of the dense part apart). The lazy Adam of rows is also shown beside the
dense one under other learning rates (`rate`).

A line of FILE is a training; those that are there are not done again, so a call that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from comparison import tell
from peers_environment import PEERS

HERE = Path(__file__).resolve().parent
ML_100K = "lib/python{}.{}/site-packages/recbole/dataset_example/ml-100k"
SHARES = (0.8, 0.9)  # where the validation and the test split begin
BATCH, EPOCHS, PATIENCE = 256, 10, 2
SEARCHED = 1000  # the seed of the trials of a search
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # Student's t, two-sided, by the number of seeds
SPLITS = ("train", "val", "test")
EQUAL: Mapping[str, Any] = {"dim": 8, "deep": "128-64", "dropout": 0.0, "l2": 0.0, "lr": 1e-3}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # Those of DeepCTR-Torch 0.3, and of `foreload train --model deepfm`.
    "deepctr": {"dim": 4, "deep": "256-128", "dropout": 0.0, "l2": 1e-5, "lr": 1e-3},
    "foreload": {},
}


@dataclass(frozen=True, slots=True)
class Trained:
    """A line of the file.

    epoch: the one of the best log loss of the validation split, whose scores these are; seconds, bytes: of all processes of the training, from start
    to end, Foreload's `prepare` included.
    """

    data: str
    who: str
    what: str
    seed: int
    settings: Mapping[str, Any]
    epoch: int
    val: Mapping[str, float]
    test: Mapping[str, float]
    seconds: float
    bytes: int

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """Which one it is."""
        return self.data, self.who, self.what, self.seed, json.dumps(self.settings, sort_keys=True)


def movielens(python: Path) -> pa.Table:
    """MovieLens' 100,000 ratings, in order of time: liked from four stars on, with what is known of user and movie."""
    version = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    folder = python.parent.parent / ML_100K.format(*version.stdout.split())

    def read(name: str, columns: Sequence[str]) -> pa.Table:
        text = csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), include_columns=list(columns))
        return csv.read_csv(folder / f"ml-100k.{name}", parse_options=csv.ParseOptions(delimiter="\t"), convert_options=text)

    rated = read("inter", ["user_id:token", "item_id:token", "rating:float", "timestamp:float"])
    users = read("user", ["user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"])
    items = read("item", ["item_id:token", "release_year:token"])
    joined = rated.join(users, "user_id:token").join(items, "item_id:token")
    joined = joined.append_column("at", pc.cast(joined["timestamp:float"], pa.float64()))
    joined = joined.sort_by([(name, "ascending") for name in ("at", "user_id:token", "item_id:token")])
    liked = pc.cast(pc.greater_equal(pc.cast(joined["rating:float"], pa.float64()), 4), pa.int8())
    features = [name for name in joined.column_names if name.endswith(":token")]
    return pa.table({"label": liked} | {name.partition(":")[0]: joined[name] for name in features})


def talkingdata() -> pa.Table:
    """TalkingData's sample of 100,000 clicks, in order of time: whether the app was downloaded, with the hour of the click."""
    path = Path(os.environ["FORELOAD_DATA"]) / "talkingdata" / "train_sample.csv"
    names = ["ip", "app", "device", "os", "channel", "click_time"]
    # Two dots stand before the header of some copies.
    raw = path.read_bytes().removeprefix(b"..")
    types = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    table = csv.read_csv(pa.BufferReader(raw), convert_options=types).sort_by("click_time")
    hour = pc.utf8_slice_codeunits(table["click_time"], 11, 13)
    return pa.table({"label": table["is_attributed"]} | {name: table[name] for name in names[:-1]} | {"hour": hour})


def write_splits(table: pa.Table, folder: Path) -> None:
    """train.csv, val.csv and test.csv, and the feature file of all columns."""
    ends = [0, *(int(share * table.num_rows) for share in SHARES), table.num_rows]
    for name, begin, end in zip(SPLITS, ends[:-1], ends[1:], strict=True):
        csv.write_csv(table.slice(begin, end - begin), folder / f"{name}.csv", csv.WriteOptions(quoting_style="needed"))
    features = "".join(f'[[feature]]\nname = "{name}"\nencoding = "vocabulary"\n' for name in table.column_names[1:])
    (folder / "features.toml").write_text(f'label = "label"\n{features}', encoding="utf-8")


@contextlib.contextmanager
def peak_of(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """The most bytes that a process and its descendants hold at once, each shared page counted once, as the one element of the list."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            with contextlib.suppress(psutil.Error):
                tree = psutil.Process(process.pid)
                held = 0
                for one in (tree, *tree.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        held += one.memory_full_info().pss
                peak[0] = max(peak[0], held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def run(*commands: Sequence[object]) -> tuple[float, int]:
    """Run commands one after the other; the seconds that they took together, and the most bytes that they held."""
    began, most = time.monotonic(), 0
    for command in commands:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        with peak_of(process) as peak:
            _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{command}: status {process.returncode}: {errors.decode(errors='replace')[-2000:]}")
        most = max(most, peak[0])
    return time.monotonic() - began, most


def of_deepctr(folder: Path, python: Path, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train DeepCTR-Torch's DeepFM."""
    out = folder / "scores.json"
    spec = {
        "folder": str(folder),
        "settings": settings,
        "seed": seed,
        "batch": BATCH,
        "epochs": EPOCHS,
        "patience": PATIENCE,
        "out": str(out),
    }
    seconds, held = run([python, HERE / "deepctr_contender.py", json.dumps(spec)])
    return json.loads(out.read_text(encoding="utf-8")) | {"seconds": seconds, "bytes": held}


def flags(settings: Mapping[str, Any]) -> list[str]:
    """The settings as `foreload train` takes them. L2 is that of the mean loss, DeepCTR-Torch's that of the batch's sum."""
    if not settings:
        return []
    adam = {"row-optimizer": "adam", "dense-optimizer": "Adam", "row-initial": "normal:0.0001"}
    words = adam | {
        "dim": settings["dim"],
        "lr": settings.get("row_lr", settings["lr"]),
        "dense-lr": settings["lr"],
        "row-l2": 2 * settings["l2"] / BATCH,
    }
    options = [f"deep={settings['deep']}", f"dropout={settings['dropout']}"]
    return ["--model-options", *options, *(str(word) for name, value in words.items() for word in (f"--{name}", value))]


def of_foreload(folder: Path, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Prepare and train Foreload's DeepFM."""
    schedule, trained = folder / "schedule", folder / "run"
    sets = [word for name in SPLITS[1:] for word in ("--eval-source", f"{name}={folder / name}.csv")]
    foreload = [sys.executable, "-m", "foreload"]
    shape = ["--batch-size", BATCH, "--epochs", EPOCHS, "--shuffle-seed", seed, "--out", schedule, "--overwrite"]
    prepare = [*foreload, "prepare", folder / "train.csv", "--features", folder / "features.toml", *sets, *shape]
    where = [
        "--run",
        trained,
        "--overwrite",
        "--store",
        "local:1",
        "--model",
        "deepfm",
        "--seed",
        seed,
        "--no-report",
        "--history",
        "off",
    ]
    train = [*foreload, "train", schedule, *where, "--stop-early", f"val/log_loss:{PATIENCE}", *flags(settings)]
    seconds, held = run(prepare, train)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {(line["epoch"] + 1, line["set"]): line for line in lines if line["kind"] == "evaluation"}
    epoch = min((epoch for epoch, name in measured if name == "val"), key=lambda one: measured[one, "val"]["log_loss"])
    scored = {name: {metric: measured[epoch, name][metric] for metric in ("log_loss", "auc")} for name in SPLITS[1:]}
    run([*foreload, "delete", trained])
    return {"epoch": epoch, **scored, "seconds": seconds, "bytes": held}


class Lines:
    """The trainings that the file holds, and those that are done now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.all = [Trained(**json.loads(line)) for line in text.splitlines()]

    def get(
        self, data: str, who: str, what: str, seed: int, settings: Mapping[str, Any], do: Callable[[], dict[str, Any]]
    ) -> Trained:
        """A training, done if the file does not have it."""
        wanted = (data, who, what, seed, json.dumps(settings, sort_keys=True))
        known = next((line for line in self.all if line.key == wanted), None)
        if known is not None:
            return known
        trained = Trained(data, who, what, seed, settings, **do())
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trained)) + "\n")
        self.all.append(trained)
        tell(
            f"{data} {who} {what} {seed}: test log loss {trained.test['log_loss']:.5f}, AUC {trained.test['auc']:.4f}, {trained.seconds:.0f} s"
        )
        return trained


def suggested(trial: optuna.Trial, who: str) -> dict[str, Any]:
    """What a trial of a search tries."""
    settings = {
        "dim": trial.suggest_categorical("dim", [4, 8, 16]),
        "deep": trial.suggest_categorical("deep", ["64-32", "128-64", "256-128"]),
        "dropout": trial.suggest_categorical("dropout", [0.0, 0.2, 0.5]),
        "l2": trial.suggest_float("l2", 1e-6, 1.0, log=True),
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
    }
    return settings | ({"row_lr": trial.suggest_float("row_lr", 1e-4, 1e-1, log=True)} if who == "foreload" else {})


def measure(data: str, seeds: int, trials: int, lines: Lines) -> None:
    """Do all trainings that the file lacks."""
    python = PEERS.make()
    table = movielens(python) if data == "ml-100k" else talkingdata()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        write_splits(table, folder)
        trainers: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
            "deepctr": lambda settings, seed: of_deepctr(folder, python, settings, seed),
            "foreload": lambda settings, seed: of_foreload(folder, settings, seed),
        }

        def training(who: str, what: str, seed: int, settings: Mapping[str, Any]) -> Trained:
            return lines.get(data, who, what, seed, settings, lambda: trainers[who](settings, seed))

        for seed in range(seeds):
            for who in trainers:
                training(who, "equal", seed, EQUAL)
                training(who, "default", seed, DEFAULTS[who])
            for rate in RATES:
                training("foreload", "rate", seed, {**EQUAL, "row_lr": rate})
        for who in trainers:
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
            of_trials: list[Trained] = []
            for _ in range(trials):
                trial = study.ask()
                of_trials.append(training(who, "search", SEARCHED, suggested(trial, who)))
                study.tell(trial, of_trials[-1].val["log_loss"])
            best = min(of_trials, key=lambda one: one.val["log_loss"])
            for seed in range(seeds):
                training(who, "best", seed, best.settings)
    finally:
        shutil.rmtree(folder)


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, and half the width of its 95 % interval."""
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} +- {half:.{digits}f}"


def report(data: str, lines: Lines) -> None:
    """Print a table of what the file holds."""
    print(f"{'what':<10}{'who':<10}{'settings':<60}{'log loss':>20}{'AUC':>18}{'epoch':>7}{'s':>6}{'MiB':>6}")
    groups: dict[tuple[str, str, str], list[Trained]] = {}
    for line in lines.all:
        if line.data == data and line.what != "search":
            groups.setdefault((line.what, line.who, json.dumps(line.settings)), []).append(line)
    for (what, who, settings), of_seeds in sorted(groups.items()):
        losses, areas = ([line.test[metric] for line in of_seeds] for metric in ("log_loss", "auc"))
        if len(of_seeds) not in T_95:
            continue
        figures = f"{interval(losses, 5):>20}{interval(areas, 4):>18}{np.mean([line.epoch for line in of_seeds]):>7.1f}"
        costs = f"{np.median([line.seconds for line in of_seeds]):>6.0f}{max(line.bytes for line in of_seeds) / 2**20:>6.0f}"
        print(f"{what:<10}{who:<10}{settings:<60}{figures}{costs}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["ml-100k", "talkingdata"], required=True)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("peers-accuracy.jsonl"))
    parser.add_argument("--report-only", action="store_true")
    given = parser.parse_args()
    lines = Lines(given.out)
    if not given.report_only:
        measure(given.data, given.seeds, given.trials, lines)
    report(given.data, lines)


if __name__ == "__main__":
    main()

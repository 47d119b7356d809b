"""A search for the best settings with Optuna: all trials train from one compiled schedule, and those that evaluate badly are pruned as they train.

    foreload prepare clicks.csv --features clicks.toml --eval-fraction 0.1 --eval-every 100 --epochs 3 --out clicks
    python examples/search.py clicks [--trials 20] [--out search]

A search that was stopped goes on when it is repeated. Only the run of the best trial stays.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

import foreload

METRIC = "log_loss"


def settings_of(trial: Trial) -> dict[str, Any]:
    """The settings that a trial tries, as `foreload train` has them."""
    return {
        "model": trial.suggest_categorical("model", ["dlrm", "dcn", "deepfm"]),
        "dim": trial.suggest_categorical("dim", [8, 16, 32]),
        "lr": trial.suggest_float("lr", 0.005, 0.5, log=True),
        "dense_lr": trial.suggest_float("dense_lr", 0.001, 0.1, log=True),
        "row_l2": trial.suggest_float("row_l2", 1e-7, 1e-3, log=True),
        "row_initial": trial.suggest_categorical("row_initial", ["uniform", "normal:0.01", "zeros"]),
    }


def main() -> None:
    """Search, and print the best settings and how long all took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", type=Path, help="a schedule with a label of clicks, and with evaluations within an epoch")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("search"), help="the folder of the search and its runs")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)

    def run_of(trial: Trial | FrozenTrial) -> Path:
        return out / f"trial-{trial.number}"

    def objective(trial: Trial) -> float:
        def hear(metrics: Any) -> None:
            trial.report(metrics.log_loss, metrics.step)
            if trial.should_prune():
                raise optuna.TrialPruned

        # A run that has stop_early and keep_best stands for its best evaluation, and so does its log loss.
        run = foreload.train(
            given.schedule,
            run=run_of(trial),
            store="local:1",
            on_evaluation=hear,
            keep_best=METRIC,
            stop_early=f"{METRIC}:3",
            **settings_of(trial),
        )
        loss = run.log_loss
        if loss is None:
            raise SystemExit(f"{given.schedule}: has no evaluation of a label of clicks; prepare it with --eval-fraction")
        return loss

    def keep_the_best(study: Study, _: FrozenTrial) -> None:
        done = [trial for trial in study.trials if trial.state.is_finished()]
        best = min(
            (trial for trial in done if trial.state is TrialState.COMPLETE), key=lambda one: one.value or 0.0, default=None
        )
        for trial in done:
            if trial is not best and run_of(trial).exists():
                foreload.open_run(run_of(trial)).delete()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=str(given.schedule),
        storage=JournalStorage(JournalFileBackend(str(out / "search.log"))),
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    # One and the same seed would repeat the first suggestions when a search goes on.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    began = time.monotonic()
    # A trial that was killed with its search is tried again under another number.
    for trial in study.trials:
        if not trial.state.is_finished():
            study.tell(trial.number, state=TrialState.FAIL)
    while (count := sum(trial.state is not TrialState.FAIL for trial in study.trials)) < given.trials:
        study.optimize(objective, n_trials=1, callbacks=[keep_the_best])
        trial = study.trials[-1]
        value = f"{trial.value:.5f}" if trial.state is TrialState.COMPLETE else "pruned"
        print(f"trial {trial.number} ({count + 1} of {given.trials}): {value}  {trial.params}", flush=True)
    pruned = sum(trial.state is TrialState.PRUNED for trial in study.trials)
    best = study.best_trial
    print(f"{given.trials} trials, {pruned} pruned; this call took {time.monotonic() - began:.0f} s")
    print(f"best: {METRIC} {best.value:.5f}, AUC {foreload.open_run(run_of(best)).auc:.4f}: {best.params}")
    print(f"its run: {run_of(best)}")


if __name__ == "__main__":
    main()

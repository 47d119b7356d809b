"""`train --auto` on real trainers and servers: what it changes, what it leaves alone, and that the model is the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import Command, error_of, run_here
from delay_proxy import delayed
from held import Hold
from small_job import arguments, summary, synthetic_schedule, train_undisturbed

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.trainer.commands.warm_start import started
from foreload.trainer.run import history
from foreload.trainer.run.event_log import read_events

SLEEPING_MODEL = """
import os, time
from foreload.trainer.models.dlrm import DLRM

class Model(DLRM):
    '''Takes as long as it has samples, whatever the processors do, for as long as the file is there.'''

    def forward(self, dense, embeddings):
        if os.path.exists({slow!r}):
            time.sleep({each} * len(dense))
        return super().forward(dense, embeddings)
"""


def sleeping(folder: Path, each: float) -> tuple[str, str]:
    """The settings of a model that sleeps so many seconds for each sample, as long as the file "slow" is in the folder."""
    (folder / "slow").touch()
    (folder / "sleeping.py").write_text(SLEEPING_MODEL.format(slow=str(folder / "slow"), each=each))
    return "--model", f"{folder / 'sleeping.py'}:Model"


def adjusted(run: Path) -> list[tuple[int, int, bool]]:
    """The changes of a run: trainers and shards after each, and whether it was only advised."""
    return [(one["trainers"], one["shards"], one["dry_run"]) for one in read_events(run) if one["kind"] == "adjusted"]


@pytest.mark.parametrize(
    ("shards", "seed"), [(1, 0), (3, 0), *(pytest.param(1, seed, marks=pytest.mark.full) for seed in range(1, 10))]
)
def test_a_shard_is_added_before_one_is_full(shards: int, seed: int, tmp_path: Path) -> None:
    schedule = synthetic_schedule(tmp_path, 20_000, further=f"--batch-size 32 --seed {seed}")
    undisturbed = summary(train_undisturbed(schedule, tmp_path))["digest"]
    limit = {1: "5500kb", 3: "4700kb"}[shards]
    with LocalStores(shards + 2, tmp_path / "stores", settings={"maxmemory": limit}) as stores:
        urls, run = stores.urls, tmp_path / "run"
        job = arguments(schedule, run, "--store", ",".join(urls[:shards]), "--digest", *sleeping(tmp_path, 0.003))
        status, _, err = run_here(*job, "--auto")
        assert (status, error_of(status, err).split(":")[0][:-1]) == (2, "store shard "), err
        # Each step takes a tenth of a second until the rows have moved.
        trains = Command(*job, "--auto", "--spare", ",".join(urls[shards:]))
        trains.until(lambda: any(event["kind"] == "rows-moved" for event in read_events(run)))
        (tmp_path / "slow").unlink()
        status, _, err = trains.end()
        with Store(urls) as store:
            assert max(int(store.info(shard)["used_memory_peak"]) for shard in range(store.shards)) <= int(limit[:-2]) << 10
    assert status == 0, err
    assert "--auto adds store shards before" in err
    assert summary(run)["digest"] == undisturbed
    first, *_ = (event for event in read_events(run) if event["kind"] == "adjusted")
    assert first["cause"].startswith("a store shard would be full after step ")
    assert (first["trainers"], first["gain_seconds"]) == (1, None)
    assert adjusted(run)[0][1] in (shards + 1, shards + 2)


def test_trainers_are_added_where_computing_takes_longest(tmp_path: Path, hold: Hold) -> None:
    schedule = synthetic_schedule(tmp_path, 100_000, lanes=4)
    undisturbed = summary(train_undisturbed(schedule, tmp_path))["digest"]
    job = arguments(schedule, tmp_path / "run", "--store", "local:1", "--digest", "--auto", "--pool", "cores=2,stores=1")
    held = hold([*job, *sleeping(tmp_path, 0.001)])
    held.train_until(lambda status: len(status.members) == 2)
    _, out, _ = run_here("status", tmp_path / "run")
    assert re.search(
        r"^changed by --auto after step \d+, to 2 trainers, 1 store shard: 2 trainers, 1 store shard would take ",
        out,
        re.MULTILINE,
    )
    (tmp_path / "slow").unlink()
    status, _, err = held.end()
    assert status == 0, err
    change, *_ = (event for event in read_events(tmp_path / "run") if event["kind"] == "adjusted")
    assert (change["trainers"], change["shards"], change["dry_run"], change["undoes"]) == (2, 1, False, False)
    assert change["gain_seconds"] > 0
    assert summary(tmp_path / "run")["digest"] == undisturbed


@pytest.mark.full
def test_a_dry_run_says_what_it_would_change_and_changes_nothing(tmp_path: Path, hold: Hold) -> None:
    schedule = synthetic_schedule(tmp_path, 100_000, lanes=4)
    run = tmp_path / "run"
    job = arguments(schedule, run, "--store", "local:1", "--auto=dry-run", "--pool", "cores=2,stores=1")
    held = hold([*job, *sleeping(tmp_path, 0.001)])
    held.train_until(lambda status: bool(adjusted(run)))
    (tmp_path / "slow").unlink()
    status, _, err = held.end()
    assert status == 0, err
    assert "auto: would go from 1 trainer, 1 store shard to 2 trainers, 1 store shard, which would save about " in err
    assert set(adjusted(run)) == {(2, 1, True)}
    assert summary(run)["trainers"] == 1


def with_halved_times(path: Path, other: Path) -> None:
    """Copy a history, as if every step had taken 40 ms divided by the threads of all trainers, whatever else this machine did."""
    for profile in history.read(path):
        threads = int(profile.settings["trainers"]) * int(profile.settings["threads"])
        steps = {name: np.zeros_like(of) if name.startswith("ms") else of for name, of in profile.steps.items()}
        steps |= {"ms": steps["ms"] + 40 / threads, "ms_thread": steps["ms"] + 38 / threads, "ms_processor": steps["ms"] + 1.0}
        processes = [{**one, "processor_seconds": 0.001} for one in profile.processes]
        history.add(other, replace(profile, steps=steps, processes=processes))


def test_a_job_begins_as_its_like_were_fastest(tmp_path: Path) -> None:
    """Two trainers took half as long as one; nothing but the schedule and the pool is given."""
    schedule = synthetic_schedule(tmp_path, 12_000, lanes=4)
    measured = tmp_path / "measured"
    pool = ("--auto", "--pool", "cores=2,stores=2")

    def job(run: str, history: Path, *further: object) -> list[str]:
        return [str(word) for word in (*arguments(schedule, tmp_path / run), "--history", history, *further)]

    status, _, err = run_here(*job("first", measured, *pool, "--digest"))
    assert status == 0, err
    assert "auto: begins with 1 trainer, local:1: the history has no profile of a job like this one" in err
    status, _, err = run_here(*job("second", measured, "--store", "local:1", "--trainers", "2"))
    assert status == 0, err
    for run, further, begins in (
        ("third", (), "2 trainers"),
        ("fourth", ("--budget", "0.0001"), "1 trainer"),
        ("fifth", ("--trainers", "1"), "1 trainer"),
        # Threads that no profile has are not chosen.
        ("sixth", ("--auto-may", "threads"), "2 trainers"),
    ):
        known = tmp_path / f"history-{run}"
        with_halved_times(measured, known)
        status, _, err = run_here(*job(run, known, *pool, "--digest", *further))
        assert status == 0, err
        assert f"auto: begins with {begins}, local:1: " in err
        assert "as predicted from " in err
        assert summary(tmp_path / run)["digest"] == summary(tmp_path / "first")["digest"]
        began, *_ = read_events(tmp_path / run)
        assert began["trainers"] == int(begins[0])


def test_threads_and_more_lanes_are_chosen_and_advised_only_where_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the history, one trainer of two threads is the fastest."""
    schedule = synthetic_schedule(tmp_path, 12_000, lanes=1, slots=1800)
    measured, known = tmp_path / "measured", tmp_path / "history"
    values = {"schedule": str(schedule), "run": str(tmp_path / "run"), "auto": True, "dim": 4, "pool": "cores=2,stores=1"}
    assert "trainers" not in started({**values, "history": str(known)})
    assert "can keep 1 of 2 cores busy; prepare with --lanes 2 to let --auto use 2 (other" in capsys.readouterr().err
    # No schedule has more lanes than 64.
    started({**values, "history": str(known), "pool": "cores=200,stores=1", "threads": 2})
    assert "can keep 2 of 200 cores busy; prepare with --lanes 64 to let --auto use 128 (other" in capsys.readouterr().err
    for threads in ("1", "2"):
        words = arguments(schedule, tmp_path / threads, "--threads", threads, "--store", "local:1", "--history", str(measured))
        status, _, err = run_here(*map(str, words))
        assert status == 0, err
    with_halved_times(measured, known)
    values |= {"history": str(known), "lr": 0.05, "model_options": {"bottom": "8-4", "top": "8-1"}, "dense_ema": 0.9}
    capsys.readouterr()
    assert "threads" not in started(values)
    assert "auto: begins with 1 trainer, local:1: " in capsys.readouterr().err
    assert started(values | {"auto_may": "threads"})["threads"] == 2
    assert "auto: begins with 1 trainer of 2 threads, local:1: " in capsys.readouterr().err
    assert started(values | {"auto_may": "threads", "pool": "cores=1,stores=1"})["threads"] == 1
    assert started(values | {"auto_may": "threads", "threads": 1})["threads"] == 1


@pytest.mark.parametrize(
    ("given", "store"),
    [
        ({}, "local:1"),
        ({"parity": "2+1"}, "local:3"),
        ({"engine": "ray", "pool": "cores=4"}, "engine:1"),
        ({"engine": "ray", "pool": "cores=4", "parity": "4+2"}, "engine:6"),
        ({"store": "local:2"}, "local:2"),
    ],
)
def test_without_a_store_there_are_as_few_servers_as_parity_needs(tmp_path: Path, given: dict[str, str], store: str) -> None:
    schedule = synthetic_schedule(tmp_path, 1200)
    values = {"schedule": str(schedule), "run": str(tmp_path / "run"), "auto": True, "history": "off", **given}
    assert started(values)["store"] == store
    assert started({**values, "auto": False}) == {**values, "auto": False}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--pool", "cores=2"), "--pool: is for --auto; give that, too, or leave it out"),
        (("--deadline", "2h"), "--deadline: is for --auto; give that, too, or leave it out"),
        (("--auto", "--deadline", "200"), "--deadline: must be a time, such as 90s, 10m or 2h; got 200"),
        (("--auto", "--deadline", "2h", "--budget", "1"), "--deadline and --budget: only one of them can be given"),
        (("--auto", "--pool", "cores=none"), "--pool: must be cores=N, memory=SIZE, stores=N and weight=W, any of them"),
        (("--auto", "--pool", "cores=2,cores=3"), "--pool: must give cores once"),
        (("--auto", "--pool", "weight=2"), "--pool: weight is for jobs that share a cluster"),
        (("--auto", "--pool", "weight=0"), "--pool weight: must be above 0"),
        (("--auto=never",), "--auto: "),
    ],
)
def test_what_auto_is_refused_with(tmp_path: Path, given: tuple[str, ...], said: str) -> None:
    status, _, err = run_here("train", tmp_path / "schedule", "--run", tmp_path / "run", "--store", "local:1", *given)
    assert status == 2
    assert said in error_of(status, err)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("parity", ["2+1", "off"])
def test_a_slow_shard_is_moved_to_a_spare(parity: str, tmp_path: Path, hold: Hold) -> None:
    schedule = synthetic_schedule(tmp_path, 100_000, lanes=2)
    undisturbed = summary(train_undisturbed(schedule, tmp_path))["digest"]
    run = tmp_path / "run"
    with LocalStores(4, tmp_path / "stores") as stores, delayed(stores.urls[1], 0.05) as slow:
        urls = (stores.urls[0], slow, stores.urls[2])
        job = arguments(schedule, run, "--store", ",".join(urls), "--parity", parity, "--digest")
        held = hold([*job, "--auto", "--pool", "cores=1,stores=3", "--spare", stores.urls[3]])
        held.train_until(lambda status: any(event["kind"] == "rows-moved" for event in read_events(run)))
        status, _, err = held.end()
        assert status == 0, err
    change, *_ = (event for event in read_events(run) if event["kind"] == "adjusted")
    assert (change["trainers"], change["shards"], change["shard"]) == (1, 3, 1)
    assert re.fullmatch(r"its answers take \d+\.\d x the median of the others'", change["cause"])
    assert summary(run)["digest"] == undisturbed


@pytest.mark.full  # a trainer is slow for a quarter of a minute
def test_a_slow_trainer_gives_up_lanes_and_is_replaced(tmp_path: Path, hold: Hold) -> None:
    schedule = synthetic_schedule(tmp_path, 3000 * 64, lanes=4, slots=500, further="--batch-size 64")
    undisturbed = summary(train_undisturbed(schedule, tmp_path))["digest"]
    path, name = sleeping(tmp_path, 0.002)
    module = tmp_path / "sleeping.py"
    module.write_text(module.read_text().replace("if os.path", 'if os.environ.get("FORELOAD_TRAINER") == "1" and os.path'))
    run = tmp_path / "run"
    job = arguments(schedule, run, "--store", "local:1", "--trainers", "2", "--digest", path, name)
    held = hold([*job, "--auto", "--pool", "cores=2,stores=1"])
    held.train_until(lambda status: status.members == (0, 2))
    status, _, err = held.end()
    assert status == 0, err
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.index("rebalanced") < kinds.index("adjusted") < kinds.index("trainer-left")
    (change,) = (event for event in read_events(run) if event["kind"] == "adjusted")
    assert (change["trainer"], change["trainers"], change["shard"]) == (1, 2, None)
    assert summary(run)["digest"] == undisturbed

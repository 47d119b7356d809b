"""The settings of a training job: from flags, from a file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreload.base.errors import SettingError
from foreload.base.settings import read_job_file, size_bytes
from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.row_optimizers import RowOptimizer
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Servers

LEAST: dict[str, Any] = {"schedule": "s", "run": "r", "store": "local:1"}


def test_a_job_survives_json() -> None:
    job = TrainJob.of(LEAST | {"lr": 0.5, "model-options": {"top": "8-1"}, "tables": {"C1": {"lr": 0.1}}})
    assert TrainJob.of(json.loads(json.dumps(job.to_dict()))) == job


def test_a_job_file_holds_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[prepare]\nlanes = 4\n[train]\nschedule = "s"\nrun = "r"\nstore = "local:2"\nrow-optimizer = "adagrad"\nlr = 0.1\nmemory = "2GiB"\n'
        '[train.model-options]\nbottom = [64, 32]\n[train.tables.C1]\nrow-optimizer = "sgd"\n[train.tables.C2]\nlr = 1\n'
    )
    job = TrainJob.of(read_job_file(path, "train", TrainJob))
    assert job.model_options == {"bottom": [64, 32]}
    assert job.memory is not None
    assert (job.memory.bytes, job.to_dict()["memory"]) == (2 << 30, "2GiB")
    adagrad = RowOptimizer("adagrad", 0.1)
    criteo = job.row_optimizers(FeatureSpec.criteo())
    assert criteo == [RowOptimizer("sgd", 0.1), RowOptimizer("adagrad", 1.0), *[adagrad] * 24]


def test_a_table_has_the_options_of_all_and_its_own_unless_its_optimizer_is_another() -> None:
    tables = {"C1": {"row-options": {"beta2": "0.9"}}, "C2": {"row-optimizer": "ftrl"}, "C3": {"row-optimizer": "adam", "lr": 1}}
    job = TrainJob.of(LEAST | {"row-optimizer": "adam", "row-options": ["beta1=0.5"], "tables": tables})
    assert TrainJob.of(json.loads(json.dumps(job.to_dict()))) == job
    assert job.row_optimizers(FeatureSpec.criteo())[:4] == [
        RowOptimizer("adam", 0.05, {"beta1": 0.5, "beta2": 0.9}),
        RowOptimizer("ftrl", 0.05),
        RowOptimizer("adam", 1.0, {"beta1": 0.5}),
        RowOptimizer("adam", 0.05, {"beta1": 0.5}),
    ]


def test_how_rows_begin_and_their_penalties_are_of_the_table_then_of_the_feature_file_then_of_all() -> None:
    first, second, third, *others = FeatureSpec.criteo().tables
    tables = (replace(first, initial="zeros"), replace(second, initial="normal:0.2"), third, *others)
    features = replace(FeatureSpec.criteo(), tables=tables)
    own = {"C1": {"row-initial": "xavier", "row-l2": 0}, "C3": {"row-l1": 0.5}}
    job = TrainJob.of(LEAST | {"row-initial": "uniform:0.10", "row-l2": 0.25, "tables": own})
    assert TrainJob.of(json.loads(json.dumps(job.to_dict()))) == job
    assert [str(rule) for rule in job.initial_values(features)[:4]] == ["xavier", "normal:0.2", "uniform:0.1", "uniform:0.1"]
    assert [(one.l1, one.l2) for one in job.row_optimizers(features)[:4]] == [(0.0, 0.0), (0.0, 0.25), (0.5, 0.25), (0.0, 0.25)]


def test_settings_of_a_table_that_is_not_there_are_refused() -> None:
    job = TrainJob.of(LEAST | {"tables": {"C27": {"lr": 0.1}}})
    with pytest.raises(SettingError, match=r"\[train.tables.C27\]: must name a table of the schedule; there are C1, C2, "):
        job.row_optimizers(FeatureSpec.criteo())


def test_a_trainer_is_reached_at_the_address_given_or_that_which_the_rendezvous_is_reached_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, given = TrainJob.of(LEAST), TrainJob.of(LEAST | {"address": "127.0.0.9"})
    assert [job.own_address(), given.own_address()] == ["127.0.0.1", "127.0.0.9"]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert [job.own_address(), given.own_address()] == ["127.0.0.1", "127.0.0.9"]
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(
        SettingError, match=r"--address: must be given where no route leads to MASTER_ADDR; got no\.such\.host\.invalid "
    ):
        job.own_address()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"store": ""}, "--store: is missing"),
        ({"store": "local:0"}, "--store: must be local:N"),
        ({"store": "local"}, "--store: must be local:N"),
        ({"trainers": 0}, "--trainers: must be at least 1; got 0"),
        ({"trainers": 65}, "--trainers: must be at most 64"),
        ({"trainers": True}, "--trainers: must be a whole number; got True"),
        ({"dim": "8.5"}, "--dim: must be a whole number; got '8.5'"),
        ({"lr": float("nan")}, "--lr: must be a finite number"),
        ({"lr": -1}, "--lr: must be at least 0; got -1"),
        ({"row_optimizer": "lion"}, f"--row-optimizer: must be one of {', '.join(ROW_OPTIMIZERS)}; got 'lion'"),
        ({"row_optimizer": "ftrl", "lr": 0}, "--lr: must be above 0 with row-optimizer ftrl"),
        ({"row_options": ["beta1=0.5"]}, "--row-options: adagrad has no option beta1; it has epsilon, decay"),
        ({"row_options": ["decay=x"]}, "--row-options: decay: must be a finite number; got 'x'"),
        ({"row_options": "decay=2"}, "--row-options: decay of adagrad must be above 0 and at most 1; got 2"),
        (
            {"tables": {"C1": {"row-optimizer": "ftrl", "row-options": {"l1": -1}}}},
            r"\[train.tables.C1\] row-options: l1 of ftrl must be from 0",
        ),
        ({"device": "tpu"}, "--device: must be one of cpu, cuda"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite"),
        ({"accept_numerics": True}, "--accept-numerics: is for continuing a run; give it with --resume"),
        ({"memory": "2 foo"}, "--memory: must be a size"),
        ({"namespace": "a b"}, "--namespace"),
        (
            {"tables": {"C1": {"momentum": 1}}},
            r"\[train.tables.C1\]: may have only row-optimizer, lr, row-options, row-initial, row-l1, row-l2; got momentum",
        ),
        ({"row_initial": "he"}, "--row-initial: must be uniform, uniform:A, xavier, normal:S or zeros"),
        ({"tables": {"C1": {"row-initial": "normal"}}}, r"\[train.tables.C1\] row-initial: must be uniform"),
        ({"row_l1": -1}, "--row-l1: must be at least 0; got -1"),
        ({"row_l2": 1e40}, r"--row-l2: must be from 0 to 1e\+30; got 1e\+40"),
        (
            {"row_l2": 1, "row_optimizer": "ftrl"},
            "--row-l2: must be 0 with row-optimizer ftrl, whose own l2 is in row-options; got 1",
        ),
        (
            {"row_l1": 1, "tables": {"C1": {"row-optimizer": "ftrl"}}},
            r"\[train.tables.C1\] row-l1: must be 0 with row-optimizer ftrl",
        ),
        ({"tables": {"C1": {"row-optimizer": "lion"}}}, "row-optimizer: must be one of"),
        ({"parity": "2"}, r"--parity: must be off, or K\+R such as 2\+1"),
        ({"parity": "2+0"}, "--parity: must be off"),
        ({"parity": "200+100"}, "at most 256 together; got '200\\+100'"),
        ({"spare": "redis://127.0.0.1:1"}, "--spare: is for servers that --store names by URL; local:"),
        ({"learning_rate": 1}, "train: has no setting 'learning_rate'; it takes abandon-after, accept-model, accept-numerics, "),
        (
            {"checkpoint-every": "0"},
            "--checkpoint-every: must be a number of steps, such as 1000, or a time, such as 90s, 10m or 2h; got '0'",
        ),
        ({"checkpoint-every": "10d"}, "--checkpoint-every: must be a number of steps"),
        ({"checkpoint-bits": 5}, "--checkpoint-bits: must be auto, 32, 8, 4, 3 or 2; got 5"),
        ({"keep": 0}, "--keep: "),
        (
            {"keep-best": "accuracy"},
            "--keep-best: must be one of log_loss, auc, .*, loss, or LABEL.METRIC of a label, and SET/METRIC .*; got 'accuracy'",
        ),
        ({"keep-best": ".auc"}, "--keep-best: must be one of"),
        ({"label-weights": ["a=-1"]}, "--label-weights: a: must be at least 0; got -1"),
        ({"label-weights": ["a"]}, "--label-weights: must be given as key=value; got 'a'"),
        ({"label-weights": ["a=1"], "loss": "a.py:f"}, "--label-weights: cannot be given with --loss; apply the weights"),
        ({"checkpoint-policy": "planned"}, "--checkpoint-policy: planned needs to know the steps of all checkpoints to come"),
        ({"checkpoint-policy": "planned", "checkpoint-every": "10m"}, "--checkpoint-policy: planned needs to know the steps"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule_and_value(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        TrainJob.of(LEAST | changed)


def test_a_job_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--job: cannot read"):
        read_job_file(tmp_path / "none.toml", "train", TrainJob)
    (tmp_path / "flat.toml").write_text("lr = 1")
    with pytest.raises(SettingError, match=r"may have tables \[prepare\] and \[train\]; got lr"):
        read_job_file(tmp_path / "flat.toml", "train", TrainJob)
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(SettingError, match="is not valid TOML"):
        read_job_file(tmp_path / "bad.toml", "train", TrainJob)


def test_sizes_have_decimal_and_binary_units() -> None:
    assert [size_bytes("x", text) for text in ("7", "7B", "2kB", "2KiB", "1.5MiB", "3 GB", "1TiB")] == [
        *(7, 7, 2000, 2048, 3 << 19, 3_000_000_000, 1 << 40)
    ]


def test_the_namespace_is_the_folders_name_unless_given() -> None:
    assert TrainJob.of(LEAST | {"run": "a/clicks 1"}).run_namespace == "clicks_1"
    assert TrainJob.of(LEAST | {"namespace": "n"}).run_namespace == "n"
    assert Servers.parse("--store", "redis://a,redis://b") == Servers(None, ("redis://a", "redis://b"))


@pytest.mark.parametrize(
    ("parity", "shards", "code"),
    [(None, 1, (1, 0)), (None, 2, (1, 0)), (None, 3, (2, 1)), (None, 9, (2, 1)), ("off", 5, (1, 0)), ("4+2", 6, (4, 2))],
)
def test_three_shards_or_more_have_parity_unless_told_otherwise(parity: str | None, shards: int, code: tuple[int, int]) -> None:
    assert TrainJob.of(LEAST | {"parity": parity}).code(shards) == code


def test_more_parity_than_shards_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--parity: 4\+2 needs at least 6 store shards; got 5"):
        TrainJob.of(LEAST | {"parity": "4+2"}).code(5)

"""The settings of `foreload train`.

Each setting is declared once, for the command line, the job file, Python and the run's manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from foreload.base.errors import SettingError
from foreload.base.settings import (
    choice,
    integer,
    key_values,
    local,
    named,
    number,
    parse_fields,
    positive,
    setting,
    switch,
    switch_or,
    text,
)
from foreload.cache.protocol.shards.shard_status import Patience
from foreload.cache.rows.layout import ROW_OPTIMIZERS, RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.initial_values import InitialValues
from foreload.pipelines.schedule.format import MOST_LANES
from foreload.trainer.compute.rate_schedules import RateSchedule
from foreload.trainer.compute.row_optimizers import RowOptimizer, layouts
from foreload.trainer.job.job_values import (
    AUTO,
    DRY_RUN,
    POLICIES,
    Interval,
    Parity,
    Place,
    Policy,
    Pool,
    Servers,
    Size,
    TableSettings,
    decay,
    initial_values,
    label_weights,
    row_options,
    storage_place,
    tables,
    tracker_name,
    weight_bits,
)
from foreload.trainer.job.metric_choice import StopEarly, metric_name
from foreload.trainer.job.scheduler import address_towards, under_scheduler
from foreload.trainer.models.built_in import further_columns_of


def check_together(job: TrainJob) -> None:
    """Raise SettingError for the first rule that settings break in combination."""
    if job.resume and job.overwrite:
        raise SettingError(
            "--resume and --overwrite: only one of them can be given; --overwrite deletes the run that --resume continues"
        )
    if job.resume and job.from_checkpoint:
        raise SettingError("--resume and --from: only one of them can be given; --from makes a new run, --resume continues one")
    for flag, accepts in (("--accept-numerics", job.accept_numerics), ("--accept-model", job.accept_model)):
        if accepts and not (job.resume or job.from_checkpoint):
            raise SettingError(f"{flag}: is for continuing a run; give it with --resume or --from, or leave it out")
    if job.namespace is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", job.namespace):
        raise SettingError(f"--namespace: must be 1 to 64 letters, digits, dots, dashes or underscores; got {job.namespace!r}")
    if job.loss is not None and job.label_weights:
        raise SettingError("--label-weights: cannot be given with --loss; apply the weights in the loss itself")
    _check_hosts(job)
    _check_auto(job)
    _check_engine(job)
    _check_checkpoints(job)
    if job.store.local and job.spare:
        raise SettingError(f"--spare: is for servers that --store names by URL; {job.store} starts dead servers again by itself")


def _check_hosts(job: TrainJob) -> None:
    if job.coordinator is None:
        for flag, value in (("--local-trainers", job.local_trainers), ("--token-file", job.token_file)):
            if value is not None:
                raise SettingError(f"{flag}: is for trainers on several hosts; give --coordinator, or leave it out")
        return
    if job.coordinator.host in ("0.0.0.0", "::"):
        raise SettingError(f"--coordinator: must name one address, at which other hosts reach this one; got {job.coordinator}")
    if job.trainers_here > job.trainers:
        raise SettingError(f"--local-trainers: must be at most --trainers, {job.trainers}; got {job.local_trainers}")
    if job.store.local:
        raise SettingError(f"--store: must be URLs of servers that all hosts reach, with --coordinator; got {job.store}")


def _check_auto(job: TrainJob) -> None:
    if not job.auto:
        for flag, value in (
            ("--auto-may", job.auto_may), ("--pool", job.pool), ("--deadline", job.deadline), ("--budget", job.budget)
        ):  # fmt: skip
            if value is not None:
                raise SettingError(f"{flag}: is for --auto; give that, too, or leave it out")
        return
    if job.deadline is not None and job.budget is not None:
        raise SettingError("--deadline and --budget: only one of them can be given; --deadline saves resources, --budget time")
    if job.engine == "local" and job.pool is not None and job.pool.weight is not None:
        raise SettingError("--pool: weight is for jobs that share a cluster; give --engine ray, or leave it out")


def _check_engine(job: TrainJob) -> None:
    if job.engine == "local":
        for flag, value in (
            ("--ray-address", job.ray_address), ("--spare-servers", job.spare_servers), ("--abandon-after", job.abandon_after)
        ):  # fmt: skip
            if value:
                raise SettingError(f"{flag}: is for a run on a cluster; give --engine ray, or leave it out")
        if job.store.engine:
            raise SettingError(
                f"--store: {job.store} needs an engine that starts servers; give --engine ray, or local:{job.store.engine}"
            )
        return
    if job.store.local:
        raise SettingError(
            f"--store: must be engine:N or URLs of servers that all nodes reach, with --engine ray; got {job.store}"
        )
    if job.coordinator is not None:
        raise SettingError(
            "--coordinator: is for hosts that join by themselves; leave it out with --engine ray, which starts the trainers"
        )
    if under_scheduler():
        raise SettingError(
            "--engine: ray starts the trainers itself; run one process of foreload train, not one for each trainer under torchrun"
        )
    if job.ray_address is not None and "://" in job.ray_address:
        raise SettingError(
            f"--ray-address: must be HOST:PORT of the cluster that this machine is a node of; got {job.ray_address}; submit the command as a Ray job"
        )
    if (job.abandon_after is not None or job.spare_servers) and job.spare:
        raise SettingError(
            "--spare: is for servers that --store names by URL; leave it out with --spare-servers and --abandon-after"
        )


def _check_checkpoints(job: TrainJob) -> None:
    if job.checkpoint_policy != "planned":
        return
    if job.checkpoint_every is None or job.checkpoint_every.steps is None or job.follow:
        raise SettingError(
            "--checkpoint-policy: planned needs to know the steps of all checkpoints to come; give --checkpoint-every as a number of steps, and "
            "a schedule that is complete, without --follow"
        )


_WHAT, _HOW, _WHERE, _CALL = "what to train", "how it learns", "where it runs", "this call"
_WRITTEN = Servers | Parity | Pool | Size | Place | Interval | RateSchedule | StopEarly
_PARITY_BY_DEFAULT, _NO_PARITY = Parity(2, 1), Parity(1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One call of `foreload train`, parsed and checked.

    Raises SettingError; the message names the setting, the rule, the value and the remedy.
    """

    schedule: str = setting(
        "",
        local,
        "the folder that `foreload prepare` wrote",
        form="place",
        metavar="SCHEDULE",
        flag="SCHEDULE",
        required=True,
        resume="free",
    )
    run: str = setting(
        "",
        local,
        "folder for everything that the training writes: model, metrics, summary",
        _WHAT,
        metavar="DIR",
        required=True,
        resume="free",
    )
    model: str = setting(
        "dlrm",
        text,
        "dlrm, wide_deep, dcn, deepfm, shared_bottom, mmoe, package.module:Class, or file.py:Class",
        _WHAT,
        metavar="MODEL",
    )
    model_folder: str = setting(
        "", local, "folder with the code of your own --model, recorded in the run; by default the working directory",
        _WHAT, metavar="DIR", resume="free"
    )  # fmt: skip
    dim: int = setting(
        32, integer(1), "columns of an embedding, for tables with no dimension in the feature file", _WHAT, metavar="D"
    )
    model_options: dict[str, Any] = setting(
        {}, key_values, "options of the model, such as top=64-32-1", _WHAT, form="several", metavar="K=V"
    )
    loss: str | None = setting(
        None, text, "your own loss, package.module:function or file.py:function, found like --model; by default the loss of each label's kind",
        _WHAT, metavar="FUNCTION",
    )  # fmt: skip
    label_weights: dict[str, float] = setting(
        {}, label_weights, "with several labels: factors for the losses of single labels; 1 for the others", _WHAT, form="several", metavar="LABEL=X"
    )  # fmt: skip
    drop_weights: bool = setting(
        False, switch, "train a wrapped module although its embeddings have weights; these are dropped, and rows begin with random values", _WHAT,
        form="switch", resume="free",
    )  # fmt: skip
    seed: int = setting(0, integer(0), "seed of the initial model and of everything random in training", _WHAT, metavar="S")
    row_optimizer: str = setting(
        "adagrad", choice(*ROW_OPTIMIZERS), "optimizer of the embedding rows", _HOW, metavar=f"{{{','.join(ROW_OPTIMIZERS)}}}"
    )
    lr: float = setting(0.05, number(0), "learning rate of the rows", _HOW, metavar="X", resume="rates")
    lr_schedule: RateSchedule | None = setting(
        None,
        RateSchedule.parse,
        "factors for --lr over the steps, such as warmup:1000,cosine:20000:0.1",
        _HOW,
        metavar="FACTORS",
        resume="rates",
    )
    row_options: dict[str, float] = setting(
        {}, row_options, "options of the row optimizer, such as beta1=0.8 of adam", _HOW, form="several", metavar="K=V"
    )
    row_initial: str = setting(
        "uniform", initial_values,
        "how embedding rows begin, for tables with no initial in the feature file: uniform (within 1/sqrt of the table's rows), uniform:A (within "
        "A), xavier, normal:S (standard deviation S) or zeros",
        _HOW, metavar="RULE",
    )  # fmt: skip
    row_l2: float = setting(
        0.0,
        number(0),
        "L2 penalty of the embedding rows that a step uses: adds X times the row to its gradient",
        _HOW,
        metavar="X",
    )
    row_l1: float = setting(
        0.0, number(0), "L1 penalty of the embedding rows that a step uses: adds X times the signs of the row", _HOW, metavar="X"
    )
    tables: dict[str, TableSettings] = setting(
        {}, tables, "job file only: row-optimizer, lr and the settings named --row-... of single tables, in [train.tables.NAME]", _HOW, form="file"
    )  # fmt: skip
    dense_optimizer: str = setting("Adagrad", text, "optimizer of the dense part, as torch.optim names it", _HOW, metavar="NAME")
    dense_lr: float = setting(0.01, number(0), "learning rate of the dense part", _HOW, metavar="X", resume="rates")
    dense_lr_schedule: RateSchedule | None = setting(
        None, RateSchedule.parse, "factors for --dense-lr, likewise", _HOW, metavar="FACTORS", resume="rates"
    )
    dense_clip: float | None = setting(
        None,
        positive,
        "maximum norm of the dense gradients; larger ones are scaled down to it",
        _HOW,
        metavar="X",
        resume="rates",
    )
    dense_ema: float | None = setting(
        None, decay, "evaluate, export and serve a moving average of the dense parameters; each step keeps this share of it, such as 0.999",
        _HOW, metavar="D",
    )  # fmt: skip
    dense_options: dict[str, Any] = setting(
        {}, key_values, "options of the dense optimizer, such as momentum=0.9", _HOW, form="several", metavar="K=V"
    )
    store: Servers = setting(
        "", Servers.parse, "servers that store the rows: local:N starts N redis-servers for this job, engine:N has --engine start them; or the URLs "
        "of running ones, separated by commas",
        _WHERE, metavar="local:N|engine:N|URL,...", required=True, resume="free",
    )  # fmt: skip
    # The value is free on resuming because `check_place` compares it with the run's placement.
    parity: Parity | None = setting(
        None, Parity.parse, "off, or K+R: any R of K+R store shards may be lost; by default 2+1 with three or more shards, else off",
        _WHERE, metavar="off|K+R", resume="free",
    )  # fmt: skip
    spare: str | None = setting(
        None, text, "URLs of empty servers that replace store shards that are lost and do not come back",
        _WHERE, metavar="URL,...", stated=False,
    )  # fmt: skip
    no_restart: bool = setting(
        False, switch, "do not restart a local server or a trainer that has died", _WHERE, form="switch", stated=False
    )
    trainers: int = setting(
        1,
        integer(1, MOST_LANES),
        "trainer processes; each hosts one or more of the schedule's lanes",
        _WHERE,
        metavar="N",
        resume="free",
    )
    threads: int = setting(
        1,
        integer(1),
        "threads of the arithmetic in each trainer; part of the numerics fingerprint",
        _WHERE,
        metavar="T",
        resume="numerics",
    )
    cpu_capability: Literal["avx2", "avx512", "avx512-onednn"] = setting(
        "avx2", choice("avx2", "avx512", "avx512-onednn"),
        "vector instructions of the arithmetic, which every host of the run must support; part of the numerics fingerprint", _WHERE,
        metavar="{avx2,avx512,avx512-onednn}", resume="numerics",
    )  # fmt: skip
    device: Literal["cpu", "cuda"] = setting(
        "cpu",
        choice("cpu", "cuda"),
        "device for the cache of each lane and the dense part",
        _WHERE,
        metavar="{cpu,cuda}",
        resume="numerics",
    )
    memory: Size | None = setting(
        None,
        Size.parse,
        "maximum size of a lane's slots; by default the schedule's own limit",
        _WHERE,
        metavar="SIZE",
        resume="free",
    )
    namespace: str | None = setting(
        None, text, "name of the run on the store; by default the name of the run's folder", _WHERE, metavar="NAME", resume="free"
    )
    address: str | None = setting(
        None, text,
        "address at which other trainers reach this machine; by default 127.0.0.1, or, under a scheduler, the one from which MASTER_ADDR is reached",
        _WHERE, metavar="HOST", stated=False,
    )  # fmt: skip
    store_timeout: float | None = setting(
        None, number(0.1), "seconds of silence after which a store shard counts as lost; by default 1 with parity, else 10",
        _WHERE, metavar="S", resume="free"
    )  # fmt: skip
    store_patience: float = setting(
        10.0, number(0), "seconds to wait for store shards that do not answer and that parity does not cover, also at the start",
        _WHERE, metavar="S", stated=False, resume="free",
    )  # fmt: skip
    copies: int | None = setting(
        None, integer(1),
        "how many trainers hold each lane's rows, its owner included; one fewer than this may be lost at once; by default 2, but 1 with "
        "a single trainer, under a scheduler, or with --device cuda",
        _WHERE, metavar="N", resume="free", alias="replicas",
    )  # fmt: skip
    peer_timeout: float | None = setting(
        None, number(0.1), "seconds of silence after which a trainer counts as lost; by default 5 with copies, else 300",
        _WHERE, metavar="S", resume="free"
    )  # fmt: skip
    rebalance: bool = setting(
        False,
        switch,
        "move lanes away from a trainer that is persistently slower than the others",
        _WHERE,
        form="switch",
        stated=False,
    )
    auto: bool | Literal["dry-run"] = setting(
        False, switch_or(DRY_RUN), "choose the numbers of trainers and store shards, and change them during training whenever that pays; a shard is "
        "added before one is full, a slow one is replaced", _WHERE, form="switch", stated=False,
        words={DRY_RUN: "only say what would be changed"},
    )  # fmt: skip
    auto_may: Literal["threads"] | None = setting(
        None, choice("threads"), "with --auto: what else a new run's beginning may choose, though the bits of the model depend on it: the threads of "
        "a trainer, as profiles of the history have tried them", _WHERE, stated=False,
    )  # fmt: skip
    pool: Pool | None = setting(
        None, Pool.parse, "with --auto: the resources that it may use; by default this machine's, or the job's share of a Ray cluster by "
        "its weight, and 5 store shards or the servers of --store and --spare", _WHERE, metavar="cores=N,memory=SIZE,stores=N,weight=W", stated=False,
    )  # fmt: skip
    deadline: Interval | None = setting(
        None, Interval.parse_time, "with --auto: use no more than what ends within this time of training, such as 90s, 10m or 2h", _WHERE,
        metavar="TIME", stated=False,
    )  # fmt: skip
    budget: float | None = setting(
        None, positive, "with --auto: begin with the fastest that costs at most this many core hours, and add nothing", _WHERE, metavar="X",
        stated=False,
    )  # fmt: skip
    coordinator: Place | None = setting(
        None, Place.parse, "let trainers on other hosts join: the address at which they reach this machine, and a free port",
        _WHERE, metavar="HOST:PORT", stated=False,
    )  # fmt: skip
    local_trainers: int | None = setting(
        None, integer(1, MOST_LANES), "with --coordinator: how many of the trainers to start on this host; by default one", _WHERE,
        metavar="K", stated=False,
    )  # fmt: skip
    token_file: str | None = setting(
        None, local, "with --coordinator: file with the token that other hosts show; by default FORELOAD_JOB_TOKEN, else a new token in RUN/token",
        _WHERE, metavar="FILE", stated=False,
    )  # fmt: skip
    engine: Literal["local", "ray"] = setting(
        "local", choice("local", "ray"), "what starts the trainers, and the servers of --store engine:N: this machine, or a Ray cluster, of which "
        "it is a node", _WHERE, metavar="{local,ray}", resume="free",
    )  # fmt: skip
    ray_address: str | None = setting(
        None, text, "with --engine ray: address of the cluster, HOST:PORT; by default RAY_ADDRESS, or the cluster of this machine", _WHERE,
        metavar="HOST:PORT", stated=False,
    )  # fmt: skip
    spare_servers: int = setting(
        0, integer(0, 999), "with --store engine:N: further servers, started at once, one of which replaces a server that is lost; without them, "
        "another one is started then", _WHERE, metavar="M", resume="free",
    )  # fmt: skip
    abandon_after: Interval | None = setting(
        None, Interval.parse_time, "with --store engine:N: when this command has died and none has gone on with the run for this time, such as 2h, "
        "save a checkpoint, verify it, and end the servers; by default they stay until foreload delete", _WHERE, metavar="TIME", stated=False,
    )  # fmt: skip
    checkpoint: str | None = setting(
        None, storage_place, "folder or URL, reached by all hosts, for the checkpoints saved during training; by default checkpoints in RUN",
        _CALL, metavar="DIR|URL", resume="free",
    )  # fmt: skip
    checkpoint_every: Interval | None = setting(
        None, Interval.parse, "save a checkpoint during training, each time after this many steps or this time, such as 10m", _CALL,
        metavar="STEPS|TIME", stated=False,
    )  # fmt: skip
    checkpoint_policy: Policy = setting(
        "intermittent", choice(*POLICIES),
        "which of these checkpoints have all rows: full: each; one-shot: the first; consecutive: the first, and each other has what changed since "
        "the one before; intermittent: the first, and others when that costs less; planned: so that the cost up to the schedule's end is least",
        _CALL, metavar="POLICY", stated=False,
    )  # fmt: skip
    checkpoint_bits: int | Literal["auto"] = setting(
        32, weight_bits,
        "bits of a weight in these, or auto, by the number of restores to expect; with fewer than 32, a run that continues from one is not exact",
        _CALL,
        metavar="{auto,32,8,4,3,2}", stated=False,
    )  # fmt: skip
    failures_a_day: float = setting(
        1.0, number(0), "how often the job fails, for --checkpoint-bits auto", _CALL, metavar="N", stated=False
    )
    keep_best: str | None = setting(
        None, metric_name,
        "save a checkpoint after each evaluation that is the best so far by this metric: log_loss, auc, rmse and so on, LABEL.METRIC for one label, "
        "SET/METRIC for one evaluation set; the best one is kept, for `foreload export --best`", _CALL,
        metavar="METRIC", stated=False,
    )  # fmt: skip
    keep: int = setting(
        2,
        integer(1),
        "how many of these checkpoints to keep: the newest, and also those that they need",
        _CALL,
        metavar="N",
        stated=False,
    )
    stop_early: StopEarly | None = setting(
        None, StopEarly.parse,
        "end training after PATIENCE evaluations in a row that do not beat the best by more than MIN_CHANGE, such as auc:3; or off", _CALL,
        metavar="METRIC:PATIENCE[:MIN_CHANGE]", resume="free",
    )  # fmt: skip
    history: str = setting(
        "", local, "file for the profile that a run records at its end, for foreload history and plan; by default in the user's data folder", _CALL,
        metavar="FILE|off", stated=False,
    )  # fmt: skip
    metrics: Place | None = setting(
        None, Place.parse_local, "serve the run's figures to Prometheus at /metrics, and /healthz; without a host on 127.0.0.1, with port 0 on a "
        "free port", _CALL, metavar="[HOST:]PORT", stated=False,
    )  # fmt: skip
    track: str | None = setting(
        None, tracker_name, "also report to an experiment tracker: mlflow, mlflow:URI, or a class of yours as package.module:Class or file.py:Class",
        _CALL, metavar="TRACKER", stated=False,
    )  # fmt: skip
    log_format: Literal["text", "json"] = setting(
        "text", choice("text", "json"), "write messages to stderr as text, or messages and events as JSON, one object a line", _CALL,
        metavar="{text,json}", stated=False,
    )  # fmt: skip
    no_report: bool = setting(
        False, switch, "do not write RUN/report.html at the end; `foreload report` can write it at any time", _CALL, form="switch", stated=False
    )  # fmt: skip
    until_full: bool = setting(
        False, switch, "train although the store has too little memory for the whole schedule, and stop cleanly before a store shard is full", _CALL,
        form="switch", stated=False,
    )  # fmt: skip
    follow: bool = setting(False, switch, "start while the schedule is still being prepared", _CALL, form="switch", stated=False)
    resume: bool | Literal["auto"] = setting(
        False, switch_or(AUTO), "continue a stopped run, with its schedule or with one prepared after it", _CALL, form="switch", stated=False,
        words={AUTO: "start the run, or continue it, whichever applies: one command that a scheduler can repeat"},
    )  # fmt: skip
    from_checkpoint: str | None = setting(
        None, storage_place, "make a new run from this checkpoint, on any store, and continue it", _CALL,
        metavar="CHECKPOINT", flag="--from", stated=False,
    )  # fmt: skip
    accept_numerics: bool = setting(
        False, switch, "with --resume or --from: continue although this machine's arithmetic is not the run's; the run records from which step on",
        _CALL, form="switch", stated=False,
    )  # fmt: skip
    accept_model: bool = setting(
        False, switch, "with --resume or --from: continue although the model's code is not the code that the run was trained with; the run records "
        "that",
        _CALL, form="switch", stated=False,
    )  # fmt: skip
    folder_moved: bool = setting(
        False, switch, "confirm that the run's folder was moved here from another disk or host, and that no other copy of it is still used", _CALL,
        form="switch", flag="--moved", stated=False,
    )  # fmt: skip
    overwrite: bool = setting(
        False, switch, "delete what the run's folder and its namespace on the store hold, and start again", _CALL, form="switch", stated=False
    )  # fmt: skip
    allow_nan: bool = setting(
        False,
        switch,
        "continue when a loss is NaN or infinite, instead of stopping before that step",
        _CALL,
        form="switch",
        stated=False,
    )
    digest: bool = setting(
        False, switch, "compute the digest of the trained model at the end", _CALL, form="switch", stated=False
    )

    def __post_init__(self) -> None:
        parse_fields(self)
        self._row_optimizer()
        for name, of_table in self.tables.items():
            self._row_optimizer(of_table, f"[train.tables.{name}] ")
        check_together(self)

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are saved automatically during training."""
        return self.checkpoint_every is not None or self.keep_best is not None

    @property
    def stops_before_full(self) -> bool:
        """Whether training stops cleanly before a store shard is full.

        With --auto a shard is added before, so that it stops only if that is not done in time.
        """
        return self.until_full or self.auto is True

    @property
    def is_over_hosts(self) -> bool:
        """Whether trainers may be on other machines than this one, without a scheduler."""
        return self.coordinator is not None or self.engine != "local"

    @property
    def trainers_here(self) -> int:
        """The number of trainers that this host starts when training begins."""
        return self.trainers if self.coordinator is None else self.local_trainers or 1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainJob:
        """Return the job with these settings, given by their names on the command line.

        Programs and manifests make their jobs with this method. Names may have dashes or
        underscores, and values may be text or Python values:

            TrainJob.of({"schedule": "clicks", "run": "first", "store": "local:3", "lr": 0.01,
            "model_options": {"top": "64-1"}, "parity": "2+1"})

        Raises:
            SettingError: a value breaks a rule, or a name is unknown.
        """
        return cls(**named(cls, values, "train:"))

    def to_dict(self) -> dict[str, Any]:
        """Return every setting as a value that JSON and TOML can hold.

        `of` makes the same job from it.
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        own = {name: table.to_dict() for name, table in self.tables.items()}
        written = {name: str(value) for name, value in values.items() if isinstance(value, _WRITTEN)}
        return values | written | {"tables": own}

    def code(self, shards: int) -> Parity:
        """Return K and R for a store with this many shards; (1, 0) without parity.

        Raises:
            SettingError: there are too few shards.
        """
        if self.parity is None:
            return _PARITY_BY_DEFAULT if shards >= 3 else _NO_PARITY
        if self.parity.r and sum(self.parity) > shards:
            raise SettingError(
                f"--parity: {self.parity} needs at least {sum(self.parity)} store shards; got {shards}; give more, or --parity off"
            )
        return self.parity

    def row_optimizers(self, features: FeatureSpec) -> list[RowOptimizer]:
        """Return every table's row optimizer, in the order of the tables.

        Raises:
            SettingError: the job has settings for a table that does not exist.
        """
        names = [table.name for table in features.tables]
        if unknown := sorted(set(self.tables) - set(names)):
            raise SettingError(f"[train.tables.{unknown[0]}]: must name a table of the schedule; there are {', '.join(names)}")
        return [self._row_optimizer(self.tables.get(name)) for name in names]

    def _row_optimizer(self, own: TableSettings | None = None, place: str = "--") -> RowOptimizer:
        """Return the row optimizer of a table.

        Args:
            own: the table's own settings, if any.
            place: where these settings stand, for messages.

        Raises:
            SettingError: the optimizer has no such options.
        """
        if own is None:
            own = TableSettings()
        name = own.row_optimizer or self.row_optimizer
        # Options for another optimizer do not apply to this one.
        of_all = self.row_options if name == self.row_optimizer else {}
        l1, l2 = (self.row_l1 if own.row_l1 is None else own.row_l1), (self.row_l2 if own.row_l2 is None else own.row_l2)
        try:
            return RowOptimizer(name, self.lr if own.lr is None else own.lr, of_all | (own.row_options or {}), l1, l2)
        except SettingError as error:
            raise SettingError(f"{place}{error}") from None

    def initial_values(self, features: FeatureSpec) -> list[InitialValues]:
        """Return how the rows of every table begin, in the order of the tables."""
        own = [self.tables.get(table.name, TableSettings()).row_initial or table.initial for table in features.tables]
        return [InitialValues.parse(text or self.row_initial) for text in own]

    @property
    def store_silence(self) -> timedelta:
        """How long a store shard may be silent."""
        if self.store_timeout is not None:
            return timedelta(seconds=self.store_timeout)
        # With parity, it is faster to give a silent shard up and decode its rows than to wait for
        # it.
        return timedelta(seconds=1 if self.code(self.store.count).r else 10)

    @property
    def patience(self) -> Patience:
        """How long to wait for store shards that do not answer."""
        return Patience(timedelta(seconds=self.store_patience), volatile=self.store.local is not None)

    @property
    def peer_silence(self) -> timedelta:
        """How long another trainer may be silent."""
        if self.peer_timeout is not None:
            return timedelta(seconds=self.peer_timeout)
        return timedelta(seconds=5 if self.replicas_wanted > 1 else 300)

    @property
    def replicas_held(self) -> int:
        """The number of trainers that hold each lane when training begins, its owner included."""
        return min(self.replicas_wanted, self.trainers)

    @property
    def replicas_wanted(self) -> int:
        """The number of trainers that are to hold each lane's rows, its owner included.

        It is reached as soon as there are enough trainers.
        """
        if under_scheduler():
            # A scheduler ends all trainers when one dies, so replicas would be of no use.
            return 1
        # Losses were tested with trainers that share a CUDA device, but not between devices.
        by_default = 1 if self.device == "cuda" else 2
        return self.copies or by_default

    def own_address(self) -> str:
        """Return the address at which other trainers reach this machine.

        If the job gives none, it is 127.0.0.1, the coordinator's host, or, under a scheduler, the
        address from which MASTER_ADDR is reached.

        Raises:
            SettingError: no route leads to MASTER_ADDR.
        """
        if self.address is not None or not under_scheduler():
            return self.address or (self.coordinator.host if self.coordinator is not None else "127.0.0.1")
        return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @property
    def run_namespace(self) -> str:
        """The name of the run on the store."""
        return self.namespace or re.sub(r"[^A-Za-z0-9_.-]", "_", Path(self.run).absolute().name)[:64] or "run"


def layouts_of(job: TrainJob, features: FeatureSpec) -> list[RowLayout]:
    """Return the layout of each table's rows, in the order of the tables.

    Args:
        features: the features of the job's schedule.

    Raises:
        SettingError: the job's settings do not fit the tables.
        ModelError: the model cannot be loaded.
    """
    further = further_columns_of(job.model, job.model_folder)
    return layouts(features, further, job.dim, job.row_optimizers(features), job.initial_values(features))

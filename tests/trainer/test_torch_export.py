"""Models as `export --format torch` writes them: logits of the file's model.py are the trainer's, of raw records, of any number of samples."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import tomllib
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import plain_models
import pyarrow as pa
import pytest
import torch
from served_model import served
from torch import Tensor

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.convert import convert
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.feature_file import parse
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.commands import export_torch
from foreload.trainer.commands.predict import _local, _rows
from foreload.trainer.compute.layouts import BlockLayout, model_spec
from foreload.trainer.errors import ExportError
from foreload.trainer.job.job import TrainJob, layouts_of
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.saved.model_rows import ModelRows
from foreload.trainer.saved.saved_model import initial_rows
from foreload.trainer.saved.trained_model import DenseForward
from foreload.trainer.serving import dense_program
from foreload.trainer.serving.torch_folder import TorchOptions, write_folder

FEATURES: dict[str, Any] = {
    "label": "clicked",
    "table": {"place": {"rows": 60}},
    "dense": [{"name": "age"}, {"name": "x", "transform": "none"}],
    "feature": [
        {"name": "ad", "rows": 30, "encoding": "id"},
        {"name": "visited", "table": "place", "pooling": "mean"},
        {"name": "user", "table": "place"},
        {"name": "sites", "rows": 200, "pooling": "sum", "separator": ","},
    ],
}
NATIVE = FEATURES | {"dense": FEATURES["dense"][:1], "feature": FEATURES["feature"][:3]}
OWN = '''
import random

import numpy
import torch
from foreload import nn as layers
from torch import nn


class Branching(nn.Module):
    def __init__(self, spec, *, scale=1.0):
        super().__init__()
        self.names, self.weight = spec.names, nn.Parameter(torch.full((spec.width,), scale))

    def forward(self, dense, embeddings):
        logits = torch.cat([embeddings[name] for name in self.names], 1) @ self.weight + embeddings.block[:, 0, 0]
        return logits + 1 if dense.isnan().any() else logits


class Drawing(nn.Module):
    """What its constructor draws is a buffer of the state or beside it, of any type, or no tensor of the module's at all."""

    def __init__(self, spec, *, scale=1.0):
        super().__init__()
        self.names, self.weight = spec.names, nn.Parameter(torch.full((spec.width,), scale))
        self.register_buffer("frequencies", torch.randn(spec.dense_width, 5))
        self.register_buffer("order", torch.randperm(spec.width))
        self.register_buffer("kept", torch.rand(spec.width) < 0.5)
        self.register_buffer("halves", torch.randn(5).to(torch.bfloat16))
        self.register_buffer("beside", torch.randn(5), persistent=False)
        self.shift = [numpy.random.rand(), random.random()]

    def forward(self, dense, embeddings):
        inputs = torch.cat([embeddings[name] for name in self.names], 1)[:, self.order] * self.kept
        waves = (dense @ self.frequencies).sin() @ (self.halves.float() + self.beside)
        return inputs @ self.weight + waves + sum(self.shift)


class Otherwise(Drawing):
    """From the third on, each is built otherwise."""

    built = 0

    def __init__(self, spec):
        super().__init__(spec)
        type(self).built += 1
        self.shift[0] += max(type(self).built - MOST, 0)

    def forward(self, dense, embeddings):
        return super().forward(dense, embeddings)


class Half(nn.Module):
    """A product in bfloat16, which onnxruntime does not know on the CPU."""

    def __init__(self, spec):
        super().__init__()
        self.names, self.out = spec.names, nn.Linear(spec.width, 1)

    def forward(self, dense, embeddings):
        with torch.autocast("cpu", torch.bfloat16):
            return self.out(torch.cat([embeddings[name] for name in self.names], 1)).float().squeeze(1) + dense.sum(1)


MOST = 2
'''


@dataclass(frozen=True)
class ModelInMemory:
    """A SavedModel, as far as an export asks it: random parameters, and random rows for about half of the ids of each table."""

    job: TrainJob
    features: FeatureSpec
    layouts: Sequence[RowLayout]
    stored: Sequence[tuple[np.ndarray, np.ndarray]]
    parameters: dict[str, Tensor]
    step: int = 3

    @classmethod
    def of(cls, model: str, features: dict[str, Any], **settings: object) -> ModelInMemory:
        nowhere = {"schedule": "-", "run": "-", "store": "-", "namespace": "none"}
        job, spec = TrainJob.of(nowhere | {"model": model, "dim": 12, "seed": 5} | settings), parse(features)
        builder = load_model(model, job.model_folder)
        random = np.random.default_rng(1)
        rows = layouts_of(job, spec)
        trained = []
        for layout in rows:
            ids = np.flatnonzero(random.random(layout.rows) < 0.5)
            trained.append((ids, random.standard_normal((len(ids), layout.width), np.float32)))
        module = build_model(builder, model_spec(spec, job.dim), job.model_options, job.seed)
        return cls(job, spec, rows, trained, dict(module.named_parameters()))

    def rows(self, since: int | None = None) -> Iterator[ModelRows]:
        for table, (ids, weights) in enumerate(self.stored):
            for part in np.array_split(np.arange(len(ids)), 3):
                state = np.zeros((len(part), 1), np.float32)
                yield ModelRows(table, ids[part], np.ones(len(part), np.int32), weights[part], state)

    def check_code(self) -> None:
        """Nothing: its code is that of this process."""

    def row_counts(self) -> np.ndarray:
        return np.array([len(ids) for ids, _ in self.stored])

    def dense(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        return {name: value.detach().numpy() for name, value in self.parameters.items()}, {}

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known, trained = self.stored[table]
        weights, there = initial_rows(self, table, ids), np.isin(ids, known)  # type: ignore[arg-type]
        weights[there] = trained[np.searchsorted(known, ids[there])]
        return weights, there

    def logits(self, columns: dict[str, list[Any]]) -> np.ndarray:
        """Those of the trainer, of all records in one slice."""
        spec = self.features.unlabelled()
        records = convert({name: pa.array(values) for name, values in columns.items()}, spec, "test", lambda rows: rows)
        samples = Encoder(spec).encode(records)
        tables = np.array([feature.table for feature in spec.features])
        index, rows = _local(samples, tables, _rows(self, len(self.layouts), [samples], tables))
        offsets = None if samples.offsets is None else samples.offsets.astype(np.int32)
        forward = DenseForward(self)  # type: ignore[arg-type]
        given = forward.outputs(rows, index, offsets, samples.dense).numpy()
        return given

    def write(self, folder: Path, **options: Any) -> dict[str, Any]:
        folder.mkdir()
        about = {
            "step": self.step,
            "seed": 5,
            "state": "here",
            "model": {"model": self.job.model, "model_options": {}, "dim": self.job.dim},
        }
        return write_folder(self, folder, about | {"inexact": None}, TorchOptions(**options))  # type: ignore[arg-type]


def records(count: int) -> dict[str, list[Any]]:
    """Raw columns; many ids were never trained, some values are missing."""
    random = np.random.default_rng(count)
    return {
        "age": [None if k % 9 == 0 else float(k % 70) for k in range(count)],
        "x": [f"{value:.4f}" for value in random.standard_normal(count)],
        "ad": random.integers(0, 30, count).tolist(),
        "visited": ["|".join(f"p{j}" for j in random.integers(0, 99, k % 5)) for k in range(count)],
        "user": ["" if k % 7 == 0 else f"u{k * k}" for k in range(count)],
        "sites": [",".join(f"s{j}" for j in random.integers(0, 99, k % 4)) for k in range(count)],
    }


def onnx_logits(folder: Path, model: Any, columns: dict[str, list[Any]]) -> np.ndarray:
    """What onnxruntime makes of the blocks that the program is given."""
    given: list[tuple[Tensor, Tensor]] = []
    model.program.register_forward_pre_hook(lambda module, arguments: given.append(arguments))
    model.predict(columns, batch_size=1000)
    session = onnxruntime.InferenceSession(folder / "dense.onnx")
    ((dense, block),) = given
    wanted = {entry.name for entry in session.get_inputs()}  # what a model does not use is no input
    inputs = {name: value.numpy() for name, value in (("dense", dense), ("block", block)) if name in wanted}
    (logits,) = session.run(None, inputs)
    return np.asarray(logits)[: len(next(iter(columns.values())))]


@pytest.mark.parametrize(
    ("model", "features", "exact"),
    [
        ("dlrm", FEATURES, False),
        pytest.param("deepfm", FEATURES, True, marks=pytest.mark.full),
        pytest.param("wide_deep", FEATURES, True, marks=pytest.mark.full),
        pytest.param("dcn", FEATURES, True, marks=pytest.mark.full),
        pytest.param("model_cases:Sum", FEATURES, True, marks=pytest.mark.full),
        pytest.param("model_cases:Balanced", FEATURES, True, marks=pytest.mark.full),
        pytest.param("plain_models:native_here", NATIVE, True, marks=pytest.mark.full),
    ],
)
def test_logits_are_the_trainers_bit_for_bit_where_its_operations_are_torchs(
    tmp_path: Path, model: str, features: dict[str, Any], exact: bool
) -> None:
    trained = ModelInMemory.of(model, features, row_initial="normal:0.3")
    trained.write(tmp_path / "out", onnx=True)
    loaded = served(tmp_path / "out").load()
    for count in (1, 7, 256):
        columns = records(count)
        needed = {name: columns[name] for name in loaded.encoder.columns}
        wanted, got = trained.logits(needed), loaded.predict(needed, logits=True)
        if exact:
            assert got.tobytes() == wanted.tobytes()
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(onnx_logits(tmp_path / "out", loaded, needed), wanted, rtol=1e-5, atol=1e-5)
    scores = loaded.predict([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-wanted.astype(np.float64))), rtol=1e-6)


def test_a_wrapped_module_is_served_and_parameters_alone_go_into_ones_own(tmp_path: Path) -> None:
    features = tmp_path / "two_tower.toml"
    plain_models.two_tower_here(None).write_features(features, label="clicked")  # type: ignore[arg-type]
    trained = ModelInMemory.of("plain_models:two_tower_here", tomllib.loads(features.read_text()), row_initial="xavier")
    columns: dict[str, list[Any]] = {
        "user": [3, 119, 7], "ad": [1, 29, None], "ad_before": [0, 5, 5], "visited": ["1|2", "", "39"], "age": [0.5, None, 30.0],
    }  # fmt: skip
    wanted = trained.logits(columns)
    trained.write(tmp_path / "out")
    assert served(tmp_path / "out").load().predict(columns, logits=True).tobytes() == wanted.tobytes()
    told = trained.write(tmp_path / "weights", program=False)
    assert (told["program"], told["weights"]) == (None, "dense.safetensors")
    module = served(tmp_path / "weights")
    loaded = module.load(module=plain_models.two_tower_here)
    assert loaded.predict(columns, logits=True).tobytes() == wanted.tobytes()
    with pytest.raises(ValueError, match="has the weights of plain_models:two_tower_here alone; give it, as module="):
        module.load()
    with pytest.raises(ValueError, match="module must have the parameters and buffers of"):
        module.load(module=torch.nn.Linear(1, 1))


def test_the_step_is_a_constant_of_an_export(tmp_path: Path) -> None:
    features = tmp_path / "annealed.toml"
    plain_models.annealed_here(None).write_features(features, label="clicked")  # type: ignore[arg-type]
    early = ModelInMemory.of("plain_models:annealed_here", tomllib.loads(features.read_text()))
    late = replace(early, step=29)
    columns: dict[str, list[Any]] = {"user": [3, 119, 7], "ad": [1, 29, None], "age": [0.5, None, 30.0]}
    assert not np.array_equal(early.logits(columns), late.logits(columns))
    for model in (early, late):
        program, weights = tmp_path / f"program-{model.step}", tmp_path / f"weights-{model.step}"
        model.write(program)
        model.write(weights, program=False)
        wanted = model.logits(columns).tobytes()
        assert served(program).load().predict(columns, logits=True).tobytes() == wanted
        assert served(weights).load(module=plain_models.annealed_here).predict(columns, logits=True).tobytes() == wanted


def test_what_cannot_be_traced_is_told_in_one_line_with_what_can_be_done(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    trained = ModelInMemory.of("mine.py:Branching", FEATURES, model_folder=str(tmp_path))
    with pytest.raises(ExportError) as error:
        trained.write(tmp_path / "out")
    assert str(error.value).startswith("--format torch: torch.export cannot follow forward of mine.py:Branching: ")
    assert "give --dense weights" in str(error.value)
    assert "\n" not in str(error.value)
    trained.write(tmp_path / "weights", program=False)
    loaded = served(tmp_path / "weights").load(module=load_model("mine.py:Branching", str(tmp_path)))
    columns = records(20)
    assert loaded.predict(columns, logits=True).tobytes() == trained.logits(columns).tobytes()


def test_weights_bring_all_that_a_constructor_draws(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    trained = ModelInMemory.of("mine.py:Drawing", FEATURES, model_folder=str(tmp_path))
    told = trained.write(tmp_path / "weights", program=False)
    builder, columns = load_model("mine.py:Drawing", str(tmp_path)), records(50)
    wanted = trained.logits(columns)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    module = served(tmp_path / "weights")
    assert module.load(module=builder).predict(columns, logits=True).tobytes() == wanted.tobytes()
    assert torch.equal(torch.random.get_rng_state(), before)
    saved = module.read_weights(tmp_path / "weights" / told["weights"])
    assert {name: value.dtype for name, value in saved.items()} == {
        "weight": torch.float32, "frequencies": torch.float32, "order": torch.int64, "kept": torch.bool, "halves": torch.bfloat16,
    }  # fmt: skip
    # A module that was built under another seed has another shift, which no weights tell.
    spec = model_spec(parse(FEATURES), 12)
    with pytest.raises(ValueError, match=r"module must give the logits that mine\.py:Drawing gave when it was exported"):
        module.load(module=builder(spec))


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn", "wide_deep"])
def test_weights_of_each_model_that_comes_with_foreload(tmp_path: Path, model: str) -> None:
    """Their constructors ask the spec for more than its fields."""
    trained = ModelInMemory.of(model, FEATURES)
    trained.write(tmp_path / "weights", program=False)
    columns = records(20)
    loaded = served(tmp_path / "weights").load(module=load_model(model))
    assert loaded.predict(columns, logits=True).tobytes() == trained.logits(columns).tobytes()


def test_weights_that_no_constructor_makes_anew_are_not_exported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    trained = ModelInMemory.of("mine.py:Otherwise", FEATURES, model_folder=str(tmp_path))
    with pytest.raises(ExportError, match=r"--dense weights: mine\.py:Otherwise cannot be built again as it was trained: "):
        trained.write(tmp_path / "weights", program=False)
    assert trained.write(tmp_path / "program")["program"] == "dense.pt2"


def test_onnx_that_onnxruntime_cannot_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    trained = ModelInMemory.of("mine.py:Half", FEATURES, model_folder=str(tmp_path))
    with pytest.raises(ExportError) as error:
        trained.write(tmp_path / "onnx", onnx=True)
    assert re.fullmatch(
        r"--onnx: onnxruntime \S+ cannot run on the CPU the exported mine.py:Half: .*; use operations in float32, or leave it out",
        str(error.value),
    )
    columns = records(50)
    trained.write(tmp_path / "out")
    np.testing.assert_allclose(
        served(tmp_path / "out").load().predict(columns, logits=True), trained.logits(columns), rtol=1e-6, atol=1e-6
    )


def test_tables_may_stay_parquet_and_the_folder_is_checked(tmp_path: Path) -> None:
    trained = ModelInMemory.of("model_cases:Sum", FEATURES)
    about = trained.write(tmp_path / "out", most_rows=20)
    assert {table["name"]: table["at"] for table in about["tables"]} == {
        "place": "parquet",
        "ad": "safetensors",
        "sites": "parquet",
    }
    module, columns = served(tmp_path / "out"), records(64)
    assert module.load().predict(columns, logits=True).tobytes() == trained.logits(columns).tobytes()
    # A forward of one's own ids.
    loaded = module.load()
    dense, lookups = loaded.encode(columns)
    with pytest.raises(ValueError, match=r"table ad: ids must be in 0 \.\. 29; got 0 \.\. 30"):
        loaded(dense, lookups | {"ad": torch.arange(64) % 31})
    with pytest.raises(ValueError, match="feature ad must have a bag for each of 64 samples, with a value in each"):
        loaded(dense, lookups | {"ad": (torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64))})
    assert "example" not in json.dumps(about)
    (tmp_path / "out" / "rows-place.parquet").unlink()
    with pytest.raises(ValueError, match=r"rows-place.parquet must have \d+ bytes; it is missing; copy it again"):
        module.load()


class _CreatesAFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def _entry(path_name: str, use_pickle: bool) -> bytes:
    """A list of tensors with one entry."""
    device, nothing = {"type": "cpu", "index": None}, {"as_int": 0}
    meta = {
        "dtype": 1,
        "sizes": [],
        "requires_grad": False,
        "device": device,
        "strides": [],
        "storage_offset": nothing,
        "layout": 7,
    }
    entry = {"path_name": path_name, "is_param": False, "use_pickle": use_pickle, "tensor_meta": meta}
    return json.dumps({"config": {"c": entry}}).encode()


_CONSTANTS = "data/constants/model_constants_config.json"
PICKLED: list[tuple[str, dict[str, bytes]]] = [
    ("data/sample_inputs/model.pt", {}),
    ("data/weights/model.pt", {}),
    ("data/constants/model.pt", {}),
    ("data/weights/weight_0", {"data/weights/model_weights_config.json": _entry("weight_0", True)}),
    ("data/constants/tensor_0", {_CONSTANTS: _entry("tensor_0", True)}),
    ("data/constants/opaque_obj_0", {_CONSTANTS: _entry("opaque_obj_0", True)}),
    ("data/constants/opaque_obj_0", {_CONSTANTS: _entry("opaque_obj_0", False)}),
    ("data/weights/../opaque_obj_0", {"data/weights/model_weights_config.json": _entry("../opaque_obj_0", True)}),
]


@pytest.mark.parametrize(("member", "others"), PICKLED, ids=[f"{member}-{k}" for k, (member, _) in enumerate(PICKLED)])
def test_what_torch_would_unpickle_is_refused_before_it_is(tmp_path: Path, member: str, others: dict[str, bytes]) -> None:
    module, whole = _written(tmp_path)
    evil = _repacked(whole, tmp_path / "evil.pt2", others | {member: pickle.dumps(_CreatesAFolder(tmp_path / "created"))})
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.export.load(evil)
    assert (tmp_path / "created").exists()  # so the file does what it is made for
    (tmp_path / "created").rmdir()
    with pytest.raises(ValueError, match="must hold a graph, weights and tensor constants alone, nothing pickled; got data/"):
        module.read_program(evil)
    assert not (tmp_path / "created").exists()


def test_members_that_no_export_has_are_refused(tmp_path: Path) -> None:
    """Libraries, extra files, the container of older versions, objects of TorchScript, and a second member of a name."""
    module, whole = _written(tmp_path)
    module.read_program(whole)
    for member in (
        "data/aotinductor/model/x.so",
        "extra/x",
        "data/constants/custom_obj_0",
        "models/other.json",
        "MODELS/model.json",
    ):
        with pytest.raises(ValueError, match=f"nothing pickled; got {member}"):
            module.read_program(_repacked(whole, tmp_path / "other.pt2", {member: b"{}"}))
    with zipfile.ZipFile(tmp_path / "older.pt2", "w") as older:
        older.writestr("version", "8.8")
        older.writestr("serialized_state_dict.pt", pickle.dumps(_CreatesAFolder(tmp_path / "created")))
    with pytest.raises(ValueError, match="must have each member once"):
        module.read_program(tmp_path / "older.pt2")
    twice = _repacked(whole, tmp_path / "twice.pt2", {})
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"")
    with pytest.raises(ValueError, match="must have each member once"):
        module.read_program(twice)
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/hostname", "a/b", "..", ""])
def test_an_export_names_files_of_its_own_folder_alone(tmp_path: Path, name: str) -> None:
    module, _ = _written(tmp_path)
    path = tmp_path / "out" / "features.json"
    about = json.loads(path.read_text())
    for changed in (
        about | {"files": about["files"] | {name: {"bytes": 1, "sha256": ""}}},
        about | {"program": name},
        about | {"tables": [told | {"file": name} for told in about["tables"]]},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(
            ValueError, match=r"features\.json must (name files in the folder|list each file that it names); got "
        ):
            module.load()


class _Subclass(torch.Tensor):
    """A kind of tensor of which torch.export.save pickles the constants."""


class _HasSubclass(torch.nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).as_subclass(_Subclass))

    def forward(self, dense: Tensor, embeddings: Any) -> Any:
        return dense.sum(1) * self.scale


def test_a_model_whose_constants_torch_pickles_is_refused(tmp_path: Path) -> None:
    trained = ModelInMemory.of("model_cases:Sum", FEATURES)
    block = dense_program.BlockModel(_HasSubclass(), BlockLayout.of(trained.features, trained.layouts), 0)
    program = dense_program.trace(block, len(trained.features.dense), "mine")
    with pytest.raises(ExportError, match=r"--format torch: mine has weights or constants that torch .* pickles"):
        dense_program.write_program(program, tmp_path / "dense.pt2", block, len(trained.features.dense), "mine")


def _written(tmp_path: Path) -> tuple[Any, Path]:
    """model.py of an export with a tensor constant, and its program."""
    ModelInMemory.of("model_cases:Sum", FEATURES).write(tmp_path / "out")
    return served(tmp_path / "out"), tmp_path / "out" / "dense.pt2"


def _repacked(whole: Path, to: Path, changed: dict[str, bytes]) -> Path:
    """A program with other members, or more."""
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(to, "w") as copy:
        root = archive.namelist()[0].partition("/")[0]
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        for name, data in (members | changed).items():
            copy.writestr(f"{root}/{name}", data)
    return to


def test_several_labels_come_by_name_and_numbers_as_they_are(tmp_path: Path) -> None:
    """A module of two outputs, whatever says so: model.py has it from features.json."""
    trained = ModelInMemory.of("model_cases:Sum", FEATURES)
    trained.write(tmp_path / "out")
    module = served(tmp_path / "out")
    loaded = module.load()
    labels = [{"name": "clicked", "kind": "click"}, {"name": "price", "kind": "number"}]
    one = loaded.program
    twice = SimpleNamespace(stack=lambda dense, block: torch.stack([one(dense, block), 2 * one(dense, block)], 1))
    both = module.Model(loaded.about | {"labels": labels}, loaded.encoder, list(loaded.tables), twice.stack)
    columns = records(30)
    logits = trained.logits(columns)
    told = both.predict(columns, batch_size=30)
    assert told["price"].tobytes() == (2 * logits).tobytes()
    assert told["clicked"].tobytes() == loaded.predict(columns).tobytes()
    assert both.predict([])["price"].shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most_rows": -1}, "--most-rows: must be at least 0; got -1"),
        ({"onnx": True, "program": False}, "--onnx: is made from the program"),
        ({"key": "emb:{table}"}, "--key: is for --rows-at"),
        ({"rows_at": "redis://here"}, "--rows-at: is for tables with more rows than --most-rows"),
        ({"rows_at": "redis://here", "most_rows": 0}, "--key: is missing"),
        ({"rows_at": "redis://here", "most_rows": 0, "key": "emb"}, "--key: must have {table}"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message.split("{")[0]) as error:
        export_torch.run(str(tmp_path / "none"), None, str(tmp_path / "out"), TorchOptions(**options))
    assert str(error.value).startswith(message)


def test_onnx_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_program, "_ONNX_PACKAGES", ("onnx", "not_there"))
    with pytest.raises(ExportError, match=r"--onnx: needs not_there, which is not installed: pip install 'foreload\[onnx\]'"):
        export_torch.run(str(tmp_path / "none"), None, str(tmp_path / "out"), TorchOptions(onnx=True))

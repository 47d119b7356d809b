"""Write the folder of `foreload export --format torch`.

It has the tables, the dense part, the encoding of raw values, and the code that reads them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

from foreload.base.codec import to_stored
from foreload.base.files import write_json
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples import transforms
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.layouts import BlockLayout, model_spec
from foreload.trainer.errors import ExportError, after_step
from foreload.trainer.models import generators, inference
from foreload.trainer.models.building import load_model
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.run.manifest import inexact_text
from foreload.trainer.saved.model_encoder import encoder_of
from foreload.trainer.saved.model_rows import ModelRows, RowsByTable
from foreload.trainer.saved.saved_model import SavedModel
from foreload.trainer.saved.trained_model import dense_module
from foreload.trainer.serving import own_module, plain_files, raw_values, standalone
from foreload.trainer.serving.dense_program import BlockModel, check_dense, synthetic_inputs, trace, write_onnx, write_program
from foreload.trainer.serving.format import ExportRows, TableWriter, file_entries
from foreload.trainer.serving.plain_files import weights_of

PROGRAM, ONNX, WEIGHTS, CODE, README = "dense.pt2", "dense.onnx", "dense.safetensors", "model.py", "README.md"
TRIED = "tried.safetensors"
_PARTS = (raw_values, transforms, plain_files, generators, inference, own_module, standalone)
_TRIED = 3  # synthetic samples whose logits are stored with the weights


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """The contents of the folder.

    Attributes:
        program: whether the dense part is a program of torch.export. If False, it is only its
            parameters and buffers.
        onnx: whether the dense part is also written as ONNX.
        most_rows: tables with more trained rows stay Parquet or, if `rows_at` is given, on a
            server. If None, there is no limit.
        rows_at: the URL of the server that has the rows of these tables.
        key: the keys of these rows, in the form of `foreload apply --key`.
    """

    program: bool = True
    onnx: bool = False
    most_rows: int | None = None
    rows_at: str | None = None
    key: str | None = None

    def place(self, rows: int) -> str:
        """Return where a table is kept, as features.json states it.

        Args:
            rows: the number of trained rows of the table.
        """
        if self.most_rows is None or rows <= self.most_rows:
            return "safetensors"
        return "parquet" if self.rows_at is None else "redis"


def write_folder(model: SavedModel, folder: Path, of_model: Mapping[str, Any], options: TorchOptions) -> dict[str, Any]:
    """Write the files of the folder, and features.json last.

    Args:
        folder: an empty folder.
        of_model: "step", "state", "seed", "model" and "inexact" of the model.
        options: the contents of the folder.

    Returns:
        The contents of features.json.

    Raises:
        ExportError: the model cannot be exported in this way.
        OSError: a file cannot be written.
    """
    features, encoder = encoder_of(model)
    spec = model_spec(features, model.job.dim)
    about = {
        **of_model,
        "format": standalone.FORMAT,
        "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
        "labels": [{"name": name, "kind": kind} for name, kind in zip(spec.labels, spec.label_kinds, strict=True)],
        "headers": _headers(features),
        **encoding_of(features, encoder),
        "rows_at": None if options.rows_at is None else {"url": options.rows_at, "key": options.key},
        **_write_dense(model, folder, options),
    }
    about["tables"] = list(_write_tables(model, folder, encoder, options))
    (folder / CODE).write_text(standalone_source(), encoding="utf-8")
    (folder / README).write_text(_readme(about), encoding="utf-8")
    about["files"] = file_entries(folder)
    write_json(folder / standalone.ABOUT, about, durable=True)
    if not options.program:
        _try_weights(model, folder)
    return about


def _try_weights(model: SavedModel, folder: Path) -> None:
    """Load the folder as its user does, with only the class of the model.

    Raises:
        ExportError: the loaded model gives other logits.
    """
    try:
        standalone.load(folder, module=load_model(model.job.model, model.job.model_folder))
    except ValueError as error:
        raise ExportError(
            f"--dense weights: {model.job.model} cannot be built again as it was trained: {error}; "
            "keep the random numbers that its constructor draws in buffers, or "
            "leave out --dense weights"
        ) from error


def standalone_source() -> str:
    """Return the source of model.py.

    It is the source of its parts, one after the other, without their imports from foreload.
    """
    first, *others = (Path(module.__file__ or "").read_text(encoding="utf-8") for module in _PARTS)
    parts = [_without_imports(first, {"foreload"}), *(_without_imports(part, {"foreload", "__future__"}, 1) for part in others)]
    return f"\n\n# -- {'-' * 130}\n".join(parts)


def _without_imports(source: str, packages: set[str], first: int = 0) -> str:
    """Return a module's source without its imports from packages, and its first statements.

    Args:
        first: how many statements to leave out. The first one is the docstring.
    """
    lines = source.splitlines(keepends=True)
    statements = ast.parse(source).body
    gone = statements[:first] + [
        statement
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] in packages
    ]
    for statement in gone:
        lines[statement.lineno - 1 : statement.end_lineno] = [""] * ((statement.end_lineno or 0) - statement.lineno + 1)
    return "".join(lines)


# -- The dense part --------------------------------------------------------------------------------


def _write_dense(model: SavedModel, folder: Path, options: TorchOptions) -> dict[str, Any]:
    name, width = model.job.model, len(model.features.dense)
    module, layout = dense_module(model).requires_grad_(False), BlockLayout.of(model.features, model.layouts)
    block = BlockModel(module, layout, model.step + 1).eval()
    check_dense(block, width, name)
    written: dict[str, Any] = {
        "program": None,
        "onnx": None,
        "weights": None,
        "tried": None,
        "mixes_samples": mixes_samples(module),
    }
    if not options.program:
        return written | _write_weights(model, folder, block, width)
    program = trace(block, width, name)
    write_program(program, folder / PROGRAM, block, width, name)
    if options.onnx:
        write_onnx(program, folder / ONNX, block, width, name)
        written["onnx"] = ONNX
    return written | {"program": PROGRAM}


def _write_weights(model: SavedModel, folder: Path, block: BlockModel, width: int) -> dict[str, Any]:
    """Write the parameters and buffers, and the logits of synthetic samples.

    By these logits, `load` verifies that it has the same module.
    """
    (folder / WEIGHTS).write_bytes(save({name: value.clone().contiguous() for name, value in weights_of(block.module).items()}))
    dense, rows = synthetic_inputs(block, width, _TRIED)
    with torch.no_grad():
        logits = block(dense, rows).contiguous()
    (folder / TRIED).write_bytes(save({"dense": dense, "block": rows, "logits": logits}))
    return {"weights": WEIGHTS, "tried": TRIED}


# -- Encoding --------------------------------------------------------------------------------------


def encoding_of(features: FeatureSpec, encoder: Encoder) -> dict[str, Any]:
    """Return the part of features.json that describes the encoding, without the rows of tables."""
    columns = {
        "dense": _dense_columns(features, encoder),
        "features": [feature.encoding_entries() for feature in features.features],
    }
    return {"rule": features.rule, **columns, "text": asdict(features.text)}


def _dense_columns(features: FeatureSpec, encoder: Encoder) -> list[dict[str, Any]]:
    entries = []
    for place, dense in enumerate(features.dense):
        scale = encoder.scales[place] if dense.scaled else None
        entries.append(to_stored(dense) | ({} if scale is None else {"origin": scale.origin.hex(), "unit": scale.unit.hex()}))
    return entries


def _headers(features: FeatureSpec) -> list[list[str]]:
    """Return the possible headers of files that have no header line.

    A file has all columns, all but the labels, or all but labels and weights. Returns an empty list
    if files have a header line.
    """
    labels, needed = {label.column for label in features.labels}, features.unlabelled().columns
    choices = [
        [name for name in features.text.columns if name not in left_out or name in needed]
        for left_out in (set(), labels, labels | {features.weight})
    ]
    return choices if features.text.columns else []


# -- Tables ----------------------------------------------------------------------------------------


def _write_tables(model: SavedModel, folder: Path, encoder: Encoder, options: TorchOptions) -> Iterator[dict[str, Any]]:
    """Write each table, and yield its entry in features.json."""
    batches = RowsByTable(model.rows())
    for layout, rows in zip(model.layouts, model.row_counts().tolist(), strict=True):
        name, at = quote(layout.name, safe=" "), options.place(rows)
        entry: dict[str, Any] = {
            "name": layout.name,
            "table_rows": layout.rows,
            "parts": [list(part) for part in layout.parts],
            "initial": layout.initial,
            "rows": rows,
            "at": at,
        }
        if (vocabulary := encoder.vocabularies.get(layout.table)) is not None:
            entry["vocabulary"] = f"vocabulary-{name}.parquet"
            pq.write_table(pa.table({"value": vocabulary.values}), folder / entry["vocabulary"], compression="zstd")
        own = batches.of(layout.table)
        if at == "redis":
            # The rows are read only to be checked, as those of all other tables are.
            for _ in own:
                pass
        else:
            entry["file"] = f"rows-{name}.{at}"
            (_write_tensors if at == "safetensors" else _write_parquet)(folder / entry["file"], layout, rows, own)
        yield entry


def _write_tensors(path: Path, layout: RowLayout, rows: int, batches: Iterable[ModelRows]) -> None:
    """Write ids int64 [rows] and weights float32 [rows, W] in the format of safetensors.

    One batch is in memory at a time.
    """
    ids_bytes, row_bytes = 8 * rows, 4 * layout.width
    entries = {
        "ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, ids_bytes]},
        "weights": {"dtype": "F32", "shape": [rows, layout.width], "data_offsets": [ids_bytes, ids_bytes + rows * row_bytes]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    count = 0
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        first = file.tell()
        for batch in batches:
            file.seek(first + 8 * count)
            file.write(np.ascontiguousarray(batch.ids, "<i8").data)
            file.seek(first + ids_bytes + count * row_bytes)
            file.write(np.ascontiguousarray(batch.weights, "<f4").data)
            count += len(batch.ids)
    assert count == rows


def _write_parquet(path: Path, layout: RowLayout, rows: int, batches: Iterable[ModelRows]) -> None:
    """Write rows as an export does, without the optimizer's state."""
    with TableWriter(path, replace(layout, optimizer="sgd"), has_values=False) as writer:
        for batch in batches:
            writer.add(ExportRows(batch.ids, batch.weights, batch.state[:, :0]))
    assert writer.rows == rows


# -- The README ------------------------------------------------------------------------------------


def _readme(about: Mapping[str, Any]) -> str:
    """Return the contents of README.md."""
    columns = list(dict.fromkeys(entry["column"] for entry in (*about["dense"], *about["features"])))
    given = "" if about["program"] else ", module=Net"
    names = ", ".join(f'"{name}": ...' for name in columns[:3]) + (", ..." if len(columns) > 3 else "")
    lines = [
        f"# A model trained by foreload: {about['model']['model']}, {after_step(about['step'])}",
        "",
        "```python",
        "from model import load",
        "",
        f'model = load("."{given})',
        f"model.predict([{{{names}}}])",
        "```",
        "",
        "`predict` takes raw records: a list of dicts, a dict of columns, a table of Arrow or a data frame. `python model.py FILE.csv` writes the "
        "predictions of a file to stdout. `model` is a `torch.nn.Module`; its `forward(dense, lookups)` takes what `model.encode(records)` gives.",
        "",
        f"- columns: {', '.join(columns)}",
        f"- labels: {', '.join(label['name'] for label in about['labels'])}",
        f"- written with foreload's format {about['format']}, torch {about['versions']['torch']}, NumPy {about['versions']['numpy']}",
        "",
    ]
    if not about["program"]:
        lines.insert(
            8, f"`Net` is {about['model']['model']}, or a module that it built: {WEIGHTS} has its parameters and buffers.\n"
        )
    if about["mixes_samples"]:
        lines.append(
            "An output depends on the other samples of its call, as the model declares (`mixes_samples`): "
            "scores depend on the other records of the call.\n"
        )
    if about["rows_at"] is not None:
        lines.append(
            f"Tables without a file here are looked up at {about['rows_at']['url']}, where `foreload apply` writes them.\n"
        )
    if about["inexact"] is not None:
        lines.append(f"{inexact_text(about['inexact']).capitalize()}.\n")
    return "\n".join(lines)

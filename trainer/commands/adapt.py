"""`foreload adapt`: write the skeleton of a model by the contract for a PyTorch module that `wrap` refuses.

The skeleton passes `foreload check-model` at once. Its user completes forward.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at
from foreload.trainer.models.feature_text import FeatureFile, WrappedFeature
from foreload.trainer.models.importing import load_named
from foreload.trainer.models.lookups import feature_name
from foreload.trainer.models.own_code import found_file, search_folders
from foreload.trainer.models.tables import TorchTable

_SKELETON = '''\
"""{name} as a model of foreload, by the contract in docs/models.md. Its tables are the features of {features}.

Complete forward. Until then the logits are a linear function of the rows and the dense values.
"""

import torch
from torch import nn

from {module} import {name}

# The paths of each table in the module, by feature.
TABLES = {{
{tables}
}}


class Adapted(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.names = spec.names
        self.net = {name}()
        for paths in TABLES.values():
            for path in paths:
                parent, _, last = path.rpartition(".")
                setattr(self.net.get_submodule(parent), last, nn.Identity())
        self.start = nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings):
        # dense: float32 [b, n], the values of spec.dense_names. The row of each feature:
{rows}
        # Put here what the module does with these rows, by the layers of self.net, and return its
        # logits, [b], without a final sigmoid.
{source}
        return self.start(torch.cat([dense, *(embeddings[name] for name in self.names)], dim=1)).squeeze(1)
'''


@dataclass(frozen=True, slots=True)
class Adapted:
    """The files that were written.

    Attributes:
        model: the name of the new model, as `--model` takes it.
        features: the feature file.
        tables: the features, one for each table of the module.
    """

    model: str
    features: str
    tables: list[str]

    def text(self) -> str:
        """Return what was written, and what to do with it."""
        return (
            f"{self.model}: a skeleton with {len(self.tables)} feature{'s' * (len(self.tables) != 1)}, {', '.join(self.tables)}; their columns are "
            f"in {self.features}\ncomplete forward and the columns, then: foreload check-model {self.model} --features {self.features}"
        )


def run(name: str, folder: str, out: str, overwrite: bool = False) -> Adapted:
    """Write OUT.py, a skeleton for a module, and OUT.toml, its feature file.

    Args:
        name: file.py:Class or package.module:Class of the module, or a function that builds it.
            Neither may need arguments.
        folder: the folder to search for the file.
        out: the file of the skeleton, beside the file that it imports.
        overwrite: whether to replace existing files.

    Raises:
        ModelError: the module cannot be built or has no tables, or a file cannot be written.
    """
    source, own_name = _checked_name(name)
    skeleton = Path(out)
    if skeleton.suffix != ".py" or not skeleton.stem.isidentifier():
        raise ModelError(f"--out: must be a file NAME.py, whose name Python can import; got {out!r}")
    module = _built(name, folder)
    beside = Path(found_file(source, search_folders(folder))).parent if source.endswith(".py") else None
    if beside is not None and beside.resolve() != skeleton.parent.resolve():
        raise ModelError(f"--out: must be beside {source}, which it imports; got {out!r}; give {beside / skeleton.name}")
    features = skeleton.with_suffix(".toml")
    if beside is not None and skeleton.name == Path(source).name:
        raise ModelError(f"--out: must not be {source} itself; give another name")
    for path in (skeleton, features):
        if path.exists() and not overwrite:
            raise ModelError(f"--out: {path} exists; give another name, or --overwrite to replace it")
    paths = _tables(module)
    described = [WrappedFeature(table.name, table, table.name) for table in paths]
    text = _text(module, own_name, Path(source).stem if beside is not None else source, paths, features.name)
    try:
        features.unlink(missing_ok=True)
        FeatureFile(own_name, described, (), ()).write(features, ("label",), "id")
        skeleton.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--out: cannot write {error.filename or out} ({error.strerror}); give another path") from error
    return Adapted(f"{skeleton.name if beside is not None else skeleton}:Adapted", str(features), [table.name for table in paths])


def _checked_name(name: str) -> tuple[str, str]:
    """Return the file or module of a model, and its name there."""
    source, _, own_name = name.partition(":")
    stem = Path(source).stem if source.endswith(".py") else source
    if not own_name.isidentifier() or not stem.replace(".", "_").isidentifier():
        raise ModelError(f"MODEL: must be file.py:Class or package.module:Class, of names that Python can import; got {name!r}")
    return source, own_name


def _built(name: str, folder: str) -> nn.Module:
    build = load_named("MODEL", name, name, folder)
    try:
        module = build()
    except Exception as error:  # a user's constructor may raise anything
        raise ModelError(
            f"MODEL: {name}() failed: {type(error).__name__}: {error}{raised_at(error)}; if it needs arguments, give a function that builds it: "
            "def net(): return Net(...)"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"MODEL: {name}() must return a torch.nn.Module; got {type(module).__name__}")
    return module


def _tables(module: nn.Module) -> dict[TorchTable, list[str]]:
    """Return the tables of a module, each with its paths there."""
    paths: dict[nn.Embedding | nn.EmbeddingBag, list[str]] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and path:
            paths.setdefault(layer, []).append(path)
    if not paths:
        raise ModelError(
            f"MODEL: {type(module).__name__} has no nn.Embedding or nn.EmbeddingBag, so there is nothing to adapt; use wrap"
        )
    tables = {}
    for layer, own in paths.items():
        # foreload pools by sum or mean.
        mode = ("sum" if layer.mode == "sum" else "mean") if isinstance(layer, nn.EmbeddingBag) else "single"
        table = TorchTable(feature_name(own[0]), layer.num_embeddings, layer.embedding_dim, mode, padding=layer.padding_idx)
        tables[table] = own
    if len({table.name for table in tables}) < len(tables):
        raise ModelError(f"MODEL: {type(module).__name__} has two tables whose paths differ only in . and _; rename one of them")
    return tables


def _text(module: nn.Module, name: str, imported: str, tables: Mapping[TorchTable, list[str]], features: str) -> str:
    rows = [f"        #   embeddings[{json.dumps(table.name)}]: float32 [b, {table.dimension}]" for table in tables]
    named = [f"    {json.dumps(table.name)}: {json.dumps(paths)},  # {table.rows:,} rows" for table, paths in tables.items()]
    filled: dict[str, Any] = {"name": name, "module": imported, "features": features}
    return _SKELETON.format(**filled, tables="\n".join(named), rows="\n".join(rows), source=_quoted_forward(module))


def _quoted_forward(module: nn.Module) -> str:
    """Return the source of a module's forward as comments, or an empty comment if it is not known."""
    try:
        lines = textwrap.dedent(inspect.getsource(type(module).forward)).splitlines()
    except (OSError, TypeError):
        lines = []
    return "\n".join(f"        #   {line}".rstrip() for line in ["", *lines])

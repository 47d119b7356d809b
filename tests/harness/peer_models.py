"""Model classes of other libraries, unchanged, and functions by which foreload trains them: `peer_models:deepctr_torch_DeepFM`.

The libraries are installed without what they depend on. Packages that they import and do not use here have stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import foreload

if TYPE_CHECKING:
    from foreload.trainer.models.spec import ModelSpec
    from foreload.trainer.models.wrapping import Wrapped

ROWS = {"user": 30, "item": 20, "site": 12, "hour": 24}
DENSE = ("age", "price")
SEEN = ("seen_0", "seen_1", "seen_2")
"""A sequence of items, of which the first `length` count, for the models that read one."""
IDS = (*ROWS, *SEEN)
NUMBERS = (*DENSE, "length")
"""The columns of ids, and those of dense values, in the data of every model."""
PROBABILITIES = {("deepctr_torch", "ESMM"), ("deepctr_torch", "MLR")}
"""Classes whose outputs are products or sums of probabilities, not those of a sigmoid: `Logits` is around them here."""
_UNUSED = ("sklearn", "sklearn.metrics", "sklearn.preprocessing", "pandas", "h5py", "requests")
_LABELS = ["clicked", "liked"]


def is_installed(library: str) -> bool:
    """Whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


class _StandIn(types.ModuleType):
    """A module that has every name, as a function that must not be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # What is imported meanwhile may ask whether the package is there, as torch._dynamo does.
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unused(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} is only a stand-in")

        return unused


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Let imports of unused packages succeed. What is there before is there afterwards."""
    before = {name: sys.modules.get(name) for name in _UNUSED}
    sys.modules.update({name: _StandIn(name) for name in _UNUSED})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def classes() -> dict[str, tuple[str, ...]]:
    """The model classes of each library that is installed."""
    known = {
        "deepctr_torch": (
            "AFM AFN AutoInt CCPM DCN DCNMix DIEN DIFM DIN DeepFM ESMM FiBiNET IFM MLR MMOE NFM ONN PLE PNN SharedBottom WDL xDeepFM"
        ),
        "torchfm": (
            "afi.AutomaticFeatureInteractionModel afm.AttentionalFactorizationMachineModel afn.AdaptiveFactorizationNetwork "
            "dcn.DeepCrossNetworkModel "
            "dfm.DeepFactorizationMachineModel ffm.FieldAwareFactorizationMachineModel fm.FactorizationMachineModel "
            "fnfm.FieldAwareNeuralFactorizationMachineModel fnn.FactorizationSupportedNeuralNetworkModel lr.LogisticRegressionModel "
            "ncf.NeuralCollaborativeFiltering nfm.NeuralFactorizationMachineModel pnn.ProductNeuralNetworkModel wd.WideAndDeepModel "
            "xdfm.ExtremeDeepFactorizationMachineModel"
        ),
        "fuxictr": (
            "AFM AFN AOANet AutoInt CCPM DCN DCNv2 DESTINE DIN DLRM DNN DSSM DeepCrossing DeepFM DeepIM EDCN FFM FFMv2 FGCNN FLEN FM "
            "FiBiNET FiGNN FmFM "
            "FwFM HFM HOFM InterHAt LR LorentzFM MaskNet NFM ONN ONNv2 PNN SAM WideDeep xDeepFM"
        ),
    }
    return {library: tuple(names.split()) for library, names in known.items() if is_installed(library)}


def build(library: str, name: str) -> nn.Module:
    """A module of the library's own, small and without dropout, under the seed that torch has now."""
    with _stand_ins():
        module = _BUILDERS[library](name)
    return Logits(module) if (library, name) in PROBABILITIES else module


class Logits(nn.Module):
    """The logits of a model that returns probabilities."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, X: Tensor) -> Tensor:
        return torch.logit(self.net(X))


def _given(kind: type, **wanted: Any) -> dict[str, Any]:
    """Those settings that a constructor takes."""
    return {name: value for name, value in wanted.items() if name in inspect.signature(kind).parameters}


def _deepctr_torch(name: str) -> nn.Module:
    inputs, models = (importlib.import_module(f"deepctr_torch.{part}") for part in ("inputs", "models"))
    kind = getattr(models, name)
    columns = [inputs.SparseFeat(column, rows, embedding_dim=4) for column, rows in ROWS.items()]
    columns += [inputs.DenseFeat(column) for column in DENSE]
    small = _given(
        kind, dnn_hidden_units=(8,), expert_dnn_hidden_units=(8,), tower_dnn_hidden_units=(6,), bottom_dnn_hidden_units=(8,),
        gate_dnn_hidden_units=(6,),
        afn_dnn_hidden_units=(8,), cin_layer_size=(8, 6), conv_kernel_width=(3, 2), conv_filters=(2, 2), num_experts=2, region_num=2,
        task_types=["binary", "binary"], task_names=_LABELS, device="cpu", dnn_dropout=0, init_std=0.3, att_activation="relu",
    )  # fmt: skip
    if reads_sequence(name):
        items = inputs.SparseFeat("hist_item", ROWS["item"], 4, embedding_name="item")
        sequence = inputs.VarLenSparseFeat(items, len(SEEN), length_name="length")
        return kind([*columns, sequence], ["item"], **small)
    if "linear_feature_columns" in inspect.signature(kind).parameters:
        # These two take dense values in their linear part alone.
        return kind(columns, columns[: len(ROWS)] if name in ("AFM", "CCPM") else columns, **small)
    return kind(columns, **small)


def _torchfm(name: str) -> nn.Module:
    file, _, kind_name = name.partition(".")
    kind = getattr(importlib.import_module(f"torchfm.model.{file}"), kind_name)
    dropouts = (0.0, 0.0)
    return kind(
        list(ROWS.values()),
        **_given(
            kind, embed_dim=4, mlp_dims=(8,), dropout=0.0, dropouts=dropouts, attn_size=4, atten_embed_dim=4, num_heads=2, num_layers=2, LNN_dim=5,
            cross_layer_sizes=(6, 6), user_field_idx=[0], item_field_idx=[1],
        ),
    )  # fmt: skip


class _OfX(nn.Module):
    """A model of FuxiCTR, which takes the label with the features, called with the features."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, X: Tensor) -> Tensor:
        logits: Tensor = self.net((X, X.new_zeros(X.shape[0], 1)))["y_pred"]
        return logits


def _fuxictr(name: str) -> nn.Module:
    models, features = importlib.import_module("fuxictr.pytorch.models"), importlib.import_module("fuxictr.features")
    kind, described = getattr(models, name), features.FeatureMap("clicks", "data")
    described.feature_specs = OrderedDict(
        {
            column: {"source": column if column in ("user", "item") else "context", "type": "categorical", "vocab_size": rows}
            for column, rows in ROWS.items()
        }
    )
    if reads_sequence(name):
        sequence = {"source": "user", "type": "sequence", "vocab_size": ROWS["item"], "max_len": len(SEEN), "padding_idx": 0}
        described.feature_specs["seen"] = sequence
    described.num_fields, described.num_features = len(described.feature_specs), sum(ROWS.values())
    described.set_feature_index()
    units = [8, 8]
    return _OfX(
        kind(
            described, gpu=-1, verbose=0, metrics=["AUC"], model_root="models", optimizer="adam", loss="binary_crossentropy",
            **_given(
                kind, embedding_dim=4, hidden_units=units, dnn_hidden_units=units, parallel_dnn_hidden_units=units, cin_layer_units=units,
                residual_blocks=units,
                logarithmic_neurons=3, afn_hidden_units=units, ensemble_dnn=False, dnn_hidden_units_list=units, bottom_mlp_units=units,
                top_mlp_units=units, din_target_field=["item"], din_sequence_field=["seen"],
                attention_hidden_activations="ReLU", batch_norm=False,
            ),
        )
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[str], nn.Module]] = {"deepctr_torch": _deepctr_torch, "torchfm": _torchfm, "fuxictr": _fuxictr}


def reads_sequence(name: str) -> bool:
    """Whether a class reads a sequence."""
    return name in ("DIN", "DIEN")


def columns_of(library: str, name: str) -> list[str]:
    """The columns that the module itself is called with, in order."""
    sequence = SEEN if reads_sequence(name) else ()
    if library != "deepctr_torch":
        return [*ROWS, *sequence]
    return [*ROWS, *DENSE, *sequence, *(["length"] if sequence else [])]


def wrapped(library: str, name: str) -> Wrapped:
    """The module as foreload trains it."""
    return wrap_module(build(library, name), library, name)


def wrap_module(module: nn.Module, library: str, name: str) -> Wrapped:
    """A module that is called as the class is, as foreload trains it."""
    columns = columns_of(library, name)
    argument = next(iter(inspect.signature(module.forward).parameters))
    dense = [column for column in columns if column in NUMBERS]
    return foreload.wrap(module, columns={argument: columns}, dense={argument: dense} if dense else {})


def labels_of(name: str) -> list[str]:
    """The labels that a class predicts."""
    return _LABELS if name in ("ESMM", "MMOE", "PLE", "SharedBottom") else _LABELS[:1]


def given(library: str, name: str, ids: Tensor, dense: Tensor) -> Tensor:
    """What the module itself is called with, of IDS [b, 7] and NUMBERS [b, 3]."""
    values = {**dict(zip(IDS, ids.T, strict=True)), **dict(zip(NUMBERS, dense.T, strict=True))}
    together = torch.stack([values[column] for column in columns_of(library, name)], 1)
    return together if library == "torchfm" else together.float()


def function_name(library: str, name: str) -> str:
    """The name of the function here that foreload calls."""
    return f"{library}_{name.replace('.', '_')}"


def _define(library: str, name: str) -> None:
    """Define the function that wraps a class, and `own_` and its name, which builds the module itself."""

    def here(spec: ModelSpec) -> Wrapped:
        return wrapped(library, name)

    def own() -> nn.Module:
        return build(library, name)

    here.__name__ = function_name(library, name)
    own.__name__ = f"own_{here.__name__}"
    globals().update({here.__name__: here, own.__name__: own})


for _library, _names in classes().items():
    for _name in _names:
        _define(_library, _name)

"""Models of several labels: what forward must return, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor, nn

import foreload
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.built_in import MODELS
from foreload.trainer.models.checking import check_uses
from foreload.trainer.models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("cases_on_path")

ONE = ModelSpec(3, tuple((f"c{i}", 4, f"t{i}") for i in range(3)))
TWO = replace(ONE, labels=("clicked", "seconds"), label_kinds=("click", "number"))


@pytest.mark.parametrize("name", ["dlrm", "wide_deep", "dcn", "deepfm"])
def test_a_model_of_one_output_refuses_several_labels(name: str) -> None:
    assert name in MODELS
    with pytest.raises(ModelError, match=f"{name}: predicts one label; got 2: clicked, seconds; use shared_bottom or mmoe"):
        build_model(load_model(name), TWO, {}, 0)


@pytest.mark.parametrize("sigmoid", [-1, 1])
def test_a_model_has_an_output_for_each_label(sigmoid: int) -> None:
    # What is predicted of a number may be anything, also what a sigmoid gives.
    module = build_model(load_model("model_cases:Heads"), TWO, {"sigmoid": sigmoid}, 0)
    check_uses(module, TWO)


@pytest.mark.parametrize(
    ("case", "options", "spec", "message"),
    [
        ("Sum", {}, TWO, r"an output for each label, torch.float32 \[3, 2\] \(clicked, seconds\), for 3 samples; got torch.float32 \[3\]"),
        ("Heads", {}, ONE, r"must return logits, torch.float32 \[3\], for 3 samples; got torch.float32 \[3, 1\]"),
        ("Wide", {}, replace(ONE, label_kinds=("number",)), r"must return the predicted number, torch.float32 \[3\]"),
        ("Heads", {"sigmoid": 0}, TWO, "must return logits for clicked, and ends in a sigmoid"),
        ("AllProbable", {}, TWO, "must return logits for clicked, and ends in a sigmoid"),
        ("AllProbable", {}, replace(TWO, label_kinds=("number", "click")), "must return logits for seconds, and ends in a sigmoid"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_the_labels_are_refused(
    case: str, options: dict[str, object], spec: ModelSpec, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(load_model(f"model_cases:{case}"), spec, options, 0)


def test_a_number_may_come_out_of_a_sigmoid() -> None:
    build_model(load_model("model_cases:Probable"), replace(ONE, label_kinds=("number",)), {}, 0)


class _Towers(nn.Module):
    """It was written for PyTorch, and returns an output [b, 1] for each of several tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(9, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, user: Tensor) -> list[Tensor]:
        rows = self.user(user)
        return [head(rows) for head in self.heads]


def test_a_wrapped_module_may_return_a_list_of_outputs() -> None:
    spec = replace(TWO, dense_width=0, features=(("user", 4, "user"),))
    check_uses(build_model(lambda spec: foreload.wrap(_Towers()), spec, {}, 0), spec)

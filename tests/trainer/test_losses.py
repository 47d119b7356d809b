"""The loss that is trained: of labels of each kind, weighed, and of a user's own, of which most are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from foreload.trainer.compute.own_loss import check_loss, load_loss
from foreload.trainer.compute.training_loss import OwnLoss, TrainingLoss
from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("cases_on_path")

ONE = ModelSpec(3, (("c", 4, "t"),))
TWO = replace(ONE, labels=("clicked", "seconds"), label_kinds=("click", "number"))


def made_up(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, labels of clicks, and weights of samples."""
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return outputs, (outputs + 1 > 0).float(), torch.rand(shape[0], generator=torch.Generator().manual_seed(2)) * 3


def test_the_loss_of_one_label_of_clicks_is_torchs_in_one_operation() -> None:
    outputs, labels, _ = made_up(37)
    outputs.requires_grad_()
    loss = TrainingLoss(("click",), (1.0,)).of_slice(outputs, labels, None)
    expected = functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
    assert torch.equal(loss, expected)
    assert loss.grad_fn is not None
    assert expected.grad_fn is not None
    assert loss.grad_fn.name() == expected.grad_fn.name()


def test_labels_are_weighed_and_added_in_order_and_then_samples_are_weighed() -> None:
    outputs, labels, weights = made_up(37, 3)
    loss = TrainingLoss(("click", "number", "click"), (0.3, 1.0, 7.0))
    columns = [(outputs[:, place].clone(), labels[:, place].clone()) for place in range(3)]
    expected = functional.binary_cross_entropy_with_logits(*columns[0], reduction="none") * 0.3
    expected = expected + functional.mse_loss(*columns[1], reduction="none")
    expected = expected + functional.binary_cross_entropy_with_logits(*columns[2], reduction="none") * 7.0
    assert torch.equal(loss.of_slice(outputs, labels, None), expected.sum())
    assert torch.equal(loss.of_slice(outputs, labels, weights), (expected * weights).sum())
    evaluated = loss.of_evaluation(outputs, labels.numpy(), weights.numpy())
    assert evaluated is not None
    np.testing.assert_allclose(evaluated, (expected * weights).numpy(), rtol=1e-5)


def test_an_evaluation_tells_no_loss_of_its_own_where_that_is_the_log_loss() -> None:
    outputs, labels, weights = made_up(5)
    loss = TrainingLoss(("click",), (1.0,))
    assert loss.of_evaluation(outputs, labels[:, None].numpy(), None) is None
    assert loss.of_evaluation(outputs, labels[:, None].numpy(), weights.numpy()) is not None
    assert TrainingLoss(("number",), (1.0,)).of_evaluation(outputs, labels[:, None].numpy(), None) is not None


@pytest.mark.parametrize(("name", "spec"), [("focal", ONE), ("clicks_and_huber", TWO)])
def test_a_loss_of_ones_own_takes_the_place_of_the_labels(name: str, spec: ModelSpec) -> None:
    own = OwnLoss(f"loss_cases:{name}", load_loss(f"loss_cases:{name}"))
    check_loss(own, spec)
    outputs, labels, weights = made_up(*spec.output_shape(11))
    loss = TrainingLoss(spec.label_kinds, (1.0,) * len(spec.labels), own)
    assert torch.equal(loss.of_slice(outputs, labels, None), own.function(outputs, labels).sum())
    assert torch.equal(loss.of_slice(outputs, labels, weights), (own.function(outputs, labels) * weights).sum())
    evaluated = loss.of_evaluation(outputs, labels.reshape(11, -1).numpy(), None)
    assert evaluated is not None
    assert np.array_equal(evaluated, own.function(outputs, labels).double().numpy())


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("mean", ONE, r"must return a loss for each sample, torch.float32 \[5\], for 5 sample\(s\); got torch.float32 \[\]; .*reduction=\"none\""),
        ("mean", TWO, r"got torch.float32 \[\]; give one each, such as with reduction=\"none\""),
        ("by_label", TWO, r"got torch.float32 \[5, 2\]; add up those of its labels, such as .sum\(1\)"),
        ("double", ONE, r"got torch.float64 \[5\]"),
        ("number", ONE, "got float"),
        ("centred", ONE, r"a sample's loss must not depend on the other samples; alone it is .*, among others .*; lanes cut a batch into slices"),
        ("softmax", ONE, "must not depend on the other samples"),
        ("raising", ONE, r"failed: KeyError: 'no such luck' \(loss_cases.py, line \d+\)"),
        ("root", ONE, r"must give finite losses for synthetic samples \(.*\); got nan; look for a logarithm, root or division"),
        ("norm", ONE, "must give finite gradients for synthetic samples"),
        ("detached", ONE, "must have a gradient with respect to the outputs"),
        ("constant", ONE, "must have a gradient with respect to the outputs"),
        ("counting", ONE, "two calls with the same samples differ"),
        ("random", ONE, "two calls with the same samples differ; it must keep no state, and draw no random numbers"),
    ],
)  # fmt: skip
def test_losses_that_cannot_be_trained_are_refused(name: str, spec: ModelSpec, message: str) -> None:
    with pytest.raises(ModelError, match=f"--loss loss_cases:{name}: .*{message}"):
        check_loss(OwnLoss(f"loss_cases:{name}", load_loss(f"loss_cases:{name}")), spec)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("focal", "--loss: must be package.module:function or file.py:function; got 'focal'"),
        ("loss_cases:nothing", "--loss: cannot import loss_cases:nothing: AttributeError"),
        ("nowhere.py:focal", "FileNotFoundError: there is no file nowhere.py; looked for it in "),
        ("loss_cases:CALLS", "loss_cases:CALLS must be a function of outputs and labels; got list"),
        ("torch.nn:MSELoss", "must be a function of outputs and labels; got type"),
    ],
)
def test_what_is_no_loss_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_loss(name)

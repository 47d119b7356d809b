"""The loss that is trained: of clicks the cross-entropy, of numbers the squared error, or a user's own (docs/definitions.md, The loss)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreload.trainer.compute.metrics import log_losses, squared_errors
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Called with outputs and labels, both float32 [b] or [b, labels]: a loss for each sample, float32 [b]."""

_OF_KIND: dict[str, Callable[..., Tensor]] = {
    "click": functional.binary_cross_entropy_with_logits,
    "number": functional.mse_loss,
}
_EVALUATED = {"click": log_losses, "number": squared_errors}


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss of a user's own. name: as `--loss` has it."""

    name: str
    function: LossFunction

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A loss for each sample, float32 [b]. Raises ModelError where the function raises, or returns something else."""
        try:
            losses = self.function(outputs, labels)
        except Exception as error:  # a user's function may raise anything
            raise ModelError(f"--loss {self.name}: failed: {type(error).__name__}: {error}{raised_at(error)}") from error
        if not isinstance(losses, Tensor) or losses.shape != (len(outputs),) or losses.dtype != torch.float32:
            got = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            remedy = (
                "add up those of its labels, such as .sum(1)"
                if outputs.dim() > 1 and got.count(",")
                else 'give one each, such as with reduction="none"'
            )
            raise ModelError(
                f"--loss {self.name}: must return a loss for each sample, torch.float32 [{len(outputs)}], for {len(outputs)} sample(s); got {got}; "
                f"{remedy}"
            )
        return losses


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """What is trained. kinds: of the labels, "click" or "number"; label_weights: what the loss of each is multiplied by; own: in their place."""

    kinds: tuple[str, ...]
    label_weights: tuple[float, ...]
    own: OwnLoss | None = None

    def of_slice(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The sum over a slice's samples. outputs, labels: float32 [b] or [b, labels]; weights: of the samples, float32 [b], where they have any."""
        if weights is None and self._is_log_loss:
            return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
        losses = self._of_samples(outputs, labels)
        return (losses if weights is None else losses * weights).sum()

    def of_evaluation(self, outputs: Tensor, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
        """The loss of each sample of a slice, float64 [b]; None where that is the log loss. outputs: as forward gives them; labels: [b, labels]."""
        if weights is None and self._is_log_loss:
            return None
        if self.own is not None:
            given = torch.from_numpy(np.array(labels, np.float32)).to(outputs.device)
            losses = self.own(outputs, given.reshape(outputs.shape)).double().cpu().numpy()
        else:
            columns = outputs.cpu().numpy().reshape(labels.shape).T
            terms = zip(self.kinds, self.label_weights, columns, labels.T, strict=True)
            losses = sum(
                (weight * _EVALUATED[kind](column, label) for kind, weight, column, label in terms), np.zeros(len(labels))
            )
        return losses if weights is None else losses * weights.astype(np.float64)

    @property
    def _is_log_loss(self) -> bool:
        """Whether it is the log loss of one label, but for weights of the samples."""
        return self.own is None and self.kinds == ("click",)

    def _of_samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(outputs, labels)
        if outputs.dim() == 1:
            return _OF_KIND[self.kinds[0]](outputs, labels, reduction="none")
        total = None
        for kind, weight, column, label in zip(self.kinds, self.label_weights, outputs.unbind(1), labels.unbind(1), strict=True):
            # The bits of an operation may depend on whether its operands are contiguous.
            losses = _OF_KIND[kind](column.contiguous(), label.contiguous(), reduction="none") * weight
            total = losses if total is None else total + losses
        assert total is not None
        return total

"""Models of a user's own whose constructor draws random numbers, or whose forward keeps a state or takes the step."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec

AT_IMPORT = np.random.rand(4).astype(np.float32)  # noqa: NPY002
"""Drawn when the module is imported."""
CALLS = 0
DRAWS = np.random.default_rng(0)


class Net(nn.Module):
    """A hidden layer over all embeddings, with torch's initial weights: the others have its forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.names = spec.names
        self.hidden, self.out = nn.Linear(spec.width, 6), nn.Linear(6, 1)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        inputs = torch.cat([embeddings[name] for name in self.names], 1)
        return self.out(torch.relu(self.hidden(inputs))).squeeze(1) + dense.sum(1)


class Drawn(Net):
    """Its initial weights come from torch, NumPy and Python, as those of published models do."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.from_numpy(np.random.normal(0, 0.3, self.hidden.weight.shape)))  # noqa: NPY002
            self.hidden.bias[:4].copy_(torch.from_numpy(AT_IMPORT))
            self.out.bias.fill_(random.uniform(-0.5, 0.5))


class Annealed(Drawn):
    """Its outputs grow with the step, differently in evaluation. dropout: trainers that are threads share torch's generator, so 0 for them."""

    def __init__(self, spec: ModelSpec, *, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.dropout = dropout

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor], step: int) -> Any:  # type: ignore[override]
        assert type(step) is int
        inputs = torch.cat([embeddings[name] for name in self.names], 1)
        share = min(1.0, (step + 1) / 20) if self.training else 1 - 1 / (step + 2)
        hidden = nn.functional.dropout(torch.relu(self.hidden(inputs)), self.dropout, self.training)
        return self.out(hidden * share).squeeze(1) + dense.sum(1)


# -- Constructors that give another model each time ------------------------------------------------------------------------------------


class SystemParameter(Net):
    """A parameter from the system's random numbers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        nn.init.constant_(self.out.bias, os.urandom(4)[0] + 256 * os.urandom(1)[0])


class UnseededBuffer(Net):
    """A buffer from a generator of NumPy that is not seeded."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("noise", torch.from_numpy(np.random.default_rng().normal(size=3)))


class SharedGenerator(Net):
    """A parameter from a generator of its module, which goes on from one model to the next."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        nn.init.constant_(self.hidden.bias, DRAWS.normal())


class SystemAttribute(Net):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.shift = torch.tensor(np.random.default_rng().normal(), dtype=torch.float32)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + self.shift


class FirstBatch(Net):
    """It keeps the mean of the first samples that it sees."""

    mean: Tensor | None = None

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        logits = super().forward(dense, embeddings)
        if self.mean is None:
            self.mean = logits.detach().mean()
        return logits - self.mean


class OfProcess(Net):
    """A parameter that is the same in a process, and another one in the next."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        nn.init.constant_(self.out.bias, os.getpid() / 1e7)


class DriftsFrom(Net):
    """From step 30 on forward changes a parameter, in another way in each process: as no trial can show."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor], step: int) -> Any:  # type: ignore[override]
        if step >= 30:
            self.out.bias.data += os.getpid() / 1e7
        return super().forward(dense, embeddings)


# -- Forwards that keep a state --------------------------------------------------------------------------------------------------------


class Late(Net):
    """A count of calls, of which its outputs depend after 400."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.n = 0

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.n += 1
        return super().forward(dense, embeddings) * (1 if self.n <= 400 else 2)


class _Notes:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Holder:
    def __init__(self) -> None:
        self.notes = _Notes()
        self.holder = self  # a cycle


class Keeping(Net):
    """It changes what it keeps, in each of many places. place: which."""

    of_class: ClassVar[list[int]] = [0]

    def __init__(self, spec: ModelSpec, *, place: str = "int") -> None:
        super().__init__(spec)
        self.place = place
        self.held: Any = {
            "int": 0, "list": [], "dict": {"seen": 0}, "set": {0}, "array": np.zeros(3), "tensor": torch.zeros(2), "deep": {"a": [(_Holder(),)]},
            "count": itertools.count(), "torch generator": torch.Generator(), "numpy generator": np.random.default_rng(3),
            "python generator": random.Random(3), "module": [nn.Linear(1, 1)], "closure": _counter(), "big": [np.zeros(40_000)] * 3,
        }.get(place)  # fmt: skip

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self._change(self.held)
        return super().forward(dense, embeddings)

    def _change(self, held: Any) -> None:
        global CALLS
        match self.place:
            case "int":
                self.held += 1
            case "list":
                held.append(1)
            case "dict":
                held["seen"] += 1
            case "set":
                held.add(len(held))
            case "array":
                held[1] += 1
            case "big":
                held[0][39_999] += 1
            case "tensor":
                held[1] += 1
            case "deep":
                held["a"][0][0].notes.count += 1
            case "count":
                next(held)
            case "torch generator":
                torch.rand(1, generator=held)
            case "numpy generator" | "python generator":
                held.random()
            case "module":
                held[0].bias.data += 1
            case "closure":
                held()
            case "class":
                self.of_class[0] += 1
            case "global":
                CALLS += 1
            case "evaluation":
                self.held = (self.held or 0) + (not self.training)


def _counter() -> Callable[[], None]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add


class MovesParameter(Net):
    """Forward changes a parameter once, where it is above a bound."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        self.out.bias.data.clamp_(max=-2)
        return super().forward(dense, embeddings)


class SeldomNoise(Net):
    """It draws from NumPy's generator, which its outputs seldom show."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        return super().forward(dense, embeddings) + (1 if np.random.rand() < 1e-9 else 0)  # noqa: NPY002


class StepFirst(Net):
    """It takes the step before the embeddings."""

    def forward(self, dense: Tensor, step: int, embeddings: Mapping[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(dense, embeddings) * step


class Caching(Net):
    """It keeps what is the same for the same samples, or the same for ever: to be taken."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.masks: dict[int, Tensor] = {}
        self.longest = 0
        self.loss: Tensor | None = None
        self.drop = nn.Dropout(0.5)
        self.lock = threading.Lock()  # what cannot be read is left out
        self.names_seen: set[str] = set()

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
        mask = self.masks.setdefault(len(dense), torch.ones(len(dense)))
        self.longest = max(self.longest, len(dense))
        self.names_seen.update(embeddings)
        logits = self.drop(super().forward(dense, embeddings)) * mask
        self.loss = logits.square().mean()
        return logits

"""Whether a module's parts are in training or evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Within the context a module's modes may be changed; behind it each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training

"""Arrays in typed JSON: lists of numbers, nested once for each further dimension."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from foreload.base.codec import JsonForm


def _array(dtype: type) -> JsonForm:
    return JsonForm(list[Any], np.ndarray.tolist, lambda values: np.array(values, dtype))


Int64s = Annotated[np.ndarray, _array(np.int64)]

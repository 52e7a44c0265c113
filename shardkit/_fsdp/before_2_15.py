"""What torch 2.15 does by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def dtypes_of_frozen(units: Iterable[Any]) -> Iterator[None]:
    """In this context torch decides in which dtype a unit reduces, also where all of it is frozen,
    so that it can be unfrozen later. Local.

    torch asks the parameters that train. Without one it would reduce in the dtype of the gradients,
    and could not assign them (pytorch#186998).
    """
    frozen: list[Tensor] = []
    for unit in units:
        params = [param.sharded_param for param in unit.fsdp_params]
        floats = [param for param in params if param.is_floating_point()]
        dtypes = {param.dtype for param in floats}
        if len(dtypes) == 1 and not any(param.requires_grad for param in floats):
            frozen.append(floats[0].requires_grad_())
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)

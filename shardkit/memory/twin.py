"""The user's model with fake tensors in place of its own, for as long as a trace takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch import FakeTensorMode
from shardkit.plan import ShardingPlan
from shardkit.reach import undone


@contextmanager
def fake_tensors(model: nn.Module, plan: ShardingPlan, device: str = "cpu") -> Iterator[dict[str, nn.Parameter]]:
    """Run the body on fake tensors; yields the fake parameters by FQN.

    Parameters have the dtype that their unit computes in, as FSDP2 unshards them. When the body ends, however it
    ends, the model has its own tensors back, and whatever else it did to the modules is undone.
    """
    dtypes = {fqn: unit.mp_policy.param_dtype for unit in plan.units for fqn in unit.params}
    names = {id(param): name for name, param in model.named_parameters()}
    fakes: dict[int, Tensor] = {}
    with undone(model), FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: Tensor) -> Tensor:
            name = names.get(id(tensor))
            dtype = dtypes.get(name or "") or tensor.dtype
            value = torch.empty(tensor.shape, dtype=dtype, device=device)
            return value if name is None else nn.Parameter(value, requires_grad=tensor.requires_grad)

        places = list(_places(model))
        for _, _, tensor in places:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = fake(tensor)
        for registry, name, tensor in places:
            registry[name] = fakes[id(tensor)]
        yield {name: fakes[key] for key, name in names.items()}  # type: ignore[misc]


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where tensors hang in a model: parameters, buffers, and plain attributes."""
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for registry in registries:
            for name, value in list(registry.items()):
                if isinstance(value, Tensor):
                    yield registry, name, value


def fake_batch(batch: Any, device: str = "cpu") -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of a forward from what the user called a batch, with fake tensors in it; under a fake mode.

    A mapping holds keyword arguments, a tuple or list positional ones, anything else is the only argument.
    """
    if isinstance(batch, Mapping):
        return (), {name: _faked(value, device) for name, value in batch.items()}
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(_faked(value, device) for value in values), {}


def _faked(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.requires_grad)

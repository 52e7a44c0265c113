"""Gradients of gradients, such as gradient penalties, on a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.states import end_backward, unsharded_until_backward
from shardkit.runtime.hooks import allowing_create_graph, reshard


@contextmanager
def double_backward(model: nn.Module) -> Iterator[None]:
    """In this context ``torch.autograd.grad(..., create_graph=True)`` works on a sharded model, as
    for a penalty.

    Units stay unsharded from their forward to the end of the context, which needs the memory of all
    parameters. Put the forwards and both backwards inside. Local: it sets flags of the FSDP
    modules, and restores them; all ranks must enter it. ``backward(create_graph=True)``, which
    gives parameters gradients with a graph, is not supported.

    Args:
        model: sharded by ``shard_model``, or plain, which is left alone.

    Examples:
        >>> with double_backward(model):
        ...     (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ...     (model(x).mean() + grad.square().sum()).backward()
    """
    units = fsdp_units(model)
    before = [(unit, unit.reshard_after_backward) for unit in units]
    for unit in units:
        unit.reshard_after_backward = False
    try:
        with allowing_create_graph(units), unsharded_until_backward(model):
            yield
        end_backward(model)
    finally:
        for unit, flag in before:
            unit.reshard_after_backward = flag
        reshard(model)

"""Units that some ranks do not call: those ranks gather and reduce with the others, and compute nothing.

A rank that skips a unit would leave the others in its all-gather. ``take_part`` is the call instead of the call.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import not_compiled
from shardkit._fsdp.collectives import add_grad_edge, modules_of, pass_through
from shardkit.errors import ShardkitError, message
from shardkit.runtime.skippable import is_skippable


@not_compiled
def take_part(module: nn.Module, like: Tensor) -> Tensor:
    """Take part in the collectives of a module that only other ranks call, without running it.

    Collective, like the call that it replaces: each unit in ``module`` is gathered, and its gradients are reduced with
    zeros from this rank. Call it where the module would be called, and add what it returns to something that the loss
    depends on. On a plain module it only returns the zero.

    Args:
        module: an FSDP module, or one with FSDP modules in it. They must run in the order in which they are
            registered, each once, and use all their trainable parameters.
        like: stands in for the module's input: a floating-point tensor of its device, which requires grad exactly
            if the module's input does on the other ranks. Its shape does not matter.

    Returns:
        0, of shape ``()`` and the dtype and device of ``like``.

    Raises:
        ShardkitError: ``like`` is not a floating-point tensor, or a unit has modules inside and outside of ``module``.

    Example:
        >>> linear, x = torch.nn.Linear(2, 2), torch.ones(3, requires_grad=True)
        >>> (x + take_part(linear, x)).sum().backward()
        >>> linear.weight.grad.sum()
        tensor(0.)
    """
    _check(module, like)
    if is_skippable(module):
        return like.new_zeros(())
    return _walk(module, add_grad_edge(like.new_zeros(()).detach(), like), set()).to(like.dtype)


def _check(module: nn.Module, like: Tensor) -> None:
    if not (isinstance(like, Tensor) and like.is_floating_point()):
        kind = like.dtype if isinstance(like, Tensor) else type(like).__name__
        rule = "It stands in for the module's input: a floating-point tensor, whose device and requires_grad count"
        raise ShardkitError(message("like of take_part", f"is {kind}", rule, "Pass hidden states, or x.detach()"))
    inside = set(module.modules())
    for each in inside:
        apart = [] if not isinstance(each, FSDPModule) else [m for m in modules_of(each) if m not in inside]
        if apart:
            problem = f"contains a {type(each).__name__}, which shares a unit with {len(apart)} modules outside of it"
            rule = "A unit is gathered and reduced as a whole"
            raise ShardkitError(message("take_part, module", problem, rule, "Leave these modules out of group()"))


def _walk(module: nn.Module, zero: Tensor, done: set[nn.Module]) -> Tensor:
    """Pass a zero through a module and what it contains, in the order of registration; a unit of several once."""
    if not isinstance(module, FSDPModule):
        return _inside((module,), zero, done)
    if module in done:
        return zero
    done.update(modules_of(module))
    return pass_through(module, zero, lambda inner: _inside(modules_of(module), inner, done))


def _inside(modules: tuple[nn.Module, ...], zero: Tensor, done: set[nn.Module]) -> Tensor:
    for module in modules:
        zero = add_grad_edge(zero, *module.parameters(recurse=False))
        for child in module.children():
            zero = _walk(child, zero, done)
    return zero

"""Gradient accumulation: which micro-batches communicate, and what stays in memory between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import (
    FSDPUnit,
    fsdp_units,
    gathered_until_backward,
    units_gathered_until_backward,
)
from shardkit._fsdp.gradients import drop_unreduced_gradients
from shardkit._torch import named_sharded_parameters, steps_in_backward
from shardkit.errors import ShardkitError, message
from shardkit.ranks import check_module
from shardkit.sharded.stepping import watch_gradients


@contextmanager
def accumulate(
    model: nn.Module, *, last: bool, keep_unsharded: bool | None = None, shard_gradients: bool = False
) -> Iterator[None]:
    """Forward and backward of one micro-batch, whose gradients are reduced with those of the last one.

    Local: it sets what the FSDP modules below ``model`` do, and puts back what was set before when it is left,
    however it is left; so it nests, and the innermost one decides. All ranks must pass the same arguments, since
    they decide which collectives run. ``plan.collectives(micro_batches=k)`` says how many. With P elements of
    parameters, N ranks that shard, and the sizes in bytes of ``param_dtype`` and ``reduce_dtype``:

    ===================================  =============================  ==========================================
    k micro-batches                      collectives of each unit       held by each rank from one to the next
    ===================================  =============================  ==========================================
    default                              2k all-gathers, 1 reduction    P x reduce_dtype of gradients
    ``keep_unsharded=True``              1 all-gather, 1 reduction      the same, and P x param_dtype of parameters
    ``shard_gradients=True``             k reduce-scatters              P / N x reduce_dtype of gradients
    ===================================  =============================  ==========================================

    By default a unit with ``reshard_after_forward=False`` is gathered once too, and its parameters are held. A
    reduction is a reduce-scatter, and on an HSDP mesh an all-reduce after it, which runs once in any case.

    When the body raises, the step is lost: all gradients of the model are dropped, reduced or not. If forward or
    backward raised, call :func:`reset_after_error` before the next one. To abandon a step between two micro-batches
    call ``zero_grad()`` of the model or the optimizer; any other use of a gradient that waits raises, a step too.
    Between them no parameter may change, and ``model.parameters()`` shows stand-ins for what is kept unsharded.

    Args:
        model: sharded by ``fully_shard``, whoever called it: a root, a part of one, or a module around several
            roots. What is not sharded (a plain model, ``ignored_params``) accumulates as it always does.
        last: whether this is the last micro-batch of the step, after which gradients are complete.
        keep_unsharded: True gathers the parameters of each unit once for all micro-batches, also where
            ``reshard_after_forward`` would free them. False frees them after each backward. None keeps those
            that are kept from forward to backward anyway (``reshard_after_forward=False``, FSDP1's
            SHARD_GRAD_OP): from the second micro-batch on, that does not raise the peak, as all of them are
            there at the end of forward, beside the gradients.
        shard_gradients: reduce-scatter each micro-batch, so that gradients stay sharded in between; an HSDP mesh
            still all-reduces once. On one that shards within hosts and replicates across them, this saves the
            memory of unsharded gradients for traffic that stays in the host. If ranks use different
            parameters in different micro-batches, set ``set_reduce_scatter_unused_params``.

    Raises:
        ShardkitError: ``model`` is not a module; or ``optimizer_in_backward`` steps its parameters, which keeps no
            gradient to add to.

    Example:
        >>> for i, (inputs, targets) in enumerate(micro_batches):
        ...     with accumulate(model, last=i == len(micro_batches) - 1):
        ...         (loss_fn(model(inputs), targets) / len(micro_batches)).backward()
        >>> optimizer.step()
    """
    check_module(model)
    units = fsdp_units(model)
    _check_keeps_gradients(model, units)
    watch_gradients(model)
    with ExitStack() as stack:
        stack.enter_context(_restored(units))
        if keep_unsharded:
            stack.enter_context(gathered_until_backward(model))
        for unit in units:
            unit.reduce_grads = last or shard_gradients
            unit.all_reduce_grads = last
        if not last:
            _keep(units_gathered_until_backward(model) if keep_unsharded is None else units, keep_unsharded)
        try:
            yield
        except BaseException:
            _abandon(model)
            raise


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward without reducing gradients, as FSDP1's and DDP's method: ``accumulate(model, last=False)``.

    Put the forward inside as well. The first backward outside reduces all that has been accumulated. Local.

    Example:
        >>> with no_sync(model):
        ...     loss_fn(model(first)).backward()
        >>> loss_fn(model(second)).backward()
    """
    with accumulate(model, last=False):
        yield


def zero_grad(model: nn.Module) -> None:
    """``model.zero_grad()``, also of gradients that wait to be reduced after backwards without sync. Local.

    torch keeps those aside, not in the ``.grad`` of sharded parameters, and frees them here at once. The model's own
    ``zero_grad()`` and the optimizer's drop them too, when the next backward begins, in models that ``shard_model``
    or :func:`accumulate` has seen.
    """
    check_module(model)
    for unit in fsdp_units(model):
        drop_unreduced_gradients(unit)
    for _, param in named_sharded_parameters(model):
        param.grad = None


def _abandon(model: nn.Module) -> None:
    zero_grad(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _keep(units: list[FSDPUnit], keep_unsharded: bool | None) -> None:
    for unit in units:
        unit.reshard_after_backward = keep_unsharded is False


@contextmanager
def _restored(units: list[FSDPUnit]) -> Iterator[None]:
    before = [(unit, unit.reduce_grads, unit.all_reduce_grads, unit.reshard_after_backward) for unit in units]
    try:
        yield
    finally:
        for unit, reduce_grads, all_reduce_grads, reshard_after_backward in before:
            unit.reduce_grads = reduce_grads
            unit.all_reduce_grads = all_reduce_grads
            unit.reshard_after_backward = reshard_after_backward


def _check_keeps_gradients(model: nn.Module, units: list[FSDPUnit]) -> None:
    params = [param.sharded_param for unit in units for param in unit.fsdp_params] or model.parameters()
    if steps_in_backward(params):
        problem = "optimizer_in_backward steps its parameters as soon as they have a gradient"
        rule = "Accumulation adds up the gradients of several backwards before the step"
        raise ShardkitError(message("model", problem, rule, "Use one large batch, or an ordinary optimizer"))

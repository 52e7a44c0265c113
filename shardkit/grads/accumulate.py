"""Gradient accumulation, and recovery after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import nn

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.collectives import reduce_unused
from shardkit._fsdp.states import (
    drop_unreduced_gradients,
    reset_iteration,
    roots_of,
    unsharded_until_backward,
)
from shardkit._fsdp.waiting import let_optimizers_clear
from shardkit._torch import named_sharded_parameters, sharded_parameters
from shardkit._torch.steps import steps_in_backward
from shardkit.errors import ShardkitError
from shardkit.ranks import check_module, note
from shardkit.runtime.hooks import reshard
from shardkit.runtime.stepping import watch_gradients


@contextmanager
def accumulate(
    model: nn.Module,
    *,
    last: bool,
    keep_unsharded: bool | Literal["frozen"] | None = None,
    shard_gradients: bool = False,
) -> Iterator[None]:
    """Run forward and backward of one micro-batch in this context; the last one reduces the
    gradients of all.

    ``last=False`` is ``no_sync`` of FSDP1 and DDP: the first backward outside reduces everything that waits.

    Local: it sets flags of FSDP modules and restores them on exit. Contexts nest; the innermost one
    decides. All ranks must pass the same arguments, which decide the collectives;
    ``plan.collectives(micro_batches=k)`` counts them. With P elements of parameters, N ranks that
    shard, and the sizes in bytes of ``param_dtype`` and ``reduce_dtype``:

    | k micro-batches | collectives of each unit | held by each rank between them |
    | --- | --- | --- |
    | default | 2k all-gathers, 1 reduction | P x reduce_dtype of gradients |
    | ``keep_unsharded=True`` | 1 all-gather, 1 reduction | the same, and P x param_dtype of parameters |
    | ``shard_gradients=True`` | 2k all-gathers, k reduce-scatters | P / N x reduce_dtype of gradients |

    A reduction is a reduce-scatter, and on an HSDP mesh one all-reduce. If the body raises,
    gradients are dropped; call :func:`reset_after_error` before the next forward.
    ``shardkit.zero_grad(model)`` and ``optimizer.zero_grad()`` abandon a step.

    Args:
        model: an FSDP root, a part of one, or a module around several roots. Plain parameters
            accumulate as usual.
        last: whether this is the last micro-batch of the step, after which gradients are complete.
        keep_unsharded: True unshards the parameters of each unit once for all micro-batches, so none
            may change in between. False frees them after each backward. None keeps those with
            ``reshard_after_forward=False``; ``"frozen"`` also those of units without a trained
            parameter, which have no gradients to hold.
        shard_gradients: reduce-scatter each micro-batch, so that gradients stay sharded in between.
            If ranks use different parameters in them, call torch's
            ``model.set_reduce_scatter_unused_params(True)`` (torch 2.13 or newer) first; on an HSDP
            mesh zeros are reduced for them from then on, in units that are used in part.

    Raises:
        ShardkitError: another ``keep_unsharded``, ``optimizer_in_backward`` steps the parameters, or
            ``model`` is not a module.

    Examples:
        >>> for i, (inputs, targets) in enumerate(micro_batches):
        ...     with accumulate(model, last=i == len(micro_batches) - 1):
        ...         (loss_fn(model(inputs), targets) / len(micro_batches)).backward()
    """
    check_module(model)
    if keep_unsharded not in (None, True, False, "frozen"):
        raise ShardkitError(
            f'keep_unsharded must be None, True, False or "frozen", got {keep_unsharded!r}.'
        )
    note("accumulate", last=last, keep_unsharded=keep_unsharded, shard_gradients=shard_gradients)
    if steps_in_backward(sharded_parameters(model)):
        raise ShardkitError(
            "model is stepped by optimizer_in_backward as soon as there is a gradient, so none can "
            "be accumulated. Use one large batch, or an ordinary optimizer."
        )
    watch_gradients(model)
    units = fsdp_units(model)
    with ExitStack() as stack:
        for unit in units:
            for flag in ("reduce_grads", "all_reduce_grads", "reshard_after_backward"):
                stack.callback(setattr, unit, flag, getattr(unit, flag))
            unit.reduce_grads, unit.all_reduce_grads = last or shard_gradients, last
            if not last:
                let_optimizers_clear(unit)
            if shard_gradients and hasattr(unit.mesh_info, "replicate_process_group"):
                # One flat tensor waits for the all-reduce; each micro-batch must have its layout.
                reduce_unused(unit.modules, beside_used=True)
        if keep_unsharded:
            stack.enter_context(
                unsharded_until_backward(model, only_frozen=keep_unsharded == "frozen")
            )
        if not last:
            for unit in units:
                if keep_unsharded is False:
                    unit.reshard_after_backward = True
                elif unit.post_forward_mesh_info is None:  # it stays unsharded after forward
                    unit.reshard_after_backward = False
        try:
            yield
        except BaseException:
            zero_grad(model)
            reshard(model)
            raise


def zero_grad(model: nn.Module) -> None:
    """Drop all gradients, also those that wait to be reduced, and free their memory. Local.

    ``optimizer.zero_grad()`` does so after ``accumulate``, and ``model.zero_grad()`` of a model
    that ``shard_model`` sharded.
    """
    check_module(model)
    for unit in fsdp_units(model):
        drop_unreduced_gradients(unit)
    for _, param in named_sharded_parameters(model):
        param.grad = None


def reset_after_error(model: nn.Module) -> None:
    """Make ``model`` ready for a new step after forward or backward raised.

    Units are resharded, pending collectives waited for, and all gradients dropped, reduced or not
    (torch's ``reset_iter_state`` leaves those of accumulation without sync, torch 2.13). The next
    step equals that of a model that never failed. Restart the step at its first micro-batch, and
    call this after the ``except`` block, not inside, where the traceback keeps activations alive.

    Local. All ranks must call it, and must have failed at the same place: an error on one rank
    alone leaves the others waiting in a collective, so let the process end, and restart from a
    checkpoint. Not undone: BatchNorm's statistics, random states, parameters that an optimizer
    updated in backward, flags set by hand.

    Args:
        model: all FSDP roots that took part must be in it, or around it; a plain model only loses
            its gradients.

    Examples:
        >>> failed = False
        >>> try:
        ...     loss_fn(model(inputs), targets).backward()
        ... except torch.OutOfMemoryError:
        ...     failed = True
        >>> if failed:
        ...     reset_after_error(model)
    """
    for root in roots_of(model):
        reset_iteration(root)
        zero_grad(root)
    zero_grad(model)

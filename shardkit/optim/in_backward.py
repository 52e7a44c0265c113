"""An optimizer that steps each parameter as soon as its gradient is reduced."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import named_sharded_parameters
from shardkit._torch.steps import SCALES_ITSELF, steps_in_backward, wait_for_offload
from shardkit.errors import ShardkitError, listing
from shardkit.optim.check import check_optimizer
from shardkit.optim.local import (
    AnyOptimizer,
    hooked,
    replace_class,
    step_of,
    step_on_local_shards,
    subclass,
)
from shardkit.ranks import check_module
from shardkit.runtime.stepping import check_awake


def optimizer_in_backward(
    model: nn.Module,
    factory: Callable[[list[nn.Parameter]], AnyOptimizer],
) -> AnyOptimizer:
    """Make an optimizer that updates each sharded parameter in backward, once its gradient is
    reduced, and frees it.

    At most one unit's gradients are alive at a time: Adam in float32 takes 12 bytes for each
    element of a rank's shards instead of 16. The training loop does not change: ``step()`` after
    backward ends the step, runs its hooks and advances LR schedulers.

    It is one ordinary optimizer of all trainable parameters, as :func:`step_on_local_shards` makes
    it, so that LR schedulers and state dicts work unchanged. ``step()`` updates parameters that
    still have a gradient: plain ones (``ignored_params``), whose gradients FSDP2 does not reduce,
    and those of ``add_param_group``. Local, in place. What needs all gradients of a step at once
    raises: :func:`clip_grad_norm_`, a second backward before ``step()``, ``torch.amp.GradScaler``.

    Args:
        model: the whole sharded model. A tied parameter is stepped once, frozen ones are not; to
            unfreeze some later, freeze them after this call.
        factory: called once with the list of trainable parameters, in the order of
            ``model.parameters()``; returns an optimizer of exactly these, in any groups, such as
            ``partial(torch.optim.AdamW, lr=1e-3, fused=True)``.

    Returns:
        The optimizer that the factory made. Do not copy it, since hooks step this object; save its
        ``state_dict()``.

    Raises:
        ShardkitError: the model has no trainable sharded parameters, or is stepped in backward
            already; the optimizer has other parameters, or :func:`step_on_local_shards` refuses it.
            The model is unchanged.
    """
    check_module(model)
    named = named_sharded_parameters(model)
    params = {fqn: param for fqn, param in named if param.requires_grad}
    if not any(isinstance(param, DTensor) for param in params.values()):
        raise ShardkitError("model has no sharded parameter that trains. Shard the model first.")
    stepped = [fqn for fqn, param in params.items() if steps_in_backward([param])]
    if stepped:
        raise ShardkitError(
            f"{listing(stepped)} are stepped in backward already. Call optimizer_in_backward once "
            "for a model."
        )
    optimizer = factory(list(params.values()))
    check_optimizer(optimizer, model, low_precision=True)  # in low precision the first step warns
    step_on_local_shards(optimizer)
    replace_class(optimizer, _in_backward_class)
    frozen = {fqn: param for fqn, param in named if not param.requires_grad}
    vars(optimizer).update(stepped=set(), frozen=frozen)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if isinstance(param, DTensor):
                param.register_post_accumulate_grad_hook(_StepOne(optimizer, number))  # type: ignore[no-untyped-call]
    return optimizer


class _StepOne:
    """The hook of a parameter. FSDP2 runs it once the gradient is reduced, on the stream of the
    reduction.
    """

    steps_in_backward = True

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        self.optimizer: Any = optimizer
        self.group = group  # its index: loading a state dict replaces the dictionaries

    def __call__(self, param: Tensor) -> None:
        assert isinstance(param, DTensor)
        optimizer = self.optimizer
        check_awake((), optimizer)
        if param in optimizer.stepped:
            raise ShardkitError(
                "optimizer_in_backward got a second gradient of a parameter of shape "
                f"{tuple(param.shape)} before optimizer.step(). Call optimizer.step() after each "
                "backward; gradients cannot be accumulated."
            )
        wait_for_offload(param)
        groups, state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [{**groups[self.group], "params": [param]}]
        optimizer.state = defaultdict(dict, {param: state[param]} if param in state else {})
        try:
            optimizer.step_without_hooks()
        finally:
            state.update(optimizer.state)
            optimizer.param_groups, optimizer.state = groups, state
        optimizer.stepped.add(param)
        param.grad = None


def _refuse_unfrozen(optimizer: Any) -> None:
    """Raise if a parameter trains now that was frozen when the optimizer was made."""
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    lost = []
    for fqn, param in optimizer.frozen.items():
        if param.requires_grad and id(param) not in held:
            lost.append(fqn)
    if lost:
        raise ShardkitError(
            f"optimizer_in_backward does not step {listing(lost)}, frozen when it was called. Call "
            'it before freezing, or call optimizer.add_param_group({"params": [...]}): step() '
            "updates these."
        )


@functools.cache
def _in_backward_class(base: Any) -> Any:
    """Return a subclass, of the same name, of a class that steps on local shards."""
    step_without_hooks = step_of(base)

    @functools.wraps(step_without_hooks)
    def step(self: Any, closure: Any = None) -> Any:
        if hasattr(self, "found_inf"):
            raise ShardkitError(
                "optimizer_in_backward got step() from a GradScaler. Parameters are updated in "
                "backward, before it can know that gradients are finite. Train in bfloat16."
            )
        _refuse_unfrozen(self)
        loss = step_without_hooks(self, closure)
        self.stepped.clear()
        return loss

    # SCALES_ITSELF, so that GradScaler calls step(), which raises.
    return subclass(
        base, {"step": hooked(step), "step_without_hooks": step_without_hooks, SCALES_ITSELF: True}
    )

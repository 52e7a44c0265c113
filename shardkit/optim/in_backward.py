"""An optimizer that steps each parameter as soon as its gradient is reduced."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import OFFLOAD_WAITS_FOR_HOOKS, SCALES_ITSELF, local_tensor, named_sharded_parameters
from shardkit._torch import steps_in_backward as any_steps_in_backward
from shardkit.errors import ShardkitError, listing, message
from shardkit.optim.check import check_optimizer
from shardkit.optim.local import hooked, step_on_local_shards

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def optimizer_in_backward(
    model: nn.Module,
    factory: Callable[[list[nn.Parameter]], AnyOptimizer],
    *,
    elementwise: bool = False,
    cpu_threads: int | None = None,
) -> AnyOptimizer:
    """An optimizer that updates each sharded parameter in backward, once its gradient is reduced, and frees that.

    No more than one unit's gradients are alive at a time: Adam in float32 takes 12 bytes for each element of
    a rank's shards instead of 16. The training loop stays as it is: ``step()`` after backward ends the step, runs its
    hooks and lets LR schedulers count it.

    It is one ordinary optimizer of all parameters that train, as :func:`step_on_local_shards` makes it, so that LR
    schedulers and state dicts (torch's, ``torch.distributed.checkpoint``'s, by FQN) work unchanged. ``step()``
    updates whatever still has a gradient: plain parameters (``ignored_params``), whose gradients nothing has reduced
    before, and those given a gradient by hand. Local, in place; the model's forward and backward do not change.

    What needs all gradients of a step at once is refused: :func:`clip_grad_norm_`, gradient accumulation (a second
    backward before ``step()``), ``torch.amp.GradScaler``, and closures.

    Args:
        model: a sharded model, whole. A tied parameter is stepped once, frozen ones are not.
        factory: called once with the list of parameters that train, in the order of ``model.parameters()``; returns
            an optimizer of just these, in any groups, such as ``partial(torch.optim.AdamW, lr=1e-3, fused=True)``.
        elementwise: vouch for the optimizer's class, as in :func:`step_on_local_shards`; also that its step may be
            taken for one parameter at a time, with nothing kept for a group or all together.
        cpu_threads: as in :func:`step_on_local_shards`.

    Returns:
        The optimizer that the factory made. It cannot be pickled or copied; save its ``state_dict()``.

    Raises:
        ShardkitError: for a model without sharded parameters that train, or stepped in backward already; for an
            optimizer of other parameters, or that :func:`step_on_local_shards` refuses. The model is unchanged.
    """
    params = _parameters(model)
    optimizer = factory(params)
    check_optimizer(optimizer, model, low_precision=True)  # which is not asked here
    step_on_local_shards(optimizer, elementwise=elementwise, cpu_threads=cpu_threads)
    base: Any = type(optimizer)
    optimizer.__class__ = _in_backward_class(base)
    vars(optimizer)["stepped"] = set()
    for index in range(len(optimizer.param_groups)):
        _hook(optimizer, index)
    return optimizer


def steps_in_backward(model: nn.Module) -> bool:
    """Whether :func:`optimizer_in_backward` steps the model, so that its gradients are gone after backward."""
    return any_steps_in_backward(param for _, param in named_sharded_parameters(model))


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    named = {fqn: param for fqn, param in named_sharded_parameters(model) if param.requires_grad}
    if not any(isinstance(param, DTensor) for param in named.values()):
        rule = "It steps what FSDP2 reduces"
        raise ShardkitError(message("model", "has no sharded parameter that trains", rule, "Shard the model first"))
    stepped = [fqn for fqn, param in named.items() if any_steps_in_backward([param])]
    if stepped:
        rule, fix = "One optimizer steps a parameter in backward", "Call this once for a model"
        raise ShardkitError(message(listing(stepped), "stepped in backward already", rule, fix))
    return list(named.values())


def _hook(optimizer: Optimizer, group: int) -> None:
    hook = _StepOne(optimizer, group)
    for param in optimizer.param_groups[group]["params"]:
        if isinstance(param, DTensor) and param.requires_grad:
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class _StepOne:
    """The hook of a group's parameters. FSDP2 runs it once a gradient is reduced, on the stream of the reduction."""

    steps_in_backward = True

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        self.optimizer: Any = optimizer
        self.group = group  # by number: loading a state dict exchanges the dictionaries

    def __call__(self, param: Tensor) -> None:
        assert isinstance(param, DTensor)
        optimizer = self.optimizer
        if param in optimizer.stepped:
            problem = f"a second gradient of a parameter of shape {tuple(param.shape)} before optimizer.step()"
            rule = "Each parameter is updated by its first gradient, so that gradients cannot be accumulated"
            fix = "Call optimizer.step() after each backward, or step after backward instead"
            raise _refused(problem, rule, fix)
        if not OFFLOAD_WAITS_FOR_HOOKS and local_tensor(param).device.type != param.device_mesh.device_type:
            torch.accelerator.current_stream().synchronize()
        _step_alone(optimizer, optimizer.param_groups[self.group], param)
        optimizer.stepped.add(param)
        param.grad = None


def _step_alone(optimizer: Any, group: dict[str, Any], param: DTensor) -> None:
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [{**group, "params": [param]}]
    optimizer.state = defaultdict(dict, {param: state[param]} if param in state else {})
    try:
        optimizer.step_without_hooks()
    finally:
        state.update(optimizer.state)
        optimizer.param_groups, optimizer.state = groups, state


@functools.cache
def _in_backward_class(base: Any) -> Any:
    """A subclass, of the same name, of a class that steps on local shards."""
    step_without_hooks = base.step.__wrapped__

    @functools.wraps(step_without_hooks)
    def step(self: Any, closure: Any = None) -> None:
        _check_step(self, closure)
        step_without_hooks(self)
        self.stepped.clear()

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        base.add_param_group(self, param_group)
        _hook(self, len(self.param_groups) - 1)

    body = {
        "step": hooked(step),
        "step_without_hooks": step_without_hooks,
        "add_param_group": add_param_group,
        "__reduce_ex__": _refuse_copies,
        SCALES_ITSELF: True,  # so that GradScaler comes to step(), which says what is wrong
    }
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **body})


def _check_step(optimizer: Any, closure: Any) -> None:
    rule = "Parameters are updated in backward, by gradients as they come"
    if closure is not None:
        raise _refused("step() got a closure", rule, "Run forward and backward, then step() without one")
    if hasattr(optimizer, "found_inf"):
        raise _refused("step() was called by a GradScaler", rule, "Train in bfloat16, or step after backward")


def _refuse_copies(self: Any, protocol: int) -> tuple[Any, ...]:
    rule = "Hooks on the model's parameters step this one object"
    raise _refused("cannot be pickled or copied", rule, "Save its state_dict(), and load that into another")


def _refused(problem: str, rule: str, fix: str) -> ShardkitError:
    return ShardkitError(message("optimizer_in_backward", problem, rule, fix))

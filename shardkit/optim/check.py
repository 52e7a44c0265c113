"""Check that an optimizer holds the trainable parameters of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from shardkit._torch import named_sharded_parameters
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import check_module
from shardkit.runtime.replicated import unreduced_problem
from shardkit.runtime.stepping import allow_low_precision, low_precision_problem


def check_optimizer(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module, *, low_precision: bool = False
) -> None:
    """Raise unless the optimizer updates exactly the parameters that ``model`` trains, in float32.
    Local, pure.

    Sharding and materializing replace the model's parameters. An optimizer built before holds the
    old ones: it steps without an error, and the loss does not change. Parameters in bfloat16 or
    float16 have no float32 master: an update below 2**-9 or 2**-12 of a value is rounded away.
    Warns of trainable parameters outside of all units (``ignored_params``), whose gradients FSDP2
    does not reduce.

    Args:
        optimizer: the optimizer, or all of them where several share the model.
        model: the whole model, sharded or not. Frozen parameters may be in the optimizer or not.
        low_precision: allow parameters in bfloat16 or float16, for optimizers that keep float32
            masters or round stochastically.

    Raises:
        ShardkitError: the optimizer holds other tensors, or lacks trainable parameters; or they
            train in low precision.

    Examples:
        >>> check_optimizer(optimizer, model)
    """
    check_module(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    named = named_sharded_parameters(model)
    held: set[nn.Parameter] = set()
    for given in optimizers:
        for group in given.param_groups:
            held.update(group["params"])
    problems = []
    foreign = held - {param for _, param in named}
    if foreign:
        shapes = listing((str(tuple(tensor.shape)) for tensor in foreign), 5)
        problems.append(
            f"optimizer holds {len(foreign)} tensors that are not parameters of the model, of "
            f"shapes {shapes}. It was built before the model was sharded or materialized, between "
            "forward and backward, or for another model, so stepping them has no effect on this "
            "one. Build the optimizer after shard_model and materialize, outside of a step."
        )
    missing = [fqn for fqn, param in named if param.requires_grad and param not in held]
    if missing:
        problems.append(
            f"{listing(missing)} have requires_grad=True and are in no optimizer. Add them, pass "
            "all optimizers of the model as a list, or freeze them with requires_grad_(False)."
        )
    low = None if low_precision else low_precision_problem(named)
    if low:
        problems.append(low)
    if problems:
        raise ShardkitError("\n".join(problems))
    if low_precision:
        allow_low_precision(optimizers)
    unreduced = unreduced_problem(model)
    if unreduced:
        warnings.warn(unreduced, stacklevel=2)

"""Check that an optimizer holds the trainable parameters of a model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.params import gathered_parameters
from shardkit._torch import named_sharded_parameters
from shardkit.errors import ShardkitError, listing, message
from shardkit.runtime.replicated import unreduced_problem
from shardkit.runtime.stepping import allow_low_precision, low_precision_problem


def check_optimizer(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module, *, low_precision: bool = False
) -> None:
    """Raise unless the optimizer updates exactly the parameters that ``model`` trains, in float32. Local, pure.

    Sharding and materializing replace the model's parameters. An optimizer built before holds the old ones:
    it steps without an error, and the loss does not change. Parameters in bfloat16 or float16 have no float32
    master: an update below 2**-9 or 2**-12 of a value is rounded away, and the loss stops falling early.
    ``MixedPrecisionPolicy`` changes the dtype of computation, not that of the parameters.

    Warns of trainable parameters outside of all units (``ignored_params``), whose gradients FSDP2 does not reduce.

    Args:
        optimizer: the optimizer, or all of them where several share the model.
        model: the whole model, sharded or not. Parameters with ``requires_grad=False`` may be left out of the
            optimizer or be in it.
        low_precision: allow updates of parameters in bfloat16 or float16, for optimizers that keep float32 masters
            or round stochastically, or where the loss of precision does not matter.

    Raises:
        ShardkitError: listing tensors of the optimizer that were the model's before it was sharded, or that FSDP2
            gathers into; trainable parameters that are in no optimizer; tensors of another model; and trainable
            parameters in low precision.

    Example:
        >>> shard_model(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> check_optimizer(optimizer, model)
    """
    if isinstance(optimizer, nn.Module) or not isinstance(model, nn.Module):
        swapped = isinstance(optimizer, nn.Module) and not isinstance(model, nn.Module)
        given = f"called with ({type(optimizer).__name__}, {type(model).__name__})"
        rule = "The optimizer comes first, then the model" + (": the two are swapped" if swapped else "")
        raise ShardkitError(message("check_optimizer", given, rule, "Call check_optimizer(optimizer, model)"))
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if strange := [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]:
        rule = "It takes a torch.optim.Optimizer, or several"
        raise ShardkitError(
            message("optimizer", f"is of type {listing(strange)}", rule, "Pass the optimizers themselves")
        )
    problems = _problems(_held(optimizers), model)
    low = None if low_precision else low_precision_problem(named_sharded_parameters(model))
    if problems or low:
        raise ShardkitError("\n".join([*problems, *([low] if low else [])]))
    if low_precision:
        allow_low_precision(optimizers)
    if unreduced := unreduced_problem(model):
        warnings.warn(unreduced, stacklevel=2)


def _held(optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Return every tensor of the optimizers by its place and shape, for messages."""
    held = {}
    for number, each in enumerate(optimizers):
        where = f"optimizer {number} " if len(optimizers) > 1 else ""
        for index, group in enumerate(each.param_groups):
            names = group.get("param_names", range(len(group["params"])))
            for name, tensor in zip(names, group["params"], strict=True):
                held[f"{where}param_groups[{index}][{name!r}] of shape {tuple(tensor.shape)}"] = tensor
    return held


def _problems(held: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return one message for each kind of difference between the optimizers' tensors and the model's parameters."""
    names = {param: fqn for fqn, param in named_sharded_parameters(model)}
    sharded, in_optimizer = gathered_parameters(fsdp_units(model)), set(held.values())
    unexpected = {where: tensor for where, tensor in held.items() if tensor not in names}
    gathered = [names[sharded[tensor]] for tensor in unexpected.values() if tensor in sharded]
    absent = {fqn: p for p, fqn in names.items() if p not in in_optimizer and fqn not in gathered}
    # Pair tensors with absent parameters of their shape, trainable ones first: most likely the parameter before and
    # after sharding. An optimizer may leave out the frozen ones.
    by_shape = defaultdict(list)
    for fqn, param in sorted(absent.items(), key=lambda item: not item[1].requires_grad):
        by_shape[param.shape].append(fqn)
    replaced, foreign = [], []
    for where, tensor in unexpected.items():
        if tensor not in sharded:
            candidates = by_shape[tensor.shape]
            replaced.append(candidates.pop(0)) if candidates else foreign.append(where)
    missing = [fqn for fqn, param in absent.items() if param.requires_grad and fqn not in replaced]
    problems = []
    if gathered:
        problem = f"holds the gathered tensors of {len(gathered)} parameters, {listing(gathered)}"
        rule = "Between forward and backward model.parameters() shows what FSDP2 gathered and will free"
        fix = "Build the optimizer before the forward or after backward; stepping it now has no effect"
        problems.append(message("optimizer", problem, rule, fix))
    if replaced:
        problem = f"holds {len(replaced)} tensors that are not the model's, though shaped like its parameters "
        problem += f"{listing(replaced)}, which it does not hold"
        rule = "The optimizer was built before the model was sharded or materialized, which replaces parameters, or "
        rule += "for another copy of the model, so stepping it has no effect on this one"
        fix = "Build the optimizer after shard_model and materialize"
        problems.append(message("optimizer", problem, rule, fix))
    if missing:
        problem = f"{len(missing)} parameters with requires_grad=True in no optimizer"
        fix = "Add them, pass all optimizers of the model as a list, or freeze them with requires_grad_(False)"
        problems.append(message(listing(missing), problem, "Trainable parameters must be in an optimizer", fix))
    if foreign:
        problem = f"holds {len(foreign)} tensors that are in no module of the model: {listing(foreign)}"
        rule = "Every tensor of the optimizer must be a parameter of the model"
        fix = "Remove them, or pass the module that holds them all, such as nn.ModuleList([model, loss])"
        problems.append(message("optimizer", problem, rule, fix))
    return problems

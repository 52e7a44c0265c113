"""Whether an optimizer holds what the model trains."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._fsdp.events import gathered_parameters
from shardkit._torch import named_sharded_parameters
from shardkit.errors import ShardkitError, listing, message
from shardkit.sharded.replicated import unreduced_problem
from shardkit.sharded.stepping import allow_low_precision, low_precision_problem


def check_optimizer(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module, *, low_precision: bool = False
) -> None:
    """Raise unless the optimizer updates exactly the parameters that ``model`` trains, in float32. Local, pure.

    Sharding and materializing replace the model's parameters. An optimizer built before holds the old ones:
    it steps without an error, and the loss stays where it is. Parameters in bfloat16 or float16 have no float32
    master: an update below 2**-9 or 2**-12 of a value is rounded away, and the loss stops falling early.
    ``MixedPrecisionPolicy`` changes what is computed, never what is updated.

    Warns of parameters that train outside of all units (``ignored_params``): nobody reduces their gradients.

    Args:
        optimizer: the optimizer, or all of them where several share the model.
        model: the whole model, sharded or not. Parameters with ``requires_grad=False`` may be left out of the
            optimizer or be in it.
        low_precision: vouch that the optimizer may update parameters in bfloat16 or float16, because it keeps
            float32 masters or rounds stochastically, or because what is lost does not matter.

    Raises:
        ShardkitError: naming, all at once, tensors of the optimizer that were the model's before it was
            sharded, or that FSDP2 gathers into; parameters that train but are in no optimizer; tensors of another
            model; and parameters that train in low precision.

    Example:
        >>> shard_model(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> check_optimizer(optimizer, model)
    """
    _check_order(optimizer, model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    held = _held(optimizers)
    params = dict(named_sharded_parameters(model))
    ours, in_optimizer = set(params.values()), set(held.values())
    unexpected = {name: tensor for name, tensor in held.items() if tensor not in ours}
    absent = {fqn: param for fqn, param in params.items() if param not in in_optimizer}
    sharded, names = gathered_parameters(model), {param: fqn for fqn, param in params.items()}
    gathered = {name: names[sharded[tensor]] for name, tensor in unexpected.items() if tensor in sharded}
    unexpected = {name: tensor for name, tensor in unexpected.items() if name not in gathered}
    absent = {fqn: param for fqn, param in absent.items() if fqn not in gathered.values()}
    replaced = _replaced(unexpected, absent)
    missing = [fqn for fqn, param in absent.items() if param.requires_grad and fqn not in replaced.values()]
    foreign = [name for name in unexpected if name not in replaced]
    low = None if low_precision else low_precision_problem(params.items())
    problems = [*_problems(gathered, replaced, missing, foreign), *([low] if low else [])]
    if problems:
        raise ShardkitError("\n".join(problems))
    if low_precision:
        allow_low_precision(optimizers)
    unreduced = unreduced_problem(model)
    if unreduced:
        warnings.warn(unreduced, stacklevel=2)


def _check_order(optimizer: object, model: object) -> None:
    if isinstance(optimizer, nn.Module) or not isinstance(model, nn.Module):
        swapped = isinstance(optimizer, nn.Module) and not isinstance(model, nn.Module)
        given = f"called with ({type(optimizer).__name__}, {type(model).__name__})"
        rule = "The optimizer comes first, then the model" + (": the two are swapped" if swapped else "")
        raise ShardkitError(message("check_optimizer", given, rule, "Call check_optimizer(optimizer, model)"))


def _held(optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Every tensor of the optimizers under a name that says where it is and what it looks like."""
    held = {}
    for number, each in enumerate(optimizers):
        where = f"optimizer {number} " if len(optimizers) > 1 else ""
        for index, group in enumerate(each.param_groups):
            names = group.get("param_names", range(len(group["params"])))
            for name, tensor in zip(names, group["params"], strict=True):
                held[f"{where}param_groups[{index}][{name!r}] of shape {tuple(tensor.shape)}"] = tensor
    return held


def _replaced(unexpected: dict[str, Tensor], absent: dict[str, nn.Parameter]) -> dict[str, str]:
    """Pairs (optimizer's tensor, model's FQN) of one shape: most likely one parameter before and after.

    Those that train come first: an optimizer may leave out the frozen ones.
    """
    by_shape = defaultdict(list)
    for fqn, param in sorted(absent.items(), key=lambda item: not item[1].requires_grad):
        by_shape[param.shape].append(fqn)
    return {name: by_shape[t.shape].pop(0) for name, t in unexpected.items() if by_shape[t.shape]}


def _problems(
    gathered: dict[str, str],
    replaced: dict[str, str],
    missing: list[str],
    foreign: list[str],
) -> Iterator[str]:
    if gathered:
        problem = f"holds the gathered tensors of {len(gathered)} parameters, {listing(gathered.values())}"
        rule = "Between forward and backward model.parameters() shows what FSDP2 gathered and will free"
        fix = "Build the optimizer before the forward or after backward; stepping it now has no effect"
        yield message("optimizer", problem, rule, fix)
    if replaced:
        problem = f"holds {len(replaced)} tensors that are not the model's, though shaped like its parameters "
        problem += f"{listing(replaced.values())}, which it does not hold"
        rule = "It was built before the model was sharded or materialized, which replaces parameters, or for another "
        rule += "copy of the model, so stepping it has no effect on this one"
        yield message("optimizer", problem, rule, "Build the optimizer after shard_model and materialize")
    if missing:
        problem = f"{len(missing)} parameters with requires_grad=True in no optimizer"
        fix = "Add them, pass all optimizers of the model as a list, or freeze them with requires_grad_(False)"
        yield message(listing(missing), problem, "A parameter that trains is updated by an optimizer", fix)
    if foreign:
        problem = f"holds {len(foreign)} tensors that are in no module of the model: {listing(foreign)}"
        rule = "Every tensor of the optimizer is a parameter of the model"
        fix = "Remove them, or pass the module that holds them all, such as nn.ModuleList([model, loss])"
        yield message("optimizer", problem, rule, fix)

"""A model and its sharded copy, trained side by side on every rank.

Each rank feeds its own batch to both copies. The plain one's gradients are averaged over the ranks
by all-reduces here. In step t only rank t % world counts, the others multiply their loss by zero. A
sum of one number and zeros is exact in any order, and so is the mean over 4 ranks, so nothing may
differ by a single bit: losses, gradients, parameters and buffers. (``torch.equal`` holds 0.0 and
-0.0 equal, which sums may exchange.) Sums of all ranks are compared where they are exact, on
integers, in ``tests/grads``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from layouts import full
from meshes import mesh_of, part_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from zoo import ZOO, Entry

from shardkit import ShardingPlan, accumulate, apply_plan, plan_model
from shardkit._fsdp.collectives import reduce_unused
from shardkit.optim import step_on_local_shards

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw on local shards": lambda params: step_on_local_shards(
        torch.optim.AdamW(params, lr=1e-2)
    ),
    "sgd": lambda params: step_on_local_shards(torch.optim.SGD(params, lr=1e-2, momentum=0.9)),
}
PLAIN = {"adamw on local shards": "adamw"}


def assert_trains_like_plain(
    name: str | Entry,
    mesh: tuple[int, ...] = (4,),
    optimizer: str = "adamw",
    steps: int = 3,
    micro_batches: int = 1,
    before_step: Callable[[nn.Module, int], object] = lambda model, step: None,
    **options: Any,
):
    """Train an entry, or that of a name in the zoo, and its copy under
    ``shard_model(copy, **options)``: equal bits.

    With an ``mp_policy`` the plain gradients come from a copy that is cast as FSDP2 casts.
    ``before_step`` is called with each of them, as to freeze a part.
    """
    entry = name if isinstance(name, Entry) else ZOO[name]
    plain, sharded, plan = _copies(entry, mesh, options)
    compute = _cast_copy(entry, plan) if "mp_policy" in options else plain
    optimizers = [OPTIMIZERS[PLAIN.get(optimizer, optimizer)](plain.parameters())]
    optimizers.append(OPTIMIZERS[optimizer](sharded.parameters()))
    start = {fqn: param.detach().clone() for fqn, param in plain.named_parameters()}
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        for model in {plain, compute, sharded}:
            before_step(model, step)
        counts = float(rank == step % world)
        for number in range(step * micro_batches, (step + 1) * micro_batches):
            is_last = number == (step + 1) * micro_batches - 1
            with accumulate(sharded, last=is_last) if micro_batches > 1 else nullcontext():
                _backward(entry, compute, sharded, number, counts)
            _add_gradients(plain, compute)
        _sum_over_ranks_(plain, zeros=entry.uneven)
        problems = _differences("gradient", _grads(plain), _grads(sharded))
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad()
        _take_over(compute, plain)
        problems += _differences(
            "parameter", dict(plain.named_parameters()), dict(sharded.named_parameters())
        )
        problems += _differences(
            "buffer", dict(compute.named_buffers()), dict(sharded.named_buffers())
        )
        _raise_together([f"step {step}: {problem}" for problem in problems])
    moved = [fqn for fqn, param in plain.named_parameters() if not torch.equal(param, start[fqn])]
    assert moved, "nothing was trained"


def _copies(
    entry: Entry, mesh: tuple[int, ...], options: dict[str, Any]
) -> tuple[nn.Module, nn.Module, ShardingPlan]:
    torch.manual_seed(0)
    plain = entry.build()
    torch.manual_seed(0)
    sharded = entry.build()
    if options.get("checkpoint_activations"):
        _stop_caching(sharded)
    plan = plan_model(sharded, mesh=mesh_of(mesh), **options)
    apply_plan(sharded, plan, mesh_of(mesh))
    if entry.uneven:
        reduce_unused(sharded.modules())  # see _sum_over_ranks_
    if entry.crossing:
        _add_up_gradients_at_unit_inputs(plain, plan)
    assert list(sharded.state_dict()) == list(plain.state_dict())
    assert _ties(sharded) == _ties(plain)
    assert any(isinstance(param, DTensor) for param in sharded.parameters()), "nothing was sharded"
    return plain, sharded, plan


def _stop_caching(model: nn.Module):
    """What is recomputed must not append to a cache; transformers gives an encoder or decoder its
    own config.
    """
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


def _cast_copy(entry: Entry, plan: ShardingPlan) -> nn.Module:
    """A copy that computes as FSDP2 does: parameters in ``param_dtype``, and the inputs of each
    unit cast to it.
    """

    def cast_inputs(dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        return lambda module, args, kwargs: tree_map(cast, (args, kwargs))

    torch.manual_seed(0)
    model = entry.build()
    cast = plan.replicated_modules()
    for unit in plan.units:
        dtype = unit.mp_policy.param_dtype
        replicated = [fqn for fqn in plan.replicated if fqn.rpartition(".")[0] in cast]
        for fqn in (*unit.params, *replicated):
            param = model.get_parameter(fqn)
            param.data = param.data.to(dtype)
        for fqn in unit.modules:
            model.get_submodule(fqn).register_forward_pre_hook(cast_inputs(dtype), with_kwargs=True)
    if entry.crossing:
        _add_up_gradients_at_unit_inputs(model, plan)
    return model


class _Boundary(torch.autograd.Function):
    """One node of the graph for all inputs of a unit, as FSDP2 has."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _add_up_gradients_at_unit_inputs(plain: nn.Module, plan: ShardingPlan):
    """Give the plain model a node of its graph where each unit begins, for ``Entry.crossing``."""

    def cross(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        inputs = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                inputs[place] = leaf
        if inputs:
            for place, tensor in zip(inputs, _Boundary.apply(*inputs.values()), strict=True):
                leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    for fqn in {fqn for unit in plan.units for fqn in unit.modules}:
        plain.get_submodule(fqn).register_forward_pre_hook(cross, with_kwargs=True)


def _ties(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each parameter, in groups."""
    groups: dict[nn.Parameter, list[str]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(fqn)
    return {tuple(fqns) for fqns in groups.values()}


def _backward(entry: Entry, plain: nn.Module, sharded: nn.Module, number: int, counts: float):
    """Both backwards of a micro-batch; the mean over the ranks of the plain gradients
    is their sum.
    """
    batch = entry.batch(number * dist.get_world_size() + dist.get_rank())
    expected = entry.loss(plain, batch)
    (expected * (counts / dist.get_world_size())).backward()
    loss = entry.loss(sharded, batch)
    (loss * counts).backward()
    problems = [] if expected.isfinite() else [f"the plain loss {number} is {expected}"]
    if not torch.equal(loss, expected):
        problems.append(f"loss {number}: {loss.item()!r} for {expected.item()!r}")
    _raise_together(problems)


def _add_gradients(plain: nn.Module, compute: nn.Module):
    """Add the gradients of a micro-batch in the parameters' own dtype, as FSDP2 adds them in
    ``reduce_dtype``.
    """
    for param, twin in zip(plain.parameters(), compute.parameters(), strict=True):
        if twin is not param and twin.grad is not None:
            grad, twin.grad = twin.grad.to(param.dtype), None
            param.grad = grad if param.grad is None else param.grad + grad


def _sum_over_ranks_(model: nn.Module, zeros: bool):
    """Replace gradients by their sum over the ranks, where any rank has one.

    A parameter that no rank uses keeps None, or with ``zeros`` gets zeros, which is what FSDP2 does
    when it is told that the ranks may use different ones.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    used = torch.tensor([zeros or param.grad is not None for param in params], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}  # one collective for each
    for param, is_used in zip(params, used, strict=True):
        if is_used:
            by_dtype.setdefault(param.dtype, []).append(param)
            if param.grad is None:
                param.grad = torch.zeros_like(param)
    for dtype in sorted(by_dtype, key=str):
        group = by_dtype[dtype]
        flat = torch.cat([param.grad.flatten() for param in group])
        dist.all_reduce(flat)
        for param, total in zip(group, flat.split([param.numel() for param in group]), strict=True):
            param.grad = total.view_as(param)


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: param.grad for fqn, param in model.named_parameters() if param.grad is not None}


def _differences(what: str, plain: dict[str, Tensor], sharded: dict[str, Tensor]) -> list[str]:
    """Each rank compares the part that it holds, so that together they compare all."""
    problems = [f"{what} {fqn} in one copy alone" for fqn in plain.keys() ^ sharded.keys()]
    for fqn in plain.keys() & sharded.keys():
        expected, actual = plain[fqn].detach(), sharded[fqn].detach()
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            problems.append(f"{what} {fqn}: {actual.shape}, {actual.dtype}")
            continue
        if isinstance(actual, DTensor):
            expected, actual = part_of(expected, actual), actual.to_local()
        if not torch.equal(actual, expected):
            problems.append(
                f"{what} {fqn} differs by up to {(actual - expected).abs().max().item()}"
            )
    return problems


def _raise_together(problems: list[str]):
    """Fail on all ranks if any found a problem, so that none is left waiting in a collective."""
    found = torch.tensor(len(problems))
    dist.all_reduce(found)
    assert not found, "\n".join(problems) or "another rank differs"


@torch.no_grad()
def _take_over(model: nn.Module, other: nn.Module):
    """Give ``model`` the parameters of ``other``, in its own dtypes, and no gradients."""
    others = dict(other.named_parameters())
    for fqn, param in model.named_parameters():
        param.copy_(full(others[fqn]))
        param.grad = None

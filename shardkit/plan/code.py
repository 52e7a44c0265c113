"""A plan as plain torch code, without shardkit, to leave it at any time."""

from __future__ import annotations

from itertools import groupby

from shardkit.errors import listing
from shardkit.plan.data import PlanData, mp_policy_to_dict
from shardkit.plan.types import ShardUnit

# Functions that the code needs, each with its imports. They repeat ours as text: it must run
# without shardkit.

_CHECKPOINT = """
import functools
from torch.utils import checkpoint

def checkpoint_forward(module, **options):
    # Backward runs forward again, and what it adds to buffers, such as running statistics, is
    # added twice.
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint.checkpoint, module.forward, use_reentrant=False, **options)
    )
"""

_SELECTIVE = """
import itertools

def selective():
    # Saves attention, unless it draws random numbers for dropout, and every other matrix product.
    is_saved = {again: itertools.cycle([True, False]) for again in (False, True)}  # torch < 2.13 asks again

    def policy(context, op, *args, **kwargs):
        given = {**dict(zip((argument.name for argument in op._schema.arguments), args)), **kwargs}
        is_product = op.name() in ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm")
        is_attention = ("attention" in op.name() or "attn" in op.name()) and not given.get("dropout_p")
        saves = next(is_saved[context.is_recompute]) if is_product else is_attention
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if saves else policies.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)
"""

_COMPUTE_IN = """
import functools

def compute_in(module, dtype):
    # With its replicated parameters cast, as fully_shard casts by mp_policy.
    forward = module.forward

    @functools.wraps(forward)
    def cast(*args, **kwargs):
        owners = [(inner._parameters, dict(inner._parameters)) for inner in module.modules()]
        try:
            for params, own in owners:
                params.update({n: p.to(dtype) for n, p in own.items() if p is not None and p.is_floating_point()})
            return forward(*args, **kwargs)
        finally:
            for params, own in owners:
                params.update(own)

    module.forward = cast
"""

_TILES = """
import functools
from torch.utils.checkpoint import checkpoint as recompute

def tile_forward(module, tiles):
    forward = module.forward

    def in_tiles(x, *args, **kwargs):
        def tile(part):
            return forward(part.contiguous(), *args, **kwargs)

        return torch.cat([recompute(tile, part, use_reentrant=False) for part in x.chunk(tiles, -2)], -2)

    module.forward = functools.wraps(forward)(in_tiles)
"""

_DIVIDE = """
def divide_gradients(module, times):
    # Experts' gradients hold the tokens of all ranks, but torch divides them by the ranks that reduce them.
    def divide(gradient):
        gradient.div_(times)
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())

    module.set_all_reduce_hook(divide)
"""

_PREFETCH = """
units = [model.get_submodule(name) for name in {names}]
for index, unit in enumerate(units):
    unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + {ahead}])
    unit.set_modules_to_backward_prefetch(units[max(0, index - {ahead}) : index][::-1])
"""

_REDUCE = """
def reduce_replicated():
    # Call it after the last backward of each step, before clipping and optimizer.step().
    for param in replicated:
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            used = torch.tensor([float(param.grad is not None)], device=device_type)
            total = torch.cat([used, grad.flatten()])  # in float32 or wider
            for axis in range(mesh.ndim):
                torch.distributed.all_reduce(total, group=mesh.get_group(axis))
            if total[0]:
                param.grad = (total[1:] / mesh.size()).view(param.shape).to(param.dtype)
"""


def python(plan: PlanData, before: str = "") -> str:
    """Return code that shards the ``model`` in scope; it needs a process group of the mesh's size.

    ``before`` is code to run once the mesh is there and nothing is sharded.
    """
    code = ["import torch", "from torch.distributed import fsdp"]
    code.append("from torch.distributed.device_mesh import init_device_mesh")
    policies = {unit.checkpoint_activations for unit in plan.units} - {False}
    for policy in sorted(map(str, policies - {True, "selective"})):
        code.append(f"import {policy.partition(':')[0]}")
    cast = plan.replicated_modules()
    if policies:
        code.append(_CHECKPOINT)
    if "selective" in policies:
        code.append(_SELECTIVE)
    if cast:
        code.append(_COMPUTE_IN)
    if plan.tiles:
        code.append(_TILES)
    if any(plan.mesh.parts(unit.mesh) > 1 for unit in plan.units):
        code.append(_DIVIDE)

    code += ["", *_setup(plan), before]
    for note in plan.notes:
        code.append(f"# note: {note}")
    skipped = [unit.name for unit in plan.units if unit.may_skip]
    if skipped:
        code.append(
            "# Not in this code: may_skip, which torch lacks; each rank must call "
            f"{listing(skipped, 6)} in every step, or the others wait."
        )
    for fqn, dtype in cast.items():
        code.append(f"compute_in({_module(fqn)}, {dtype})")
    for fqn, tiles in plan.tiles:
        code.append(f"tile_forward({_module(fqn)}, {tiles})")
    for calls, units in groupby(plan.units, lambda unit: _calls(plan, unit)):
        code.append("for names in [")
        for unit in units:
            code.append(f"    {list(unit.modules)},")
        code.append("]:")
        code.append("    modules = [model.get_submodule(name) for name in names]")
        code += calls
    if plan.prefetch:
        names = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        code.append(_PREFETCH.format(names=names, ahead=plan.prefetch))
    if plan.replicated:
        code.append(_REDUCE)
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        code.append(f"fsdp.register_fsdp_forward_method({_module(fqn)}, {method!r})")
    return "\n".join([*code, ""])


def _setup(plan: PlanData) -> list[str]:
    mesh = plan.mesh
    code = ['device_type = "cuda" if torch.cuda.is_available() else "cpu"']
    code.append(
        f"mesh = init_device_mesh(device_type, {mesh.shape}, mesh_dim_names={mesh.axis_names})"
    )
    if mesh.shard_axes > 1:
        joined = mesh.on(None)
        code.append(
            f"joined = init_device_mesh(device_type, {joined.shape}, "
            f"mesh_dim_names={joined.axis_names})"
        )
    dims = [pair for unit in plan.units for pair in unit.shard_dims]
    if dims:
        code.append("from torch.distributed.tensor import Shard")
        code.append("placements = {")
        for fqn, dim in dims:
            code.append(f"    model.get_parameter({fqn!r}): Shard({dim}),")
        code.append("}")
    if plan.unsharded:
        code.append(
            f"ignored_params = {{model.get_parameter(name) for name in {list(plan.unsharded)}}}"
        )
    if plan.replicated:
        code.append(f"replicated = [model.get_parameter(name) for name in {list(plan.replicated)}]")
        code.append("for param in replicated:")
        code.append("    if not param.is_meta:")
        code.append("        param.data = param.data.to(device_type)")
    return code


def _calls(plan: PlanData, unit: ShardUnit) -> list[str]:
    """Return the code that makes ``modules`` this unit. Units with the same code share a loop."""
    code = []
    if unit.checkpoint_activations:
        options = ""
        if unit.checkpoint_activations == "selective":
            options = ", context_fn=selective"
        elif unit.checkpoint_activations is not True:
            policy = unit.checkpoint_activations.replace(":", ".")
            contexts = "checkpoint.create_selective_checkpoint_contexts"
            options = f", context_fn=functools.partial({contexts}, {policy})"
        code.append("    for module in modules:")
        code.append(f"        checkpoint_forward(module{options})")
    if unit.compile:
        code.append("    for module in modules:")
        code.append("        module.forward = torch.compile(module.forward)")

    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh{list(plan.mesh_of(unit).axis_names)}"
    arguments = [f"mesh={mesh}", f"reshard_after_forward={unit.reshard_after_forward}"]
    policies = []
    for name, value in mp_policy_to_dict(unit.mp_policy).items():
        policies.append(f"{name}=torch.{value}" if isinstance(value, str) else f"{name}={value}")
    if policies:
        arguments.append(f"mp_policy=fsdp.MixedPrecisionPolicy({', '.join(policies)})")
    if unit.offloads:
        pin_memory = unit.offload_policy.pin_memory
        arguments.append(f"offload_policy=fsdp.CPUOffloadPolicy(pin_memory={pin_memory})")
    if plan.unsharded:
        arguments.append("ignored_params=ignored_params")
    if unit.shard_dims:
        arguments.append("shard_placement_fn=placements.get")
    code.append("    fsdp.fully_shard(")
    for argument in ("modules", *arguments):
        code.append(f"        {argument},")
    code.append("    )")
    if plan.mesh.parts(unit.mesh) > 1:
        code.append(f"    divide_gradients(modules[0], {plan.mesh.parts(unit.mesh)})")
    return code


def _module(fqn: str) -> str:
    return f"model.get_submodule({fqn!r})" if fqn else "model"

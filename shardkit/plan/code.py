"""A plan as plain torch code, without shardkit, to leave it at any time."""

from __future__ import annotations

import inspect
from itertools import groupby

from shardkit.errors import listing
from shardkit.plan.data import PlanData, mp_policy_to_dict
from shardkit.plan.types import ShardUnit

# Functions that the code needs, each with its imports. They repeat ours as text: it must run
# without shardkit.

_CHECKPOINT = """
import functools
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

def checkpoint_forward(module, policy=None):
    # Backward runs forward again, and what it adds to buffers, such as running statistics, is
    # added twice. The policy says what to keep.
    run = functools.partial(checkpoint, module.forward, use_reentrant=False)
    if policy is not None:
        run.keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    module.forward = functools.wraps(module.forward)(run)
"""

# For "selective". Attention is not among them, since dropout in it draws random numbers.
_PRODUCTS = "[torch.ops.aten.mm.default, torch.ops.aten.addmm.default]"

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
    if cast:
        from shardkit.runtime.replicated import compute_in  # works without shardkit

        code.append("import functools\nfrom typing import Any\nfrom torch import nn\n")
        code.append(inspect.getsource(compute_in))
    if any(unit.float32 for unit in plan.units):
        from shardkit.runtime.float32 import compute_in_float32

        code.append("import functools\nfrom typing import Any\nfrom torch import Tensor, nn")
        code.append("from torch.utils._pytree import tree_map\n")
        code.append(inspect.getsource(compute_in_float32))
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
    if plan.tiles:
        code.append("# Not in this code: tiles, which save memory.")
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
    if plan.not_in_units:
        code.append(
            f"ignored_params = {{model.get_parameter(name) for name in {list(plan.not_in_units)}}}"
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
    if unit.float32:
        code.append("    for module in modules:")
        code.append("        compute_in_float32(module)")
    if unit.checkpoint_activations:
        policy = str(unit.checkpoint_activations).replace(":", ".")
        policy = {"True": "", "selective": _PRODUCTS}.get(policy, policy)
        code.append("    for module in modules:")
        code.append(f"        checkpoint_forward(module, {policy})")
    if unit.compile:
        code.append("    for module in modules:")
        code.append("        module.forward = torch.compile(module.forward)")

    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh{list(plan.mesh_of(unit).axis_names)}"
    arguments = ["modules", f"mesh={mesh}", f"reshard_after_forward={unit.reshard_after_forward}"]
    policies = []
    for name, value in mp_policy_to_dict(unit.mp_policy).items():
        policies.append(f"{name}=torch.{value}" if isinstance(value, str) else f"{name}={value}")
    if policies:
        arguments.append(f"mp_policy=fsdp.MixedPrecisionPolicy({', '.join(policies)})")
    if unit.offloads:
        pin_memory = unit.offload_policy.pin_memory  # type: ignore[attr-defined]
        arguments.append(f"offload_policy=fsdp.CPUOffloadPolicy(pin_memory={pin_memory})")
    if plan.not_in_units:
        arguments.append("ignored_params=ignored_params")
    if unit.shard_dims:
        arguments.append("shard_placement_fn=placements.get")
    code.append("    fsdp.fully_shard(")
    for argument in arguments:
        code.append(f"        {argument},")
    code.append("    )")
    if plan.mesh.parts(unit.mesh) > 1:
        code.append(f"    divide_gradients(modules[0], {plan.mesh.parts(unit.mesh)})")
    return code


def _module(fqn: str) -> str:
    return f"model.get_submodule({fqn!r})" if fqn else "model"

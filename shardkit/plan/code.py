"""A plan as plain torch code, without shardkit, to leave it at any time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.fsdp import CPUOffloadPolicy

from shardkit.errors import listing
from shardkit.plan.check import children_first
from shardkit.plan.data import PlanData, mp_policy_to_dict
from shardkit.plan.text import calls, counted, fold
from shardkit.plan.types import ShardUnit

# Code has those of them that it uses.
_IMPORTS = """\
import functools
import itertools
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts
"""

# Functions that the code needs. They repeat ours as text: it must run without shardkit.

_CHECKPOINT = """
def checkpoint_forward(module, **options):
    # Backward runs forward again, and what it adds to buffers, such as running statistics, is
    # added twice.
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint, module.forward, use_reentrant=False, **options)
    )
"""

_SELECTIVE = """
def selective():
    # Saves attention, unless it draws random numbers for dropout, and every other matrix product.
    is_saved = {again: itertools.cycle([True, False]) for again in (False, True)}  # torch < 2.13 asks again

    def policy(context, op, *args, **kwargs):
        given = {**dict(zip((argument.name for argument in op._schema.arguments), args)), **kwargs}
        is_product = op.name() in ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm")
        is_attention = ("attention" in op.name() or "attn" in op.name()) and not given.get("dropout_p")
        saves = next(is_saved[context.is_recompute]) if is_product else is_attention
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
"""

_COMPUTE_IN = """
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
def tile_forward(module, tiles):
    forward = module.forward

    def in_tiles(x, *args, **kwargs):
        def tile(part):
            return forward(part.contiguous(), *args, **kwargs)

        return torch.cat([checkpoint(tile, part, use_reentrant=False) for part in x.chunk(tiles, -2)], -2)

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
    trained = [param for param in replicated if param.requires_grad]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in trained]
    used = torch.tensor([float(param.grad is not None) for param in trained], device=device_type)
    flat = torch.cat([used, *(grad.flatten() for grad in grads)])  # in float32 or wider
    for axis in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(axis))
    used, *totals = flat.split([len(grads), *(grad.numel() for grad in grads)])
    for param, ranks, total in zip(trained, used.tolist(), totals):
        if ranks:
            param.grad = (total / mesh.size()).view(param.shape).to(param.dtype)
"""


def python(plan: PlanData, before: str = "") -> str:
    """Return code that shards the ``model`` in scope; it needs a process group of the mesh's size.

    ``before`` is code to run once the mesh is there and nothing is sharded.
    """
    policies = {unit.checkpoint_activations for unit in plan.units} - {False}
    cast = plan.replicated_modules()
    code = []
    for policy in sorted(map(str, policies - {True, "selective"})):
        code.append(f"import {policy.partition(':')[0]}")
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

    code += ["", *_setup_code(plan), *before.splitlines(), ""]
    for note in plan.notes:
        code.append(f"# note: {note}")
    skipped = [unit.name for unit in plan.units if unit.may_skip]
    if skipped:
        code.append(
            "# Not in this code: may_skip, which torch lacks; each rank must call "
            f"{listing(skipped, 6)} in every step, or the others wait."
        )
    if cast:
        code.append(f"for name, dtype in {cast}.items():")
        code.append("    compute_in(model.get_submodule(name), dtype)")
    for fqn, tiles in plan.tiles:
        code.append(f"tile_forward({_module(_quoted(fqn))}, {tiles})")
    for run in _runs_in_order(plan):
        code += _run_code(plan, run)
    if plan.prefetch:
        names = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        code.append(_PREFETCH.format(names=names, ahead=plan.prefetch).rstrip())
    if plan.replicated:
        code.append(_REDUCE.rstrip())
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        code.append(f"register_fsdp_forward_method({_module(_quoted(fqn))}, {_quoted(method)})")
    text = "\n".join([*code, ""])
    imports = []
    for line in _IMPORTS.splitlines():
        if re.search(rf"\b{line.split()[-1]}[(.,]", text):
            imports.append(line)
    return "\n".join([*imports, text])


def _runs_in_order(plan: PlanData) -> list[list[ShardUnit]]:
    """Return the units in loops, unless these would shard a module before one inside of it."""
    runs = fold(plan.units, calls)
    units = [unit for run in runs for unit in run]
    if any(children_first(replace(plan, units=tuple(units)))):
        return [[unit] for unit in plan.units]
    return runs


def _setup_code(plan: PlanData) -> list[str]:
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
        code.append("dims = {")
        for fqn, dim in dims:
            code.append(f"    {_quoted(fqn)}: {dim},")
        code.append("}")
        code.append(
            "placements = {model.get_parameter(name): Shard(dim) for name, dim in dims.items()}"
        )
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


def _run_code(plan: PlanData, run: Sequence[ShardUnit]) -> list[str]:
    """Return the code of units that differ in one number: a loop over it, if they are several."""
    if len(run) == 1:
        return _unit_code(plan, run[0], [_quoted(fqn) for fqn in run[0].modules])
    around, first = counted(run[0])
    assert first is not None  # only counted units are folded into a run
    names = []
    for parts in around:
        before, after = (
            _quoted(part)[1:-1].replace("{", "{{").replace("}", "}}") for part in parts
        )
        names.append(f'f"{before}{{i}}{after}"')
    code = [f"for i in range({first}, {first + len(run)}):"]
    for line in _unit_code(plan, run[0], names):
        code.append("    " + line)
    return code


def _unit_code(plan: PlanData, unit: ShardUnit, names: Sequence[str]) -> list[str]:
    """Return the code of a unit whose modules have these names, as Python expressions."""
    targets = ", ".join(map(_module, names))
    code = []
    if unit.checkpoint_activations or unit.compile:
        code.append(f"for module in [{targets}]:")
    if unit.checkpoint_activations is True:
        code.append("    checkpoint_forward(module)")
    elif unit.checkpoint_activations == "selective":
        code.append("    checkpoint_forward(module, context_fn=selective)")
    elif unit.checkpoint_activations:
        policy = str(unit.checkpoint_activations).replace(":", ".")
        contexts = f"functools.partial(create_selective_checkpoint_contexts, {policy})"
        code.append(f"    checkpoint_forward(module, context_fn={contexts})")
    if unit.compile:
        code.append("    module.forward = torch.compile(module.forward)")

    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh[{', '.join(map(_quoted, plan.mesh_of(unit).axis_names))}]"
    given = [f"mesh={mesh}", f"reshard_after_forward={unit.reshard_after_forward}"]
    fields = []
    for name, value in mp_policy_to_dict(unit.mp_policy).items():
        fields.append(f"{name}=torch.{value}" if isinstance(value, str) else f"{name}={value}")
    if fields:
        given.append(f"mp_policy=MixedPrecisionPolicy({', '.join(fields)})")
    if isinstance(unit.offload_policy, CPUOffloadPolicy):
        given.append(
            f"offload_policy=CPUOffloadPolicy(pin_memory={unit.offload_policy.pin_memory})"
        )
    if plan.unsharded:
        given.append("ignored_params=ignored_params")
    if unit.shard_dims:
        given.append("shard_placement_fn=placements.get")
    modules = targets if len(names) == 1 else f"[{targets}]"
    code.append(f"fully_shard({modules}, {', '.join(given)})")
    if plan.mesh.parts(unit.mesh) > 1:
        code.append(f"divide_gradients({targets}, {plan.mesh.parts(unit.mesh)})")
    return code


def _quoted(name: str) -> str:
    """Return a name as Python source, in double quotes; JSON's escapes are valid in Python."""
    return json.dumps(name, ensure_ascii=False)


def _module(name: str) -> str:
    return "model" if name == '""' else f"model.get_submodule({name})"

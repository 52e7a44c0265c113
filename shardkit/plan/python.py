"""Write a plan as plain torch code, so that a user can leave shardkit at any time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardkit.plan.check import children_first
from shardkit.plan.data import PlanData, mp_policy_to_dict
from shardkit.plan.table import calls, counted, fold
from shardkit.plan.types import ShardUnit

_CHECKPOINT = """
def checkpoint_forward(module):
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint, module.forward, use_reentrant=False)
    )
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
    used = torch.tensor([param.grad is not None for param in trained], dtype=torch.int32, device=device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(used, group=mesh.get_group(axis))
    for param in (param for param, ranks in zip(trained, used.tolist()) if ranks):
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        for axis in range(mesh.ndim):
            dist.all_reduce(grad, group=mesh.get_group(axis))
        param.grad = grad / mesh.size()
"""


def python(plan: PlanData) -> str:
    """Return code that shards the ``model`` in scope; it needs a process group of the mesh's size."""
    runs = fold(plan.units, calls)
    if any(children_first(replace(plan, units=tuple(chain(*runs))))):  # loops would shard a module before its child
        runs = [[unit] for unit in plan.units]
    lines = [*_header(plan), *_setup(plan), ""]
    lines += [f"tile_forward({_module(_quoted(fqn))}, {tiles})" for fqn, tiles in plan.tiles]
    lines += [line for run in runs for line in _run(plan, run)]
    if plan.prefetch:
        ahead = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        lines.append(_PREFETCH.format(names=ahead, ahead=plan.prefetch).rstrip())
    lines += [_REDUCE.rstrip()] * bool(plan.replicated)
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        lines.append(f"register_fsdp_forward_method({_module(_quoted(fqn))}, {_quoted(method)})")
    return "\n".join(lines) + "\n"


def _header(plan: PlanData) -> Iterator[str]:
    """Yield the imports, and the helpers that the code uses."""
    checkpoints = any(unit.checkpoint_activations for unit in plan.units)
    wraps = checkpoints or bool(plan.tiles)
    names = {"fully_shard", *(type(unit.offload_policy).__name__ for unit in plan.units if unit.offloads)}
    names |= {"MixedPrecisionPolicy" for unit in plan.units if unit.mp_policy != MixedPrecisionPolicy()}
    names |= {"register_fsdp_forward_method"} if plan.forward_methods else set()
    yield from ["import functools", ""] * wraps
    yield "import torch"
    yield from ["import torch.distributed as dist"] * bool(plan.replicated)
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield f"from torch.distributed.fsdp import {', '.join(sorted(names))}"
    yield from ["from torch.distributed.tensor import Shard"] * any(unit.shard_dims for unit in plan.units)
    yield from ["from torch.utils.checkpoint import checkpoint"] * wraps
    yield from ["", _CHECKPOINT] * checkpoints
    yield from ["", _TILES] * bool(plan.tiles)
    yield from ["", _DIVIDE] * any(plan.mesh.parts(unit.mesh) > 1 for unit in plan.units)


def _quoted(name: str) -> str:
    """Return a name as Python source, in double quotes; JSON's escapes are valid in Python."""
    return json.dumps(name, ensure_ascii=False)


def _module(name: str) -> str:
    return "model" if name == '""' else f"model.get_submodule({name})"


def _setup(plan: PlanData) -> Iterator[str]:
    yield ""
    yield 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"mesh = init_device_mesh(device_type, {plan.mesh.shape}, mesh_dim_names={plan.mesh.axis_names})"
    if plan.mesh.shard_axes > 1:
        joined = plan.mesh.on(None)
        yield f"joined = init_device_mesh(device_type, {joined.shape}, mesh_dim_names={joined.axis_names})"
    if dims := {fqn: dim for unit in plan.units for fqn, dim in unit.shard_dims}:
        yield from ["dims = {", *(f"    {_quoted(fqn)}: {dim}," for fqn, dim in dims.items()), "}"]
        yield "placements = {model.get_parameter(name): Shard(dim) for name, dim in dims.items()}"
    if plan.unsharded:
        yield f"ignored_params = {{model.get_parameter(name) for name in {list(plan.unsharded)}}}"
    if plan.replicated:
        yield f"replicated = [model.get_parameter(name) for name in {list(plan.replicated)}]"
        yield "for param in (param for param in replicated if not param.is_meta):"
        yield "    param.data = param.data.to(device_type)"


def _run(plan: PlanData, run: Sequence[ShardUnit]) -> Iterator[str]:
    """Yield the code of units that differ in one number: a loop over it, if they are several."""
    if len(run) == 1:
        yield from _unit(plan, run[0], [_quoted(fqn) for fqn in run[0].modules])
        return
    around, first = counted(run[0])
    assert first is not None  # only counted units are folded into a run
    yield f"for i in range({first}, {first + len(run)}):"
    escaped = [[_quoted(part)[1:-1].replace("{", "{{").replace("}", "}}") for part in parts] for parts in around]
    yield from (
        "    " + line for line in _unit(plan, run[0], [f'f"{before}{{i}}{after}"' for before, after in escaped])
    )


def _unit(plan: PlanData, unit: ShardUnit, names: Sequence[str]) -> Iterator[str]:
    targets = ", ".join(map(_module, names))
    if unit.checkpoint_activations or unit.compile:
        inside = not set(unit.blocks) <= set(unit.modules)
        yield f"for module in [{', '.join(_module(_quoted(fqn)) for fqn in unit.blocks) if inside else targets}]:"
        yield from ["    checkpoint_forward(module)"] * unit.checkpoint_activations
        yield from ["    module.forward = torch.compile(module.forward)"] * unit.compile
    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh[{', '.join(map(_quoted, plan.mesh_of(unit).axis_names))}]"
    given = [f"mesh={mesh}", f"reshard_after_forward={unit.reshard_after_forward}"]
    if policy := mp_policy_to_dict(unit.mp_policy):
        fields = [f"{key}={f'torch.{value}' if isinstance(value, str) else value}" for key, value in policy.items()]
        given.append(f"mp_policy=MixedPrecisionPolicy({', '.join(fields)})")
    if isinstance(unit.offload_policy, CPUOffloadPolicy):
        given.append(f"offload_policy=CPUOffloadPolicy(pin_memory={unit.offload_policy.pin_memory})")
    given += ["ignored_params=ignored_params"] * bool(plan.unsharded)
    given += ["shard_placement_fn=placements.get"] * bool(unit.shard_dims)
    yield f"fully_shard({targets if len(names) == 1 else f'[{targets}]'}, {', '.join(given)})"
    if (parts := plan.mesh.parts(unit.mesh)) > 1:
        yield f"divide_gradients({_module(names[0])}, {parts})"

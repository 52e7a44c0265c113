"""Write a plan as plain torch code, so that a user can leave shardkit at any time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.plan.data import PlanData
from shardkit.plan.serialize import mp_policy_to_dict
from shardkit.plan.table import calls, counted, fold
from shardkit.plan.types import ShardUnit, ancestors

CHECKPOINT = """
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
    if not _children_first(runs):
        runs = [[unit] for unit in plan.units]
    names = {type(unit.offload_policy).__name__ for unit in plan.units if unit.offloads}
    names |= {"MixedPrecisionPolicy" for unit in plan.units if unit.mp_policy != MixedPrecisionPolicy()}
    names |= {"register_fsdp_forward_method"} if plan.forward_methods else set()
    checkpoints = any(unit.checkpoint_activations for unit in plan.units)
    has_dims = any(unit.shard_dims for unit in plan.units)
    wraps = checkpoints or bool(plan.tiles)
    parts = [*imports(names, checkpoints=wraps, uses_dist=bool(plan.replicated), shards=has_dims)]
    divides = any(plan.mesh.parts(unit.mesh) > 1 for unit in plan.units)
    for helper, is_used in ((CHECKPOINT, checkpoints), (_TILES, plan.tiles), (_DIVIDE, divides)):
        parts += ["", helper] if is_used else []
    parts += [*_setup(plan), ""]
    for name, tiles in plan.tiles:
        parts.append(f"tile_forward({_module(quoted(name))}, {tiles})")
    parts += [line for run in runs for line in _run(plan, run)]
    if plan.prefetch:
        ahead = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        parts.append(_PREFETCH.format(names=ahead, ahead=plan.prefetch).rstrip())
    parts += [_REDUCE.rstrip()] * bool(plan.replicated)
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        parts.append(f"register_fsdp_forward_method({_module(quoted(fqn))}, {quoted(method)})")
    return "\n".join(parts) + "\n"


def quoted(name: str) -> str:
    """Return a name as Python source, in double quotes; JSON's escapes are valid in Python."""
    return json.dumps(name, ensure_ascii=False)


def imports(fsdp_names: Collection[str], *, checkpoints: bool, uses_dist: bool, shards: bool = False) -> Iterator[str]:
    """Yield the imports of code with ``fully_shard``; ``fsdp_names`` are further names of torch.distributed.fsdp."""
    yield from ["import functools", ""] if checkpoints else []
    yield "import torch"
    yield from ["import torch.distributed as dist"] if uses_dist else []
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield f"from torch.distributed.fsdp import {', '.join(sorted({'fully_shard', *fsdp_names}))}"
    yield from ["from torch.distributed.tensor import Shard"] if shards else []
    yield from ["from torch.utils.checkpoint import checkpoint"] if checkpoints else []


def arguments(
    reshard_after_forward: object,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    pin: str = "",
    mesh: str = "mesh",
) -> Iterator[str]:
    """Yield the arguments of a ``fully_shard`` call; ``pin`` replaces the value of ``pin_memory`` by code."""
    yield f"mesh={mesh}"
    yield f"reshard_after_forward={reshard_after_forward}"
    if mp_policy != MixedPrecisionPolicy():
        fields = mp_policy_to_dict(mp_policy).items()
        given = [f"{name}={f'torch.{value}' if isinstance(value, str) else value}" for name, value in fields]
        yield f"mp_policy=MixedPrecisionPolicy({', '.join(given)})"
    if isinstance(offload_policy, CPUOffloadPolicy):
        yield f"offload_policy=CPUOffloadPolicy(pin_memory={pin or offload_policy.pin_memory})"


def _module(name: str) -> str:
    return "model" if name == '""' else f"model.get_submodule({name})"


def _children_first(runs: Sequence[Sequence[ShardUnit]]) -> bool:
    """Return whether executing the runs one after another still shards children before their parents."""
    done: set[str] = set()
    for unit in (unit for run in runs for unit in run):
        if any(outer in done for fqn in unit.modules for outer in ancestors(fqn)):
            return False
        done.update(unit.modules)
    return True


def _setup(plan: PlanData) -> Iterator[str]:
    yield ""
    yield 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"mesh = init_device_mesh(device_type, {plan.mesh.shape}, mesh_dim_names={plan.mesh.axis_names})"
    if plan.mesh.shard_axes > 1:
        joined = plan.mesh.on(None)
        yield f"joined = init_device_mesh(device_type, {joined.shape}, mesh_dim_names={joined.axis_names})"
    if dims := {fqn: dim for unit in plan.units for fqn, dim in unit.shard_dims}:
        yield from ["dims = {", *(f"    {quoted(fqn)}: {dim}," for fqn, dim in dims.items()), "}"]
        yield "placements = {model.get_parameter(name): Shard(dim) for name, dim in dims.items()}"
    if plan.unsharded:
        yield f"ignored_params = {{model.get_parameter(name) for name in {list(plan.unsharded)}}}"
    if plan.replicated:
        yield f"replicated = [model.get_parameter(name) for name in {list(plan.replicated)}]"
        yield "for param in (param for param in replicated if not param.is_meta):"
        yield "    param.data = param.data.to(device_type)"


def _run(plan: PlanData, run: Sequence[ShardUnit]) -> Iterator[str]:
    unit = run[0]
    if len(run) == 1:
        yield from _unit(plan, unit, [quoted(fqn) for fqn in unit.modules])
        return
    around, first = counted(unit)
    assert first is not None  # only counted units are folded into a run
    yield f"for i in range({first}, {first + len(run)}):"
    names = [f'f"{_escaped(before)}{{i}}{_escaped(behind)}"' for before, behind in around]
    yield from ("    " + line for line in _unit(plan, unit, names))


def _unit(plan: PlanData, unit: ShardUnit, names: Sequence[str]) -> Iterator[str]:
    targets = ", ".join(map(_module, names))
    if unit.checkpoint_activations or unit.compile:
        yield f"for module in [{targets}]:"
        yield from ["    checkpoint_forward(module)"] if unit.checkpoint_activations else []
        yield from ["    module.forward = torch.compile(module.forward)"] if unit.compile else []
    mesh = "mesh" if plan.mesh.shard_axes == 1 else "joined"
    if unit.mesh is not None:
        mesh = f"mesh[{', '.join(map(quoted, plan.mesh_of(unit).axis_names))}]"
    given = [*arguments(unit.reshard_after_forward, unit.mp_policy, unit.offload_policy, mesh=mesh)]
    given += ["ignored_params=ignored_params"] if plan.unsharded else []
    given += ["shard_placement_fn=placements.get"] if unit.shard_dims else []
    yield f"fully_shard({targets if len(names) == 1 else f'[{targets}]'}, {', '.join(given)})"
    if (parts := plan.mesh.parts(unit.mesh)) > 1:
        yield f"divide_gradients({_module(names[0])}, {parts})"


def _escaped(part: str) -> str:
    """Return a part of a name as it is written inside of an f-string."""
    return quoted(part)[1:-1].replace("{", "{{").replace("}", "}}")

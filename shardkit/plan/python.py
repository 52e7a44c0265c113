"""A plan as the plain torch code it stands for, so that a user can leave shardkit at any time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.plan.check import ancestors
from shardkit.plan.serialize import mp_policy_to_dict, offload_policy_to_dict
from shardkit.plan.table import calls, counted, fold

if TYPE_CHECKING:
    from shardkit.plan.types import ShardingPlan, ShardUnit

_CHECKPOINT = """
def checkpoint_forward(module):
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint, module.forward, use_reentrant=False)
    )
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


def python(plan: ShardingPlan) -> str:
    """Code that shards the ``model`` in scope; the process group must be there and have the mesh's size."""
    runs = fold(plan.units, calls)
    if not _children_first(runs):
        runs = [[unit] for unit in plan.units]
    parts = [*_imports(plan), *_setup(plan), ""]
    parts += [line for run in runs for line in _run(plan, run)]
    if plan.prefetch:
        names = [unit.modules[0] for unit in plan.execution_order() if unit.modules != ("",)]
        parts.append(_PREFETCH.format(names=names, ahead=plan.prefetch).rstrip())
    if plan.replicated:
        parts.append(_REDUCE.rstrip())
    parts += [_method(name) for name in plan.forward_methods]
    return "\n".join(parts) + "\n"


def _method(name: str) -> str:
    fqn, _, method = name.rpartition(".")
    module = f"model.get_submodule({quoted(fqn)})" if fqn else "model"
    return f"register_fsdp_forward_method({module}, {quoted(method)})"


def quoted(name: str) -> str:
    """A name as Python source, in double quotes; JSON's escapes are Python's too."""
    return json.dumps(name, ensure_ascii=False)


def _children_first(runs: Sequence[Sequence[ShardUnit]]) -> bool:
    """Whether carrying out the runs one after another still shards children before their parents."""
    done: set[str] = set()
    for unit in (unit for run in runs for unit in run):
        if any(outer in done for fqn in unit.modules for outer in ancestors(fqn)):
            return False
        done.update(unit.modules)
    return True


def _imports(plan: ShardingPlan) -> Iterator[str]:
    recomputes = any(unit.checkpoint_activations for unit in plan.units)
    policies = {type(unit.offload_policy).__name__ for unit in plan.units if unit.offloads}
    policies |= {"MixedPrecisionPolicy" for unit in plan.units if unit.mp_policy != MixedPrecisionPolicy()}
    yield from ["import functools", ""] if recomputes else []
    yield "import torch"
    yield from ["import torch.distributed as dist"] if plan.replicated else []
    yield "from torch.distributed.device_mesh import init_device_mesh"
    names = [*sorted(policies), "fully_shard", *(["register_fsdp_forward_method"] if plan.forward_methods else [])]
    yield f"from torch.distributed.fsdp import {', '.join(names)}"
    yield from ["from torch.utils.checkpoint import checkpoint", "", _CHECKPOINT] if recomputes else []


def _setup(plan: ShardingPlan) -> Iterator[str]:
    yield ""
    yield 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"mesh = init_device_mesh(device_type, {plan.mesh.shape}, mesh_dim_names={plan.mesh.axis_names})"
    if plan.unsharded:
        yield f"ignored_params = {{model.get_parameter(name) for name in {list(plan.unsharded)}}}"
    if plan.replicated:
        yield f"replicated = [model.get_parameter(name) for name in {list(plan.replicated)}]"
        yield "for param in (param for param in replicated if not param.is_meta):"
        yield "    param.data = param.data.to(device_type)"


def _run(plan: ShardingPlan, run: Sequence[ShardUnit]) -> Iterator[str]:
    unit = run[0]
    if len(run) == 1:
        yield from _unit(plan, unit, [quoted(fqn) for fqn in unit.modules])
        return
    first = counted(unit)[1]
    assert first is not None  # only counted units are folded into a run
    yield f"for i in range({first}, {first + len(run)}):"
    around = [[quoted(part)[1:-1].replace("{", "{{").replace("}", "}}") for part in each] for each in counted(unit)[0]]
    names = [f'f"{before}{{i}}{behind}"' for before, behind in around]
    yield from ("    " + line for line in _unit(plan, unit, names))


def _unit(plan: ShardingPlan, unit: ShardUnit, names: Sequence[str]) -> Iterator[str]:
    targets = ["model" if name == '""' else f"model.get_submodule({name})" for name in names]
    modules = targets[0] if len(targets) == 1 else f"[{', '.join(targets)}]"
    if unit.checkpoint_activations or unit.compile:
        yield f"for module in {modules if len(targets) > 1 else f'[{modules}]'}:"
        yield from ["    checkpoint_forward(module)"] if unit.checkpoint_activations else []
        yield from ["    module.forward = torch.compile(module.forward)"] if unit.compile else []
    yield f"fully_shard({modules}, {', '.join(_arguments(plan, unit))})"


def _arguments(plan: ShardingPlan, unit: ShardUnit) -> Iterator[str]:
    yield "mesh=mesh"
    yield f"reshard_after_forward={unit.reshard_after_forward}"
    if unit.mp_policy != MixedPrecisionPolicy():
        fields = mp_policy_to_dict(unit.mp_policy).items()
        given = [f"{name}={f'torch.{value}' if isinstance(value, str) else value}" for name, value in fields]
        yield f"mp_policy=MixedPrecisionPolicy({', '.join(given)})"
    if unit.offloads:
        given = [f"{name}={value}" for name, value in offload_policy_to_dict(unit.offload_policy).items()]
        yield f"offload_policy=CPUOffloadPolicy({', '.join(given)})"
    if plan.unsharded:
        yield "ignored_params=ignored_params"

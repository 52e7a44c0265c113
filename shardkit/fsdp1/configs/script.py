"""A target as plain torch code for any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from textwrap import indent

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardkit.fsdp1.configs.build import mp_policy, offload_policy
from shardkit.fsdp1.configs.target import Target
from shardkit.fsdp1.translate.notes import Note
from shardkit.plan.python import quoted

_BLOCKS = '''
def units(model):
    """The blocks, children before parents."""
    names = {names}
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]
'''

_DECLARED = '''
def units(model):
    """The blocks that the model declares, children before parents."""
    names = set(model._no_split_modules){more}
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]
'''

_ROOT_ONLY = '''
def units(model):
    """None but the root: the whole model is gathered at once."""
    return []
'''

_BY_SIZE = '''
def units(model):
    """Modules with {least} elements beside those of inner units, children before parents."""
    found = []

    def visit(module):
        total = sum(param.numel() for param in module.parameters())
        if total < {least}:
            return 0
        leaf = isinstance(module, torch.nn.MultiheadAttention)
        inside = 0 if leaf else sum(visit(child) for child in module.children())
        container = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
        if total - inside < {least} or leaf or container or module is model:
            return inside
        found.append(module)
        return total

    visit(model)
    return found
'''

_CHECKPOINT = """
def checkpoint_forward(module):
    module.forward = functools.wraps(module.forward)(
        functools.partial(checkpoint, module.forward, use_reentrant=False)
    )
"""

_BROADCAST = """
for tensor in (*model.parameters(), *model.buffers()):
    value = tensor.detach().to("cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(value, 0)
    tensor.data.copy_(value)
"""

_ALL_BUFFERS = """
for buffer in model.buffers():
    if buffer.is_floating_point():
        buffer.data = buffer.data.to({dtype})
"""

_BUFFER = """model.get_buffer({name}).data = model.get_buffer({name}).data.to({dtype})
"""

_PREFETCH = """
    ahead = {ahead}
    order = [module for module in model.modules() if module in set(blocks)]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + ahead])
"""


def script(target: Target) -> str:
    """A function ``shard(model)`` that does with any model what the target says, and its imports."""
    return "\n".join([*_imports(target), *_helpers(target), *_shard(target)]) + "\n"


def notes_on_script(target: Target) -> Iterator[Note]:
    """What a script for any model cannot say."""
    if target.wrap.embeddings or target.wrap.head:
        yield Note("--to torch", "embedding and head are units", "noted", "Where they are is for --model to say.")
    if target.casts == "text":
        yield Note("--to torch", "vision blocks take inputs as they are", "refused", "Where they are: --model says.")


def before_sharding(target: Target) -> str:
    """Code on a ``model`` in scope that gives every rank the values of the first; empty where nothing asks for it."""
    return _BROADCAST if target.sync_module_states and not target.rank0_loads else ""


def after_sharding(buffers: Mapping[str, torch.dtype] | torch.dtype | None) -> str:
    """Code on a ``model`` in scope that casts its buffers, of these names or all that are floating-point, once."""
    if not buffers:
        return ""
    if isinstance(buffers, torch.dtype):
        return _ALL_BUFFERS.format(dtype=buffers)
    return "".join(_BUFFER.format(name=quoted(name), dtype=dtype) for name, dtype in buffers.items())


def _imports(target: Target) -> Iterator[str]:
    if target.checkpoint_activations:
        yield from ["import functools", ""]
    yield "import torch"
    yield "import torch.distributed as dist"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    names = ["fully_shard"] + ["CPUOffloadPolicy"] * target.offload
    names += ["MixedPrecisionPolicy"] * (mp_policy(target) != MixedPrecisionPolicy())
    yield f"from torch.distributed.fsdp import {', '.join(sorted(names))}"
    if target.checkpoint_activations:
        yield "from torch.utils.checkpoint import checkpoint"


def _helpers(target: Target) -> Iterator[str]:
    yield ""
    if target.checkpoint_activations:
        yield _CHECKPOINT
    wrap = target.wrap
    if wrap.by == "classes":
        yield _BLOCKS.format(names=set(wrap.classes))
    elif wrap.by == "size":
        yield _BY_SIZE.format(least=wrap.min_num_params)
    elif wrap.by == "root":
        yield _ROOT_ONLY
    else:
        yield _DECLARED.format(more=f" | {set(wrap.classes)}" if wrap.classes else "")


def _shard(target: Target) -> Iterator[str]:
    yield ""
    yield "def shard(model):"
    yield '    device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"    mesh = {_mesh(target)}"
    yield from indent(before_sharding(target).strip("\n"), "    ").splitlines()
    yield "    blocks = units(model)"
    yield "    for module in blocks:"
    if target.checkpoint_activations:
        yield "        checkpoint_forward(module)"
    if target.compile:
        yield "        module.forward = torch.compile(module.forward)"
    yield f"        fully_shard(module, {', '.join(_arguments(target, root=False))})"
    yield f"    fully_shard(model, {', '.join(_arguments(target, root=True))})"
    if target.prefetch:
        yield _PREFETCH.format(ahead=target.prefetch).strip("\n")
    yield from indent(after_sharding(target.precision.buffer).strip("\n"), "    ").splitlines()
    yield "    return model"


def _mesh(target: Target) -> str:
    if target.axes and target.mesh is not None:
        beside = {axis: size for axis, size in target.axes.items() if axis in ("tp", "ep", "tensor_parallel")}
        shape = (*target.mesh.shape, *beside.values())
        whole = (*target.mesh.axis_names, *beside)
        sub = target.mesh.axis_names if len(target.mesh.axis_names) > 1 else f'"{target.mesh.axis_names[0]}"'
        return f"init_device_mesh(device_type, {shape}, mesh_dim_names={whole})[{sub}]"
    if target.mesh is None:
        return 'init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))'
    return f"init_device_mesh(device_type, {target.mesh.shape}, mesh_dim_names={target.mesh.axis_names})"


def _arguments(target: Target, root: bool) -> Iterator[str]:
    yield "mesh=mesh"
    yield f"reshard_after_forward={target.root_reshards if root else target.reshard_after_forward}"
    policy = mp_policy(target)
    if policy != MixedPrecisionPolicy():
        policy = policy if root else replace(policy, output_dtype=None)
        policy = policy if root or target.casts != "root" else replace(policy, cast_forward_inputs=False)
        yield f"mp_policy=MixedPrecisionPolicy({', '.join(_policy_arguments(policy))})"
    offload = offload_policy(target)
    if isinstance(offload, CPUOffloadPolicy):
        yield f"offload_policy=CPUOffloadPolicy(pin_memory={_pin(target)})"


def _policy_arguments(policy: MixedPrecisionPolicy) -> Iterator[str]:
    for name, value in vars(policy).items():
        if value is not None and value is not True:
            yield f"{name}={value}"


def _pin(target: Target) -> str:
    """Pinned where the script will run, not where it was written."""
    return "False" if target.pin_memory is False else "torch.cuda.is_available()"

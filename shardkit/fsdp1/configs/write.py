"""Write a target: as accelerate's configuration of FSDP version 2, or as torch code for any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import indent

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import listing
from shardkit.fsdp1.configs.target import Reading, Target, mp_policy
from shardkit.fsdp1.translate.notes import Note
from shardkit.plan.python import CHECKPOINT, arguments, imports, quoted
from shardkit.replacements import Support

_POLICIES = dict.fromkeys(("classes", "declared", "default"), "TRANSFORMER_BASED_WRAP")
_POLICIES["root"] = "NO_WRAP"
_NAMES = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}


def comments(reading: Reading, notes: Sequence[Note]) -> list[str]:
    """Return the format and the notes as comment lines of YAML and Python."""
    width = max((len(note.argument) for note in notes), default=0)
    lines = [f"# {note.support:<9} {note.argument:<{width}}  {note.value}: {note.sentence}" for note in notes]
    first = f"# {reading.format} ({listing(reading.saw, 3) or 'as requested'})"
    return [first, *(line.replace("\n", " ") for line in lines)]


# --- accelerate -----------------------------------------------------------------------------------------------------


def accelerate2(target: Target) -> str:
    """Return accelerate's YAML with ``fsdp_version: 2``; ``notes_on_accelerate`` lists what is not in it."""
    precision = f"mixed_precision: '{_NAMES.get(target.precision.param, 'no')}'"  # quoted: YAML reads no as false
    is_ddp = _replicates_only(target)
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {'MULTI_GPU' if is_ddp else 'FSDP'}", precision]
    if not is_ddp:
        settings = ((key, str(value).lower() if isinstance(value, bool) else value) for key, value in _fsdp(target))
        lines += ["fsdp_config:", *(f"  fsdp_{key}: {value}" for key, value in settings)]
    if target.mesh is not None:
        lines.append(f"num_processes: {target.mesh.size * torch.Size(_beside(target).values()).numel()}")
    if is_ddp:
        return "\n".join(lines) + "\n"
    if target.mesh is not None and (target.mesh.replicates or target.axes):
        lines += ["parallelism_config:", *(f"  parallelism_config_{axis}_size: {size}" for axis, size in _axes(target))]
    if target.compile:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_regional_compilation: true"]
    return "\n".join(lines) + "\n"


def notes_on_accelerate(target: Target) -> Iterator[Note]:
    """Yield notes on what accelerate's file with version 2 says differently, or cannot say."""
    return (
        Note("--to accelerate2", what, support, text) for holds, support, what, text in _differences(target) if holds
    )


def _differences(target: Target) -> Iterator[tuple[bool, Support, str, str]]:
    """Yield each possible difference, and whether it holds. Noted ones do not change what is trained."""
    reshard, precision = target.reshard_after_forward, target.precision
    if _replicates_only(target):
        same = "Version 2 has no such strategy; DistributedDataParallel trains the same."
        yield True, "noted", "replicates only", same
        ddp = "With MULTI_GPU accelerate autocasts instead."
        yield precision.param is not None, "refused", f"parameters in {precision.param}", ddp
        return
    at_once = "accelerate takes true or false: true."
    yield not isinstance(reshard, bool), "noted", f"reshard_after_forward={reshard}", at_once
    no_prefetch = "accelerate refuses fsdp_forward_prefetch in version 2."
    yield target.prefetch > 0, "noted", f"prefetch={target.prefetch}", no_prefetch
    yield target.root_reshards, "noted", "the root reshards after forward", "accelerate keeps it gathered."
    unpinned = target.offload and target.pin_memory is False
    yield unpinned, "noted", "pin_memory=False", "accelerate pins what it offloads."
    ends = target.wrap.embeddings or target.wrap.head
    yield ends, "noted", "embedding and head are units", "Name their classes beside those of the blocks."
    yield target.tiles > 1, "noted", f"MLPs in {target.tiles} tiles", "accelerate computes them whole."
    alike = "accelerate broadcasts only with fsdp_cpu_ram_efficient_loading: set it, or seed all ranks alike."
    yield target.sync_module_states and not target.rank0_loads, "noted", "sync_module_states", alike
    dtypes = f"parameters in {precision.param}, gradients in {precision.reduce}"
    mixed = precision.reduce not in (precision.param, None) or precision.param not in _NAMES
    yield mixed, "refused", dtypes, "accelerate's file has one mixed_precision for both."
    inputs = "vision blocks take inputs as they are"
    yield target.casts == "text", "refused", inputs, "accelerate casts the inputs of every unit."
    foreign = [axis for axis in target.axes if axis not in ("tp", "cp", "sp")]
    foreign += ["ep"] if target.wrap.experts else []
    yield bool(foreign), "refused", f"axes {', '.join(foreign)}", "accelerate has tp, cp and sp."


def _replicates_only(target: Target) -> bool:
    return target.mesh is not None and target.mesh.replicates and target.mesh.shard_size == 1


def _fsdp(target: Target) -> Iterator[tuple[str, object]]:
    yield "version", 2
    yield "reshard_after_forward", bool(target.reshard_after_forward)
    yield "auto_wrap_policy", _POLICIES[target.wrap.by]
    if target.wrap.classes:
        yield "transformer_layer_cls_to_wrap", ",".join(target.wrap.classes)
    yield "offload_params", target.offload
    yield "cpu_ram_efficient_loading", target.rank0_loads
    yield "activation_checkpointing", target.checkpoint_activations
    yield "state_dict_type", "FULL_STATE_DICT" if target.state_dict_type == "full" else "SHARDED_STATE_DICT"


def _axes(target: Target) -> Iterator[tuple[str, int]]:
    assert target.mesh is not None
    context = target.axes.get("cp", 1) * target.axes.get("sp", 1)  # their ranks shard the parameters too
    yield "dp_replicate", target.mesh.shape[0] if target.mesh.replicates else 1
    yield "dp_shard", target.mesh.shard_size // context
    for axis in ("tp", "cp", "sp"):
        if axis != "sp" or "sp" in target.axes:
            yield axis, target.axes.get(axis, 1)


def _beside(target: Target) -> dict[str, int]:
    """Return the axes whose ranks are not among those of the mesh."""
    return {axis: size for axis, size in target.axes.items() if axis in ("tp", "ep", "tensor_parallel")}


# --- torch ----------------------------------------------------------------------------------------------------------

_BY_CLASS = '''
def units(model):
    """{what}, children before parents."""
    names = {names}
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]
'''

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
    """Return imports and a function ``shard(model)`` that shards any model as the target says."""
    names = ["CPUOffloadPolicy"] if target.offload else []
    names += ["MixedPrecisionPolicy"] if mp_policy(target) != MixedPrecisionPolicy() else []
    first = imports(names, checkpoints=target.checkpoint_activations, uses_dist=True)
    return "\n".join([*first, "", *_units(target), "", *_shard(target)]) + "\n"


def notes_on_script(target: Target) -> Iterator[Note]:
    """Yield notes on what a script for any model cannot say."""
    where = "Only a model says where they are: use --model."
    if target.wrap.embeddings or target.wrap.head:
        yield Note("--to torch", "embedding and head are units", "noted", where)
    if target.tiles > 1:
        yield Note("--to torch", f"MLPs in {target.tiles} tiles", "noted", where)
    if target.wrap.experts:
        yield Note("--to torch", f"experts on {target.wrap.experts}", "refused", where)
    if target.casts == "text":
        yield Note("--to torch", "vision blocks take inputs as they are", "refused", where)


def before_sharding(target: Target) -> str:
    """Return code that broadcasts the values of ``model`` from rank 0; empty unless the target asks for it."""
    return _BROADCAST if target.sync_module_states and not target.rank0_loads else ""


def after_sharding(buffers: Mapping[str, torch.dtype] | torch.dtype | None) -> str:
    """Return code that casts the buffers of ``model`` once: those named, or all floating-point ones."""
    if not buffers:
        return ""
    if isinstance(buffers, torch.dtype):
        return _ALL_BUFFERS.format(dtype=buffers)
    return "".join(_BUFFER.format(name=quoted(name), dtype=dtype) for name, dtype in buffers.items())


def _units(target: Target) -> Iterator[str]:
    wrap = target.wrap
    yield from [CHECKPOINT] if target.checkpoint_activations else []
    if wrap.by == "root":
        yield _BY_CLASS.format(what="No blocks: the whole model is gathered at once", names=())
    elif wrap.by == "classes":
        yield _BY_CLASS.format(what="The blocks", names=wrap.classes)
    else:
        names = ", ".join(["*model._no_split_modules", *map(repr, wrap.classes)])
        yield _BY_CLASS.format(what="The blocks that the model declares", names=f"{{{names}}}")


def _shard(target: Target) -> Iterator[str]:
    yield "def shard(model):"
    yield '    device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"    mesh = {_mesh(target)}"
    yield from indent(before_sharding(target).strip("\n"), "    ").splitlines()
    yield "    blocks = units(model)"
    yield "    for module in blocks:"
    yield from ["        checkpoint_forward(module)"] if target.checkpoint_activations else []
    yield from ["        module.forward = torch.compile(module.forward)"] if target.compile else []
    yield f"        fully_shard(module, {_arguments(target, root=False)})"
    yield f"    fully_shard(model, {_arguments(target, root=True)})"
    yield from [_PREFETCH.format(ahead=target.prefetch).strip("\n")] if target.prefetch else []
    yield from indent(after_sharding(target.precision.buffer).strip("\n"), "    ").splitlines()
    yield "    return model"


def _mesh(target: Target) -> str:
    mesh = target.mesh
    if mesh is None:
        return 'init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))'
    mesh, beside = mesh.on(None), _beside(target)
    shape, names = (*mesh.shape, *beside.values()), (*mesh.axis_names, *beside)
    sub = mesh.axis_names if len(mesh.axis_names) > 1 else quoted(mesh.axis_names[0])
    whole = f"init_device_mesh(device_type, {shape}, mesh_dim_names={names})"
    return f"{whole}[{sub}]" if target.axes else whole


def _arguments(target: Target, root: bool) -> str:
    policy = mp_policy(target)
    if policy != MixedPrecisionPolicy():
        casts = policy.cast_forward_inputs and (root or target.casts != "root")
        policy = replace(policy, output_dtype=policy.output_dtype if root else None, cast_forward_inputs=casts)
    reshard = target.root_reshards if root else target.reshard_after_forward
    # Pinned where the script will run, not where it was written.
    pin = "False" if target.pin_memory is False else "torch.cuda.is_available()"
    return ", ".join(arguments(reshard, policy, CPUOffloadPolicy() if target.offload else OffloadPolicy(), pin))

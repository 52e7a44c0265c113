"""Write a target as accelerate's configuration of FSDP version 2, and notes as comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn as nn

from shardkit.errors import listing
from shardkit.fsdp1.configs.target import Reading, Target, has_vision_encoder
from shardkit.fsdp1.translate.arguments import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.replacements import Support

_BROADCAST = """import torch
import torch.distributed as dist

for tensor in (*model.parameters(), *model.buffers()):
    value = tensor.detach().to("cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(value, 0)
    tensor.data.copy_(value)

"""
_NAMES = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}


def comments(reading: Reading, notes: Sequence[Note]) -> list[str]:
    """Return the format and the notes as comment lines of YAML and Python."""
    width = max((len(note.argument) for note in notes), default=0)
    lines = [f"# {note.support:<9} {note.argument:<{width}}  {note.value}: {note.sentence}" for note in notes]
    first = f"# {reading.format} ({listing(reading.saw, 3) or 'as requested'})"
    return [first, *(line.replace("\n", " ") for line in lines)]


def torch_code(made: Translation) -> str:
    """Return the plan as torch code, with the broadcast of rank 0's values before it and the casts of buffers after."""
    before = _BROADCAST if made.sync_module_states else ""
    casts = (
        f'model.get_buffer("{name}").data = model.get_buffer("{name}").data.to({dtype})\n'
        for name, dtype in made.buffer_dtypes.items()
    )
    return before + made.plan.to_python() + "".join(casts)


def accelerate2(target: Target) -> str:
    """Return accelerate's YAML with ``fsdp_version: 2``; ``notes_on_accelerate`` lists what is not in it."""
    precision = f"mixed_precision: '{_NAMES.get(target.precision.param, 'no')}'"  # quoted: YAML reads no as false
    is_ddp = _replicates_only(target)
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {'MULTI_GPU' if is_ddp else 'FSDP'}", precision]
    if not is_ddp:
        lines += ["fsdp_config:"]
        for key, value in _fsdp(target):
            lines.append(f"  fsdp_{key}: {str(value).lower() if isinstance(value, bool) else value}")
    if target.mesh is not None:
        beside = target.axes.get("tp", 1) * target.axes.get("ep", 1)  # whose ranks are not among those of the mesh
        lines.append(f"num_processes: {target.mesh.size * beside}")
    if not is_ddp and target.mesh is not None and (target.mesh.replicates or target.axes):
        lines += ["parallelism_config:", *(f"  parallelism_config_{axis}_size: {size}" for axis, size in _axes(target))]
    return "\n".join(lines) + "\n"


def notes_on_accelerate(target: Target, model: nn.Module | None = None) -> Iterator[Note]:
    """Yield notes on what accelerate's file with version 2 says differently or cannot say; None is any model."""
    for holds, support, what, sentence in _differences(target, model):
        if holds:
            yield Note("--to accelerate2", what, support, sentence)


def _differences(target: Target, model: nn.Module | None) -> Iterator[tuple[bool, Support, str, str]]:
    """Yield each possible difference, and whether it holds. Noted ones do not change what is trained."""
    precision = target.precision
    if _replicates_only(target):
        same = "Version 2 has no such strategy; DistributedDataParallel trains the same."
        yield True, "noted", "replicates only", same
        autocasts = "With MULTI_GPU accelerate autocasts instead."
        yield precision.param is not None, "refused", f"parameters in {precision.param}", autocasts
        return
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
    inputs, casts = "vision blocks take inputs as they are", "accelerate casts the inputs of every unit."
    if not target.vision_casts and model is None:
        yield True, "noted", inputs, f"{casts} It matters for a model with a vision encoder only."
    yield not target.vision_casts and model is not None and has_vision_encoder(model), "refused", inputs, casts
    experts = bool(target.wrap.experts or target.axes.get("ep"))
    yield experts, "refused", "experts on an axis of their own", "accelerate has the axes tp, cp and sp."
    skips = "Ranks that skip an expert hang there: keep the patch that calls all experts."
    yield bool(target.wrap.skipped), "noted", f"may_skip for {listing(target.wrap.skipped)}", skips


def _replicates_only(target: Target) -> bool:
    return target.mesh is not None and target.mesh.replicates and target.mesh.shard_size == 1


def _fsdp(target: Target) -> Iterator[tuple[str, object]]:
    yield "version", 2
    yield "reshard_after_forward", target.reshard_after_forward
    yield "auto_wrap_policy", "NO_WRAP" if target.wrap.by == "root" else "TRANSFORMER_BASED_WRAP"
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

"""A target as accelerate's configuration of version 2, and what that cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardkit.errors import listing
from shardkit.fsdp1.configs.target import Reading, Target
from shardkit.fsdp1.instead import Fate
from shardkit.fsdp1.translate.notes import Note

_POLICIES = dict.fromkeys(("classes", "declared", "default"), "TRANSFORMER_BASED_WRAP")
_POLICIES |= {"size": "SIZE_BASED_WRAP", "root": "NO_WRAP"}
_NAMES = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}


def comments(reading: Reading, notes: Sequence[Note]) -> list[str]:
    """The format and the notes, as comment lines of YAML and Python."""
    width = max((len(note.argument) for note in notes), default=0)
    lines = [f"# {note.fate:<9} {note.argument:<{width}}  {note.value}: {note.sentence}" for note in notes]
    return [
        f"# {reading.format} ({listing(reading.saw, 3) or 'as it was said'})",
        *(line.replace("\n", " ") for line in lines),
    ]


def accelerate2(target: Target) -> str:
    """The YAML of accelerate, ``fsdp_version: 2``; ``notes_on_accelerate`` lists what is not in it."""
    if _replicates_only(target):
        return "\n".join(_ddp(target)) + "\n"
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: FSDP", *_precision(target)]
    lines += ["fsdp_config:", *(f"  fsdp_{name}: {_text(value)}" for name, value in _fsdp(target))]
    if target.mesh is not None:
        lines.append(f"num_processes: {_world(target)}")
    if target.mesh is not None and (target.mesh.replicates or target.axes):
        lines += ["parallelism_config:", *(f"  parallelism_config_{axis}_size: {size}" for axis, size in _axes(target))]
    if target.compile:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_regional_compilation: true"]
    return "\n".join(lines) + "\n"


def notes_on_accelerate(target: Target) -> Iterator[Note]:
    """What accelerate's file of version 2 says otherwise, or cannot say."""
    for fate, what, sentence in (*_differs(target), *_cannot_say(target)):
        yield Note("--to accelerate2", what, fate, sentence)


def _differs(target: Target) -> Iterator[tuple[Fate, str, str]]:
    """In memory, time or form, but not in what is trained."""
    if _replicates_only(target):
        yield "noted", "replicates only", "Version 2 has no such strategy; DistributedDataParallel trains the same."
        if target.precision.param is not None:
            yield "refused", f"parameters in {target.precision.param}", "With MULTI_GPU accelerate autocasts instead."
        return
    if not isinstance(target.reshard_after_forward, bool):
        yield "noted", f"reshard_after_forward={target.reshard_after_forward}", "accelerate takes true or false: true."
    if target.prefetch:
        yield "noted", f"prefetch={target.prefetch}", "accelerate refuses fsdp_forward_prefetch in version 2."
    if target.root_reshards:
        yield "noted", "the root reshards after forward", "accelerate keeps it gathered."
    if target.offload and target.pin_memory is False:
        yield "noted", "pin_memory=False", "accelerate pins what it offloads."
    if target.wrap.embeddings or target.wrap.head:
        yield "noted", "embedding and head are units", "Name their classes beside those of the blocks."
    if target.sync_module_states and not target.rank0_loads:
        sentence = "accelerate broadcasts only with fsdp_cpu_ram_efficient_loading: set it, or seed all ranks alike."
        yield "noted", "sync_module_states", sentence


def _cannot_say(target: Target) -> Iterator[tuple[Fate, str, str]]:
    precision = target.precision
    if _replicates_only(target):
        return
    if precision.reduce not in (precision.param, None) or precision.param not in _NAMES:
        what = f"parameters in {precision.param}, gradients in {precision.reduce}"
        yield "refused", what, "accelerate's file has one mixed_precision for both."
    if target.casts == "text":
        yield "refused", "vision blocks take inputs as they are", "accelerate casts the inputs of every unit."
    foreign = [axis for axis in target.axes if axis not in ("tp", "cp", "sp")]
    if foreign:
        yield "refused", f"axes {', '.join(foreign)}", "accelerate has tp, cp and sp."


def _ddp(target: Target) -> Iterator[str]:
    """accelerate's version 2 has no strategy that replicates only; DistributedDataParallel trains the same."""
    yield "compute_environment: LOCAL_MACHINE"
    yield "distributed_type: MULTI_GPU"
    yield from _precision(target)
    yield f"num_processes: {_world(target)}"


def _replicates_only(target: Target) -> bool:
    return target.mesh is not None and target.mesh.replicates and target.mesh.shard_size == 1


def _precision(target: Target) -> Iterator[str]:
    yield f"mixed_precision: '{_NAMES.get(target.precision.param, 'no')}'"  # quoted, since YAML reads no as false


def _fsdp(target: Target) -> Iterator[tuple[str, object]]:
    yield "version", 2
    yield "reshard_after_forward", bool(target.reshard_after_forward)
    yield "auto_wrap_policy", _POLICIES[target.wrap.by]
    if target.wrap.classes:
        yield "transformer_layer_cls_to_wrap", ",".join(target.wrap.classes)
    if target.wrap.by == "size":
        yield "min_num_params", target.wrap.min_num_params
    yield "offload_params", target.offload
    yield "cpu_ram_efficient_loading", target.rank0_loads
    yield "activation_checkpointing", target.checkpoint_activations
    yield "state_dict_type", "FULL_STATE_DICT" if target.state_dict_type == "full" else "SHARDED_STATE_DICT"


def _axes(target: Target) -> Iterator[tuple[str, int]]:
    mesh = target.mesh
    assert mesh is not None
    context = target.axes.get("cp", 1) * target.axes.get("sp", 1)  # their ranks shard the parameters too
    yield "dp_replicate", mesh.shape[0] if mesh.replicates else 1
    yield "dp_shard", mesh.shard_size // context
    for axis in ("tp", "cp", "sp"):
        if axis != "sp" or "sp" in target.axes:
            yield axis, target.axes.get(axis, 1)


def _world(target: Target) -> int:
    assert target.mesh is not None
    beside = [size for axis, size in target.axes.items() if axis in ("tp", "ep", "tensor_parallel")]
    return target.mesh.size * torch.Size(beside).numel()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

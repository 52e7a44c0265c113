"""Split the sequences of transformers models over ranks, in place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import named_sharded_parameters
from shardkit.errors import PlanError, message, refuse
from shardkit.sequence.batch import Attention, SplitSequence

# Modules that carry a state from token to token, or combine neighbors: too little at first to show in logits.
_MIXES = re.compile("Conv[123]d|Mamba|SSM|Recurrent|R[gG]L[rR][uU]|R[wW][kK][vV]|Delta|LinearAttention|Lightning|xLSTM")


def split_sequence(model: nn.Module, mesh: DeviceMesh) -> SplitSequence:
    """Let each rank of ``mesh`` compute a part of every sequence, in place, by exchanging heads for tokens (Ulysses).

    For models of transformers whose attention goes through its registry, alone or inside of another module (PEFT),
    with sdpa or eager attention; flash and flex attention take the same path, and are untested. A module's own method
    ``_attn(query, key, value, mask)`` serves too. Vision-language models split the text; each rank encodes all images.
    The model must be sharded over these ranks too, since gradients are summed by FSDP's reduction.

    **Collective** over all ranks of the model. Two short forwards without gradients, one whole and one split, compare
    logits, so a model that mixes tokens elsewhere than in attention is refused. Each forward of the split model then
    runs four all-to-alls an attention layer, and each backward four more, or eight where the layer is checkpointed.

    Args:
        model: sharded, with its weights loaded; in a fake world, for estimates, as it is.
        mesh: one axis, such as ``training_mesh(sp=2)["sp"]``. Its size must divide the number of query heads; key
            heads may be fewer than ranks.

    Returns:
        What splits batches.

    Raises:
        PlanError: the model cannot be split: it has layers that mix tokens otherwise (Mamba, linear attention,
            convolutions), a mask that cannot be rebuilt, or too few heads; or it is not sharded over these ranks. The
            model is unchanged.
    """
    from transformers import PreTrainedModel

    from shardkit.sequence import hooks, probe

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        shown = f"the axes {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else f"a {type(mesh).__name__}"
        problem = f"must be a DeviceMesh of one axis, got {shown}"
        raise PlanError(message("mesh", problem, "", 'Pass training_mesh(sp=2)["sp"]'))
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        fix = "Wrap its attention function: attend = shardkit.sequence.ulysses(attend, mesh['sp'].get_group())"
        problem = f"must be or contain a model of transformers, got a {type(model).__name__}"
        raise PlanError(message("model", problem, "", fix))
    group, config = mesh.get_group(), inner.config.get_text_config()
    models = [each for each in inner.modules() if isinstance(each, PreTrainedModel)]
    takes_positions = any(_takes(each, "position_ids") for each in models)
    refuse([*_of_sharding(model, group), *_of_kind(inner, takes_positions)])
    pad = getattr(config, "pad_token_id", None) or 0
    sequence = SplitSequence(Attention(group, pad, config is inner.config, takes_positions))
    probe.check(model, inner.config, sequence, lambda: hooks.attach(model, inner, sequence.attention))
    return sequence


def _of_sharding(model: nn.Module, group: dist.ProcessGroup) -> Iterator[str]:
    if dist.get_backend(group) == "fake":  # nothing runs
        return
    params = [param for _, param in named_sharded_parameters(model)]
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    needed = set(dist.get_process_group_ranks(group))
    missing = [needed - set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    if len(needed) > 1 and (not meshes or any(missing)):
        lacking = f"lacks ranks {sorted(set().union(*missing))}" if meshes else "is not sharded"
        rule = "FSDP's reduction sums the gradients of the parts, so it must include the ranks that share a sequence"
        fix = "Call shard_model(model) over all ranks before split_sequence"
        yield message("model", f"{'has a mesh that ' * bool(meshes)}{lacking}", rule, fix)
    if any(param.is_meta for param in params):
        fix = "Call materialize or load weights first"
        yield message("model", "is on the meta device", "Splitting runs the model", fix)


def _of_kind(inner: Any, takes_positions: bool) -> Iterator[str]:
    name, fix = type(inner).__name__, "Do not split this model's sequences; shorten them, or checkpoint its blocks"
    if "split_attention" in vars(inner):
        yield message(name, "is split already", "", "Use what the first call returned")
    if getattr(inner.config, "is_encoder_decoder", False):
        yield message(name, "has an encoder and a decoder", "Only models with one of the two can be split", fix)
    if not takes_positions and not _takes(inner, "past_key_values"):
        rule = "Each rank must tell the model the positions of its tokens"
        yield message(name, "takes neither position_ids nor past_key_values", rule, fix)
    decoder = inner if inner.config.get_text_config() is inner.config else inner.get_decoder()
    for fqn, kind in ((fqn, type(module).__name__) for fqn, module in decoder.named_modules()):
        if _MIXES.search(kind):
            yield message(
                fqn, f"is a {kind}", "Only attention may combine tokens; state and convolutions cross parts", fix
            )
            return  # one of many layers says it


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters

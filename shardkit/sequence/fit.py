"""What is refused before anything changes: models that mix tokens by other means than attention in the registry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardkit._torch import named_sharded_parameters
from shardkit.errors import PlanError, listing, message, refuse
from shardkit.sequence.attention import PREFIX, files_of, has_method, uses_registry

LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Names of transformers' modules that carry a state from token to token.
RECURRENT = re.compile(
    "Mamba|SSM|Recurrent|R[gG]L[rR][uU]|R[wW][kK][vV]|Delta|LinearAttention|Lightning|ShortConv|xLSTM"
)
ADVICE = "Do not split this model's sequences; shorten them, or recompute its blocks"


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of a mesh of one axis; PlanError for anything else."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return mesh.get_group()
    shown = f"of axes {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else f"a {type(mesh).__name__}"
    raise PlanError(message("mesh", shown, "Sequences are split over one axis", 'Pass training_mesh(sp=2)["sp"]'))


def pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the outermost model of transformers in ``model``; PlanError if there is none."""
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        fix = "Wrap its attention function: attend = shardkit.sequence.ulysses(attend, mesh['sp'].get_group())"
        rule = "split_sequence changes the attention of transformers models"
        raise PlanError(message("model", f"a {type(model).__name__} without a model of transformers", rule, fix))
    return found


def text_config(inner: PreTrainedModel) -> Any:
    """Return the config of the part that is split: a vision-language model's text model, or the model's own."""
    return inner.config.get_text_config()


def decoder_of(inner: PreTrainedModel) -> nn.Module:
    """Return the part that is split: a vision-language model's text model, or the model."""
    return inner if text_config(inner) is inner.config else inner.get_decoder()  # type: ignore[no-untyped-call]


def takes_positions(inner: PreTrainedModel) -> bool:
    """Return whether the model takes ``position_ids``, itself or by passing them to a model inside."""
    return any(takes(each, "position_ids") for each in inner.modules() if isinstance(each, PreTrainedModel))


def takes(module: nn.Module, argument: str) -> bool:
    """Return whether a module's forward has an argument of that name."""
    return argument in inspect.signature(module.forward).parameters


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without FSDP2's prefix."""
    return type(module).__name__.removeprefix("FSDP")


def check(model: nn.Module, inner: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Raise one PlanError that lists why the model cannot be split over ``group``; local, equal on all ranks."""
    refuse([*_sharding(model, group), *_kind(inner), *_layers(inner)])


def _sharding(model: nn.Module, group: dist.ProcessGroup) -> Iterator[str]:
    if dist.get_backend(group) == "fake":  # nothing runs
        return
    needed = set(dist.get_process_group_ranks(group))
    params = dict(named_sharded_parameters(model))
    meshes = {p.device_mesh for p in params.values() if isinstance(p, DTensor)}
    if len(needed) > 1 and not meshes:
        fix = "Call shard_model(model) over all ranks before split_sequence"
        yield message("model", "not sharded", "FSDP's reduction sums the gradients of the parts", fix)
    missing = [needed - set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    if any(missing):
        rule = "FSDP's reduction sums the gradients of the parts, so it must include the ranks that share a sequence"
        fix = "Call shard_model(model) without mesh, or with a mesh of dp x sp ranks"
        yield message("model", f"its mesh lacks ranks {sorted(set().union(*missing))} of one sequence", rule, fix)
    if any(param.is_meta for param in params.values()):
        yield message(
            "model", "on the meta device", "Splitting runs the model", "Call materialize or load weights first"
        )


def _kind(inner: PreTrainedModel) -> Iterator[str]:
    config, name = text_config(inner), class_name(inner)
    if config._attn_implementation.startswith(PREFIX):
        yield message(name, "is split already", "A model is split once", "Use what the first call returned")
    if getattr(inner.config, "is_encoder_decoder", False):
        yield message(name, "has an encoder and a decoder", "Only models with one of the two can be split", ADVICE)
    if not takes_positions(inner) and not takes(inner, "past_key_values"):
        rule = "Each rank must tell the model the positions of its tokens"
        yield message(name, "forward takes neither position_ids nor past_key_values", rule, ADVICE)


def _layers(inner: PreTrainedModel) -> Iterator[str]:
    kinds = set(getattr(text_config(inner), "layer_types", None) or ())
    if kinds - LAYERS:
        rule = f"Layers that can be split are {listing(sorted(LAYERS))}"
        yield message("config.layer_types", f"has {listing(sorted(kinds - LAYERS))}", rule, ADVICE)
    for fqn, module in decoder_of(inner).named_modules():
        kind = class_name(module)
        if isinstance(module, CONVOLUTIONS) or RECURRENT.search(kind):
            rule = "Only attention may combine tokens; state and convolutions cross the parts' borders"
            yield message(fqn or kind, f"a {kind}", rule, ADVICE)
            return  # one of many layers says it
        if "Attention" in kind and _own(module):
            rule = "Heads are exchanged around attention functions: those of AttentionInterface, or a method _attn"
            yield message(fqn, f"a {kind}, which computes attention inside of its forward", rule, ADVICE)
            return


def _own(module: nn.Module) -> bool:
    """Return whether no attention function of the module can be exchanged for another."""
    inside = any("Attention" in class_name(child) for child in module.modules() if child is not module)
    return not (inside or has_method(module) or any(map(uses_registry, files_of(module))))

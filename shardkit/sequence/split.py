"""Split the sequences of transformers models over ranks, in place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import named_sharded_parameters
from shardkit.errors import PlanError, message, refuse
from shardkit.grads import reset_after_error
from shardkit.ranks import collective_device, device_type, groups_of
from shardkit.sequence.batch import ADVICE, Attention, SplitSequence

# Modules that carry a state from token to token, or combine neighbors: too little at first to show
# in logits.
_MIXES = re.compile(
    "Conv[123]d|Mamba|SSM|Recurrent|R[gG]L[rR][uU]|R[wW][kK][vV]|Delta|LinearAttention|Lightning|xLSTM"
)
_TOKENS = 6  # of each rank in the batches that are compared
_MOST_WRONG = 0.2  # of a rank's tokens, since a router's ties may fall otherwise for a few


def split_sequence(model: nn.Module, mesh: DeviceMesh) -> SplitSequence:
    """Let each rank of ``mesh`` compute a part of every sequence, in place, by exchanging heads for
    tokens (Ulysses).

    For models of transformers that take ``position_ids``, counted from 0, and whose attention goes
    through its registry, alone or inside of another module (PEFT), with sdpa or eager attention;
    flash and flex attention take the same path, and are untested. Vision-language models split the
    text; each rank encodes all images. The model must be sharded over these ranks too, since
    gradients are summed by FSDP's reduction.

    **Collective** over all ranks of the model. Two short forwards without gradients, one whole and
    one split, compare logits, so a model that mixes tokens elsewhere than in attention is refused.
    Each forward of the split model then runs four all-to-alls an attention layer, and each backward
    four more, or eight where the layer is checkpointed.

    Args:
        model: sharded, with its weights loaded; in a fake world, for estimates, as it is.
        mesh: one axis, such as ``training_mesh(sp=2)["sp"]``. Its size must divide the number of
            query heads; key heads may be fewer than ranks.

    Returns:
        What splits batches.

    Raises:
        PlanError: the model cannot be split: it has layers that mix tokens otherwise (Mamba, linear
            attention, convolutions), a mask that cannot be rebuilt, or too few heads; or it is not
            sharded over these ranks. The model is unchanged.
    """
    from transformers import PreTrainedModel

    from shardkit.sequence.attention import attach

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        shown = (
            f"the axes {mesh.mesh_dim_names}"
            if isinstance(mesh, DeviceMesh)
            else f"a {type(mesh).__name__}"
        )
        problem = f"must be a DeviceMesh of one axis, got {shown}"
        raise PlanError(message("mesh", problem, "", 'Pass training_mesh(sp=2)["sp"]'))
    inner = next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
    )
    if inner is None:
        fix = (
            "Wrap its attention function: attend = shardkit.sequence.ulysses(attend, "
            "mesh['sp'].get_group())"
        )
        problem = f"must be or contain a model of transformers, got a {type(model).__name__}"
        raise PlanError(message("model", problem, "", fix))
    group, own_text = mesh.get_group(), inner.config.get_text_config() is inner.config
    models = [each for each in inner.modules() if isinstance(each, PreTrainedModel)]
    takes = any("position_ids" in inspect.signature(each.forward).parameters for each in models)
    decoder = inner if own_text else inner.get_decoder()  # type: ignore[no-untyped-call]
    refuse([*_of_sharding(model, group), *_of_kind(inner, takes, decoder)])
    sequence = SplitSequence(Attention(group, own_text))
    _check(model, inner.config, sequence, lambda: attach(model, inner, sequence.attention))
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
        rule = (
            "FSDP's reduction sums the gradients of the parts, so it must include the ranks that "
            "share a sequence"
        )
        fix = "Call shard_model(model) over all ranks before split_sequence"
        yield message("model", f"{'has a mesh that ' * bool(meshes)}{lacking}", rule, fix)
    if any(param.is_meta for param in params):
        fix = "Call materialize or load weights first"
        yield message("model", "is on the meta device", "Splitting runs the model", fix)


def _of_kind(inner: Any, takes_positions: bool, decoder: nn.Module) -> Iterator[str]:
    name = type(inner).__name__
    if "split_attention" in vars(inner):
        yield message(name, "is split already", "", "Use what the first call returned")
    if getattr(inner.config, "is_encoder_decoder", False):
        rule = "Only models with one of the two can be split"
        yield message(name, "has an encoder and a decoder", rule, ADVICE)
    if not takes_positions:
        rule = "Each rank must tell the model the positions of its tokens"
        yield message(name, "takes no position_ids", rule, ADVICE)
    for fqn, kind in ((fqn, type(module).__name__) for fqn, module in decoder.named_modules()):
        if _MIXES.search(kind):
            rule = "Only attention may combine tokens; state and convolutions cross parts"
            yield message(fqn, f"is a {kind}", rule, ADVICE)
            return  # one of many layers says it


# One short forward whole and one split: whatever else a model does between tokens shows in the
# logits.


def _check(
    model: nn.Module, config: Any, sequence: SplitSequence, split: Callable[[], Callable[[], None]]
) -> None:
    """Split a model by ``split``, and undo that and raise if its logits change. Collective, unless
    values are fake.
    """
    ranks = sequence.group.size()
    if ranks == 1 or dist.get_backend(sequence.group) == "fake":
        split()
        return
    padded, packed = ((batch, _logits(model, batch)) for batch in _batches(config, ranks))
    undo = split()
    try:
        wrong = _wrong_anywhere(model, sequence, *padded)
        for sequence.attention.packs in (True, False):
            apart = _wrong_anywhere(model, sequence, *packed)
            if apart <= _MOST_WRONG:
                break
        wrong = max(wrong, apart)
        if wrong > _MOST_WRONG:
            problem = f"has other logits for {wrong:.0%} of the tokens when a sequence is split"
            rule = (
                "Only attention by transformers' AttentionInterface may combine tokens, at "
                "positions counted from 0: "
            )
            rule += "no state (Mamba, linear attention), convolution, or attention inside a forward"
            raise PlanError(message(type(model).__name__, problem, rule, ADVICE))
    except BaseException:
        undo()
        raise


def _batches(config: Any, ranks: int) -> list[dict[str, Tensor]]:
    """Return two batches that need padding, on all ranks the same: padded on the left, and of two
    documents a part.
    """
    length, device = _TOKENS * ranks - 1, device_type()
    configs = [
        config,
        *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None)),
    ]
    special = {
        x
        for each in configs
        for name, x in vars(each).items()
        if "token" in name and isinstance(x, int)
    }
    usable = [
        token
        for token in range(min(config.get_text_config().vocab_size, 997))
        if token not in special
    ]
    ids = torch.tensor(
        [usable[index * 7919 % len(usable)] for index in range(2 * length)], device=device
    )
    ids = ids.view(2, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    documents = torch.arange(length, device=device).remainder(_TOKENS - 2).repeat(2, 1)
    return [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "position_ids": documents},
    ]


def _logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the first output of a forward in eval mode, without gradients; PlanError if that
    fails. Collective.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            output = model(**batch, use_cache=False)
            return output if isinstance(output, Tensor) else output[0]
    except Exception as error:
        reset_after_error(model)
        if isinstance(error, PlanError):
            raise
        problem = f"does not run on {', '.join(batch)}: {type(error).__name__}: {error}"
        raise PlanError(
            message("model", problem, "Splitting runs the model on a few tokens", ADVICE)
        ) from error
    finally:
        for module in training:
            module.training = True


def _wrong_anywhere(
    model: nn.Module, sequence: SplitSequence, batch: dict[str, Tensor], expected: Tensor
) -> float:
    """Return the largest part of a rank's tokens whose logits are not ``expected``. Collective over
    all ranks.
    """
    found = _logits(model, sequence.split(batch))
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    wrong = torch.tensor(_wrong_part(sequence, found, expected, mask))
    for group in [sequence.group, *groups_of(model)]:
        wrong = wrong.to(collective_device(group))
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return float(wrong)


def _wrong_part(sequence: SplitSequence, found: Tensor, expected: Tensor, mask: Tensor) -> float:
    dtypes = sequence.attention.dtypes
    if not dtypes or found.shape[1] != _TOKENS:
        return 1.0
    wanted = sequence.cut(expected)
    # Eager attention in float64 gives rows that are padded on the left nan, split or not
    # (transformers 5).
    real = sequence.cut(mask).bool() & wanted.isfinite().all(-1)
    precision = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    error = (found - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)
    wrong = ~(error <= precision**0.5) & real
    if (wrong.any(0) & (wrong | ~real).all(0)).any():  # at the parts' border, in all rows
        return 1.0
    return float(wrong.sum() / real.sum().clamp(min=1))

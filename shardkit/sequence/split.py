"""Split the sequences of transformers models over ranks, in place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import named_sharded_parameters
from shardkit.errors import PlanError, refuse
from shardkit.grads import reset_after_error
from shardkit.ranks import collective_device, device_type, groups_of
from shardkit.sequence.batch import ADVICE, Attention, SplitSequence

# Modules that carry a state from token to token, or combine neighbors: in a model that was not
# trained too little to show in logits.
_MIXES = re.compile(
    "Conv[123]d|Mamba|SSM|Recurrent|R[gG]L[rR][uU]|R[wW][kK][vV]|Delta|LinearAttention|"
    "Lightning|xLSTM"
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
        given = f"a {type(mesh).__name__}"
        if isinstance(mesh, DeviceMesh):
            given = f"the axes {mesh.mesh_dim_names}"
        raise PlanError(
            f'mesh must be a DeviceMesh of one axis, got {given}. Pass training_mesh(sp=2)["sp"].'
        )
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise PlanError(
            f"model must be or contain a model of transformers, got a {type(model).__name__}. Wrap "
            "its attention function: attend = shardkit.sequence.ulysses(attend, "
            "mesh['sp'].get_group())."
        )
    inner = models[0]  # the outermost one
    has_text_alone = inner.config.get_text_config() is inner.config
    decoder: nn.Module = inner
    if not has_text_alone:
        decoder = inner.get_decoder()  # type: ignore[no-untyped-call]
    group = mesh.get_group()
    problems = _problems_of_sharding(model, group)
    takes_positions = False
    for module in inner.modules():
        if isinstance(module, PreTrainedModel):
            takes_positions |= "position_ids" in inspect.signature(module.forward).parameters
    problems += _problems_of_kind(inner, decoder, takes_positions)
    refuse(problems)
    sequence = SplitSequence(Attention(group, has_text_alone))
    split = functools.partial(attach, model, inner, sequence.attention)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        split()
    else:
        _split_and_compare(model, inner.config, sequence, split)
    return sequence


def _problems_of_sharding(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    problems: list[str] = []
    if dist.get_backend(group) == "fake":  # nothing runs
        return problems
    params = [param for _, param in named_sharded_parameters(model)]
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    needed = set(dist.get_process_group_ranks(group))
    missing: set[int] = set()
    for mesh in meshes:
        missing |= needed - set(mesh.mesh.flatten().tolist())
    if len(needed) > 1 and (missing or not meshes):
        lacks = f"has a mesh that lacks ranks {sorted(missing)}" if meshes else "is not sharded"
        problems.append(
            f"model {lacks}. FSDP's reduction sums the gradients of the parts, so it must include "
            "the ranks that share a sequence. Call shard_model(model) over all ranks before "
            "split_sequence."
        )
    if any(param.is_meta for param in params):
        problems.append(
            "model is on the meta device. Splitting runs the model. Call materialize or load "
            "weights first."
        )
    return problems


def _problems_of_kind(inner: Any, decoder: nn.Module, takes_positions: bool) -> list[str]:
    name = type(inner).__name__
    problems = []
    if "split_attention" in vars(inner):
        problems.append(f"{name} is split already. Use what the first call returned.")
    if getattr(inner.config, "is_encoder_decoder", False):
        problems.append(
            f"{name} has an encoder and a decoder. Only models with one of the two can be split. "
            f"{ADVICE}"
        )
    if not takes_positions:
        problems.append(
            f"{name} takes no position_ids. Each rank must tell the model the positions of its "
            f"tokens. {ADVICE}"
        )
    for fqn, module in decoder.named_modules():
        kind = type(module).__name__
        if _MIXES.search(kind):
            problems.append(
                f"{fqn} is a {kind}. Only attention may combine tokens; state and convolutions "
                f"cross parts. {ADVICE}"
            )
            break  # one of many layers says it
    return problems


# One short forward whole and one split: whatever else a model does between tokens shows in the
# logits.


def _split_and_compare(
    model: nn.Module, config: Any, sequence: SplitSequence, split: Callable[[], Callable[[], None]]
) -> None:
    """Split a model by ``split``; undo that and raise if its logits change. Collective."""
    padded, packed = _batches(config, sequence.group.size())
    padded_logits = _logits(model, padded)
    packed_logits = _logits(model, packed)
    undo = split()
    try:
        wrong = _wrong_anywhere(model, sequence, padded, padded_logits)
        for sequence.attention.packs in (True, False):
            wrong_in_packed = _wrong_anywhere(model, sequence, packed, packed_logits)
            if wrong_in_packed <= _MOST_WRONG:
                break
        wrong = max(wrong, wrong_in_packed)
        if wrong > _MOST_WRONG:
            raise PlanError(
                f"{type(model).__name__} has other logits for {wrong:.0%} of the tokens when a "
                "sequence is split. Only attention by transformers' AttentionInterface may combine "
                "tokens, at positions counted from 0: no state (Mamba, linear attention), "
                f"convolution, or attention inside a forward. {ADVICE}"
            )
    except BaseException:
        undo()
        raise


def _batches(config: Any, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two batches that need padding, on all ranks the same: padded on the left, and packed
    with more than one document in each part.
    """
    special = set()  # tokens with a meaning, such as the end of a sequence or an image
    configs = [config]
    for name in config.sub_configs:
        if getattr(config, name, None):
            configs.append(getattr(config, name))
    for part in configs:
        for name, value in vars(part).items():
            if "token" in name and isinstance(value, int):
                special.add(value)
    vocabulary = range(min(config.get_text_config().vocab_size, 997))
    usable = [token for token in vocabulary if token not in special]
    length, device = _TOKENS * ranks - 1, device_type()
    tokens = [usable[index * 7919 % len(usable)] for index in range(2 * length)]
    ids = torch.tensor(tokens, device=device).view(2, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = torch.arange(length, device=device).remainder(_TOKENS - 2).repeat(2, 1)
    return {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids, "position_ids": positions}


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
        raise PlanError(
            f"model does not run on {', '.join(batch)}: {type(error).__name__}: "
            f"{str(error).rstrip('. ')}. Splitting runs the model on a few tokens. {ADVICE}"
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
    logits = _logits(model, sequence.split(batch))
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    wrong = torch.tensor(_wrong_part(sequence, logits, expected, mask))
    for group in [sequence.group, *groups_of(model)]:
        wrong = wrong.to(collective_device(group))
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return float(wrong)


def _wrong_part(sequence: SplitSequence, logits: Tensor, whole: Tensor, mask: Tensor) -> float:
    """Return the part of this rank's tokens whose logits differ from those of the whole; all if
    attention was not split.
    """
    dtypes = sequence.attention.dtypes
    if not dtypes or logits.shape[1] != _TOKENS:
        return 1.0
    expected = sequence.cut(whole)
    # Eager attention in float64 gives rows that are padded on the left nan, split or not
    # (transformers 5).
    real = sequence.cut(mask).bool() & expected.isfinite().all(-1)
    precision = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    error = (logits - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    wrong = ~(error <= precision**0.5) & real
    if (wrong.any(0) & (wrong | ~real).all(0)).any():  # at the parts' border, in all rows
        return 1.0
    return float(wrong.sum() / real.sum().clamp(min=1))

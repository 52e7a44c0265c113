"""A model whose sequences are split against the same model in one process: losses and gradients of
one step.
"""

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from meshes import mesh_of
from torch.distributed.tensor import DTensor

from shardkit import accumulate, global_token_count, scale_loss, shard_model
from shardkit.sequence import split_sequence

Batch = dict[str, Any]


def kinds(seed):
    """Micro-batches: of odd length, of odd length padded on the left, padded on the right, and of
    three documents.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 67, (4, 2, 16), generator=generator)
    labels = ids.clone()
    labels[:, :, : 3 + seed % 3] = -100
    batches = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
    odd = {name: x[:, :13] for name, x in batches[0].items()}
    batches[1] = {name: x[:, :15] for name, x in batches[1].items()}
    for batch, hidden in ((batches[1], slice(None, 5)), (batches[2], slice(10, None))):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, hidden] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    lengths = [5, 2, 8 + seed % 2]
    packed = {name: x[:1, : sum(lengths)] for name, x in batches[3].items()}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return [odd, batches[1], batches[2], packed]


def shifted(labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def loss_of(logits, labels):
    """The sum over tokens, in the dtype of the logits: float32 would hide what float64 shows."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def plain_step(model, batches):
    """The mean loss over the tokens of all batches in one process, and its
    gradients in ``.grad``.
    """
    losses, tokens = [], 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = shifted(batch["labels"])
        losses.append(loss_of(model(**inputs, use_cache=False).logits, labels))
        tokens += int((labels != -100).sum())
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    return loss.detach()


def split_step(model, sequence, batches):
    """The same by all ranks, whose micro-batches these are; the loop that any batch has."""
    parts = [sequence.split(batch) for batch in batches]
    labels = [part.pop("labels") for part in parts]
    tokens = global_token_count(sum((each != -100).sum() for each in labels), model)
    total = torch.zeros((), dtype=torch.float64)
    for i, part in enumerate(parts):
        with accumulate(model, last=i == len(parts) - 1):
            loss = loss_of(model(**part).logits, labels[i])
            scale_loss(loss, tokens, model).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total / tokens


def split(model, sp, **settings):
    """Shard ``model`` over all ranks and split its sequences over ``sp`` of them."""
    shard_model(model, **settings)
    return split_sequence(model, mesh_of((dist.get_world_size() // sp, sp), "dp", "sp")["sp"])


def difference(model, plain):
    """The L2 distance of all gradients, relative to the plain model's norm; inf where one has none
    and one has.
    """
    squares = norm = torch.zeros((), dtype=torch.float64)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        if grad is None and other.grad is None:
            continue
        grad = torch.zeros_like(other) if grad is None else grad
        expected = torch.zeros_like(other) if other.grad is None else other.grad
        squares = squares + (grad - expected).double().square().sum()
        norm = norm + expected.double().square().sum()
    assert norm > 0, "no gradients"
    return float((squares / norm).sqrt())


def differences(model, batches, sp, **settings):
    """The differences of the loss and of the gradients; ``batches`` are the micro-batches of each
    dp rank.
    """
    plain = copy.deepcopy(model)
    sequence = split(model, sp, **settings)
    expected = plain_step(plain, list(itertools.chain(*batches)))
    loss = split_step(model, sequence, batches[dist.get_rank() // sp])
    return float((loss - expected).abs() / expected.abs()), difference(model, plain)


def vision_language():
    """A tiny Qwen3-VL."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 1e4,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    return transformers.Qwen3VLForConditionalGeneration(config).double()


def pictures(seed, length=21, image=True):
    """Two rows of text, with one image each of four tokens, or without."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 80, (2, length), generator=generator)
    for row, start in enumerate((3, 8) if image else ()):
        ids[row, start : start + 6] = torch.tensor([92, 90, 90, 90, 90, 93])
    labels = ids.masked_fill(ids >= 90, -100)
    labels[:, : 3 + seed] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    batch["mm_token_type_ids"] = (ids == 90).int()
    if image:
        batch["pixel_values"] = torch.randn(32, 96, generator=generator, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return batch

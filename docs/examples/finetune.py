"""Finetune a causal language model of transformers from the hub's files, and save it as
transformers does.

    torchrun --nproc-per-node 8 finetune.py --model Llama-3.1-8B --data lines.txt --out tuned

``--model`` is a local snapshot, such as ``huggingface_hub.snapshot_download`` returns. No rank ever
holds the whole model: it is built on the meta device, and each rank reads the bytes of its own
shards.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardkit import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    global_token_count,
    init_on_meta,
    scale_loss,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import load_pretrained, save_pretrained


def build(folder, recompute):
    """Return the model in float32, sharded, with the values of the files."""
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    with init_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_model(model, mp_policy=policy, checkpoint_activations=recompute)
    load_pretrained(model, folder)  # the dtype of the files is converted to the model's
    return model


def batches(lines, tokenizer, size, length):
    """Yield this rank's batches: token ids and labels, -100 where there is padding. As many on
    every rank.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for start in range(0, len(lines) - size * ranks + 1, size * ranks):
        own = lines[start + rank : start + size * ranks : ranks]
        encoded = tokenizer(
            own, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        yield {**encoded, "labels": labels}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a snapshot: config, tokenizer, safetensors"
    )
    parser.add_argument("--data", type=Path, required=True, help="a text file, one example a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="examples of one step, on each rank")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest example")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--recompute", action="store_true", help="recompute the blocks' activations in backward"
    )
    args = parser.parse_args(argv)

    model = build(args.model, args.recompute)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = [line for line in args.data.read_text().splitlines() if line.strip()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step_on_local_shards(optimizer)
    device = next(model.parameters()).device
    losses = []
    for _ in range(args.epochs):
        for batch in batches(lines, tokenizer, args.batch, args.length):
            batch = {name: value.to(device) for name, value in batch.items()}
            labels = batch.pop("labels")[:, 1:]
            # ranks have different numbers of them
            tokens = global_token_count((labels != -100).sum(), model)
            logits = model(**batch).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            scale_loss(loss, tokens, model).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append((total / tokens).item())
            if dist.get_rank() == 0:
                print(f"step {len(losses):>5}  loss {losses[-1]:.4f}")
    save_pretrained(model, args.out)  # for AutoModelForCausalLM.from_pretrained
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.out)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""Train LoRA adapters on a sharded, frozen bf16 base, and save the adapters alone.

    torchrun --nproc-per-node 8 lora.py --model Llama-3.1-8B --out adapters

The base stays in bfloat16; the adapters train in float32. Each unit gathers its block of the base
and its adapters together. ``PeftModel.from_pretrained(base, "adapters")`` loads the result into an
ordinary model.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from shardkit import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    init_on_meta,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import load_pretrained, save_pretrained


def build(folder, rank):
    """Return the model with adapters, sharded: the base from the files, the adapters as PEFT
    initializes them.
    """
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    with init_on_meta():
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()
    shard_model(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    # What the files do not have, the adapters, gets what its construction computes.
    load_pretrained(model, folder, strict=False)
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a snapshot: config and safetensors"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = build(args.model, args.rank)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = step_on_local_shards(torch.optim.AdamW(trained, lr=1e-3))
    device = trained[0].device
    own = torch.Generator().manual_seed(1 + dist.get_rank())  # put your data here
    ids = torch.randint(model.config.vocab_size, (4, 32), generator=own).to(device)
    losses = []
    for _ in range(args.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_pretrained(model, args.out)  # adapter_model.safetensors, adapter_config.json
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

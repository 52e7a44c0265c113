"""Train LoRA adapters on a sharded base in NF4 (QLoRA, by torchao), resume, and save the adapters
alone.

    torchrun --nproc-per-node 8 qlora.py --model Llama-3.1-8B --out adapters

Each rank reads the base in bfloat16 into CPU memory, and quantizes one weight at a time to 4 bits.
The all-gather sends these 4 bits and their scales. The adapters train in float32.
``PeftModel.from_pretrained(base, "adapters")`` loads the result; merge it into a base in full
precision.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from transformers import AutoModelForCausalLM

from shardkit import clip_grad_norm_, shard_model
from shardkit.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, save_pretrained


def quantize(base, device, block, scaler_block):
    """Replace the weights of all linear layers but the head by NF4 ones on the device, and move the
    rest there.
    """
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = to_nf4(module.weight.detach().to(device), block, scaler_block)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return base.to(device)


def build(folder, rank, block, scaler_block):
    """Return the model with adapters, sharded."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_cache=False)
    base = quantize(base, device, block, scaler_block)
    model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()
    return shard_model(model)


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
    parser.add_argument("--block", type=int, default=64, help="elements that share a scale")
    parser.add_argument("--scaler-block", type=int, default=256, help="scales that share a scale")
    args = parser.parse_args(argv)

    torch.manual_seed(0)  # the adapters must be the same on all ranks
    model = build(args.model, args.rank, args.block, args.scaler_block)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    runs, start = args.out / "runs", 0
    if (last := latest_checkpoint(runs)) is not None:
        start = load_checkpoint(last, model, optimizer)["step"]
    device = trained[0].device
    losses = []
    for step in range(start, args.steps):
        # put your data here
        own = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        ids = torch.randint(model.config.vocab_size, (4, 32), generator=own).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # What trains, with its optimizer state; the base is neither read nor written.
    save_checkpoint(
        runs / f"step-{args.steps}",
        model,
        optimizer,
        extra={"step": args.steps},
        trainable_only=True,
        overwrite=True,
    )
    # adapter_model.safetensors, adapter_config.json
    save_pretrained(model, args.out, overwrite=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""Pretrain a byte-level language model from scratch, and resume it on any number of ranks.

    python pretrain.py
    torchrun --nproc-per-node 8 pretrain.py --text corpus.txt --runs runs --steps 1000

The global batch does not depend on the number of ranks, so a run that is resumed on other ranks
goes on with the same data and the same losses, up to rounding. After a crash run the same command
again: it resumes from the newest checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit import (
    MixedPrecisionPolicy,
    accumulate,
    clip_grad_norm_,
    global_token_count,
    init_on_meta,
    materialize,
    scale_loss,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


class Transformer(nn.Module):
    def __init__(self, dim, layers, heads, context):
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        self.positions = nn.Embedding(context, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=tokens.device, dtype=x.dtype
        )
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def micro_batches(text, step, args):
    """Yield this rank's micro-batches of a step, each int64 of shape (sequences, context + 1)."""
    drawn = torch.Generator().manual_seed(step)  # the same on every rank
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=drawn)
    own = starts.tensor_split(dist.get_world_size())[dist.get_rank()]
    for part in own.tensor_split(min(args.accumulate, args.batch // dist.get_world_size())):
        yield torch.stack([text[start : start + args.context + 1] for start in part]).long()


def train_step(model, optimizer, batches, args):
    """Run one optimizer step and return the mean loss over the tokens of all ranks and the norm of
    the gradients.
    """
    device = next(model.parameters()).device
    tokens = global_token_count(sum(batch[:, 1:].numel() for batch in batches), model)
    total = torch.zeros((), device=device)
    for i, batch in enumerate(batches):
        batch = batch.to(device)
        with accumulate(model, last=i == len(batches) - 1):  # one reduction for all micro-batches
            logits = model(batch[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            scale_loss(loss, tokens, model).backward()
        total += loss.detach()
    norm = clip_grad_norm_(model, args.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / tokens, norm


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, default=Path(__file__), help="what to learn (default: this program)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument(
        "--batch", type=int, default=16, help="sequences of one step, over all ranks"
    )
    parser.add_argument(
        "--accumulate", type=int, default=2, help="micro-batches of a step, on each rank"
    )
    parser.add_argument("--context", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16, reduce in float32"
    )
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    with init_on_meta():
        model = Transformer(args.dim, args.layers, heads=4, context=args.context)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    )
    materialize(shard_model(model, mp_policy=policy))  # makes the process group, too
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step_on_local_shards(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    checkpoint = latest_checkpoint(args.runs)
    first = load_checkpoint(checkpoint, model, optimizer, scheduler)["step"] if checkpoint else 0

    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    losses, saving = [], None
    for step in range(first, args.steps):
        loss, norm = train_step(model, optimizer, list(micro_batches(text, step, args)), args)
        scheduler.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(
                f"step {step + 1:>5}  loss {losses[-1]:.4f}  norm {norm:.2f}  lr "
                f"{scheduler.get_last_lr()[0]:.1e}"
            )
        is_last = step + 1 == args.steps
        if (
            is_last or (step + 1) % args.save_every == 0
        ):  # a thread writes it while training goes on
            path = args.runs / f"step-{step + 1}"
            extra = {"step": step + 1}
            saving = save_checkpoint(
                path, model, optimizer, scheduler, extra=extra, keep=2, async_=True
            )
    if saving:
        saving.wait()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""A training project with one configuration file: data, evaluation, logs, checkpoints, resume and
generation.

    python train.py config.yaml
    torchrun --nproc-per-node 8 train.py config.yaml sharding.strategy=zero2 train.steps=1000

Run the same command again to resume, on any number of ranks: a step has the same sequences on all
of them. SIGTERM to a rank or to torchrun saves after the step, and ends the program.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, Sampler

from shardkit import (
    GradScaler,
    MeshSpec,
    MixedPrecisionPolicy,
    accumulate,
    check_optimizer,
    clip_grad_norm_,
    init_on_meta,
    materialize,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, stop_requested


class Decoder(nn.Module):
    """A language model of bytes."""

    def __init__(self, dim, layers, heads, context):
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(context, dim)
        block = {
            "dim_feedforward": 4 * dim,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, **block) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=tokens.device, dtype=x.dtype
        )
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Windows(Dataset):
    """All windows of ``context + 1`` bytes of a text."""

    def __init__(self, text, context):
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), context + 1

    def __len__(self):
        return len(self.text) - self.length + 1

    def __getitem__(self, start):
        return self.text[start : start + self.length].long()


class Steps(Sampler):
    """The sequences of each step on one rank. They depend on the seed and the step, so a run can
    resume anywhere.
    """

    def __init__(self, windows, first, last, batch, seed):
        self.windows, self.steps, self.batch, self.seed = windows, range(first, last), batch, seed

    def __len__(self):
        return len(self.steps) * self.batch // dist.get_world_size()

    def __iter__(self):
        for step in self.steps:
            # the same on every rank
            drawn = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            chosen = torch.randint(len(self.windows), (self.batch,), generator=drawn).tolist()
            yield from chosen[dist.get_rank() :: dist.get_world_size()]


def read_config(path, changes):
    """Read the file, with changes such as ``train.steps=10`` applied."""
    config = yaml.safe_load(Path(path).read_text())
    for change in changes:
        name, value = change.split("=", 1)
        *sections, key = name.split(".")
        section = config
        for each in sections:
            section = section[each]
        section[key] = (
            yaml.safe_load(value) if key in section else sys.exit(f"{name}: not in {path}")
        )
    return config


def mesh_and_resharding(strategy):
    """Return the arguments of ``shard_model`` for a strategy."""
    # torchrun's
    ranks, node = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return {
        "zero3": {},
        "zero2": {"reshard_after_forward": False},
        "hsdp": {"mesh": MeshSpec.hybrid(ranks // node, node)},
        "hpz": {"reshard_after_forward": node},
        "ddp": {"mesh": MeshSpec.hybrid(ranks, 1)},
    }[strategy]


def compute_dtype(name):
    """Return the dtype of the configuration; auto is bfloat16 on a device that has it, else
    float16, else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if not torch.cuda.is_available():
        return torch.float32
    return (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )


def build(config):
    """Return the sharded model, its optimizer, and a scaler that does something in float16 only."""
    torch.manual_seed(config["train"]["seed"])
    dtype, settings = (
        compute_dtype(config["sharding"]["dtype"]),
        mesh_and_resharding(config["sharding"]["strategy"]),
    )
    policy = (
        MixedPrecisionPolicy(dtype, torch.float32)
        if dtype != torch.float32
        else MixedPrecisionPolicy()
    )
    with init_on_meta():
        model = Decoder(**config["model"])
    recompute = config["sharding"]["recompute"]
    materialize(shard_model(model, mp_policy=policy, checkpoint_activations=recompute, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["train"]["lr"], fused=True)
    check_optimizer(optimizer, model)
    step_on_local_shards(optimizer)
    return model, optimizer, GradScaler(enabled=dtype == torch.float16)


def loss_of(model, batch):
    """Return the mean loss of a batch of windows."""
    batch = batch.to(next(model.parameters()).device, non_blocking=True)
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def train_step(model, optimizer, scaler, micro_batches, max_norm):
    """Run one optimizer step and return this rank's mean loss and the norm of the
    gradients of all.
    """
    total = 0.0
    for i, batch in enumerate(micro_batches):
        with accumulate(model, last=i == len(micro_batches) - 1):
            loss = loss_of(model, batch) / len(micro_batches)
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model, max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total, norm


def mean_over_ranks(value):
    """Return the mean of a scalar over all ranks, as a float."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model, windows, batch):
    """Return the mean loss on sequences of the held-out text: every rank runs as many forwards."""
    own = torch.linspace(0, len(windows) - 1, batch * dist.get_world_size()).long()[
        dist.get_rank() :: dist.get_world_size()
    ]
    return mean_over_ranks(loss_of(model, torch.stack([windows[start] for start in own.tolist()])))


@torch.no_grad()
def generate(model, prompt, length):
    """Return the most likely continuation of a prompt. Every rank calls it: each forward gathers
    the parameters.
    """
    tokens = torch.tensor([list(prompt.encode())], device=next(model.parameters()).device)
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens[:, -model.context :])[:, -1:].argmax(-1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main(argv=None):
    """Train, and return the mean loss over all ranks of each step."""
    path, *changes = sys.argv[1:] if argv is None else argv
    config = read_config(path, changes)
    train, out = config["train"], Path(config["out"])
    model, optimizer, scaler = build(config)  # makes the process group, too
    own, rest = divmod(train["batch"], dist.get_world_size() * train["micro_batch"])
    if rest or not own:
        sys.exit(
            f"train.batch: {train['batch']} is not a multiple of {dist.get_world_size()} ranks x "
            "train.micro_batch"
        )
    text = (Path(path).parent / config["data"]["text"]).read_bytes()
    split, context = len(text) * 9 // 10, config["model"]["context"]
    windows, held_out = Windows(text[:split], context), Windows(text[split:], context)

    checkpoint = latest_checkpoint(out)
    first = load_checkpoint(checkpoint, model, optimizer)["step"] if checkpoint else 0
    order = Steps(windows, first, train["steps"], train["batch"], train["seed"])
    workers, pinned = config["data"]["workers"], torch.accelerator.is_available()
    batches = iter(
        DataLoader(
            windows, train["micro_batch"], sampler=order, num_workers=workers, pin_memory=pinned
        )
    )
    writer = None
    if config["tensorboard"] and dist.get_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out / "tensorboard")

    losses, saving, stopped = [], None, stop_requested()  # from here on SIGTERM waits for a step
    for step in range(first + 1, train["steps"] + 1):
        with profile() if step == config["profile"] else nullcontext() as trace:
            loss, norm = train_step(
                model, optimizer, scaler, [next(batches) for _ in range(own)], train["max_norm"]
            )
        if trace:
            out.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(out / f"trace-rank{dist.get_rank()}.json"))
        losses.append(mean_over_ranks(loss))
        measured = {"loss": losses[-1], "norm": norm.item()}
        stopped = stop_requested()
        is_last = step == train["steps"]
        if step % train["evaluate_every"] == 0 or is_last:
            measured["held out"] = evaluate(model, held_out, train["micro_batch"])
        if step % train["evaluate_every"] == 0 or is_last or stopped:
            extra = {"step": step}
            saving = save_checkpoint(
                out / f"step-{step}", model, optimizer, extra=extra, keep=2, async_=True
            )
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, **measured}))
        for name, value in measured.items() if writer else ():
            writer.add_scalar(name, value, step)
        if stopped:
            break
    if saving:
        saving.wait()
    if stopped:
        return losses
    continued = generate(model, "def ", config["generate"])
    if dist.get_rank() == 0:
        print(repr(continued))
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

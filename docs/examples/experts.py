"""Expert parallel x FSDP: a mixture of experts that sends each token to the rank of its expert.

    torchrun --nproc-per-node 4 experts.py --ep 2

The model splits its experts over the axis "ep" of the mesh, as DTensors, and moves the tokens.
``shard_model`` shards each rank's experts on "efsdp" and everything else on all ranks, and divides
gradients so that all are exact means.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardkit
from shardkit import by_class, by_name, shard_model


class Experts(nn.Module):
    """The experts of one layer, in one parameter each for the way up and down."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / (2 * dim) ** 0.5)

    def split(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts, as DTensors that know which they are."""
        self.group, self.ranks = mesh.get_group(), mesh.size()
        for name, param in list(self.named_parameters()):
            part = distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(part))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Run each row of ``x`` [tokens, dim] through its ``expert`` [tokens], on whichever rank
        has it.
        """
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        order = expert.argsort(stable=True)
        # of this rank's tokens, for each expert
        counts = torch.bincount(expert, minlength=len(up) * self.ranks)
        received = torch.empty_like(counts)  # from each rank, for each of this rank's experts
        dist.all_to_all_single(received, counts, group=self.group)
        sent_to, got_from = (
            each.view(self.ranks, -1).sum(1).tolist() for each in (counts, received)
        )
        rows = all_to_all_single(
            x.new_empty(sum(got_from), x.shape[1]), x[order], got_from, sent_to, self.group
        )
        local = (
            torch.arange(len(up), device=x.device).repeat(self.ranks).repeat_interleave(received)
        )
        done = torch.zeros_like(rows)
        for index in range(len(up)):  # also those without a token, whose gradients are zeros
            chosen = (local == index).nonzero().squeeze(1)
            done = done.index_copy(0, chosen, F.gelu(rows[chosen] @ up[index]) @ down[index])
        back = all_to_all_single(torch.empty_like(x), done, sent_to, got_from, self.group)
        return torch.zeros_like(x).index_copy(0, order, back)


class Block(nn.Module):
    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(dim),
            nn.Linear(dim, experts),
            Experts(experts, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weight, expert = self.router(normed).softmax(-1).max(-1)
        return x + weight[:, None] * self.experts(normed, expert)


def main(args: Sequence[str] | None = None) -> list[float]:
    """Train on a made-up task and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks among which a layer's experts are split"
    )
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="directory for a checkpoint, which loads with any --ep")
    given = parser.parse_args(args)
    if not dist.is_initialized():
        dist.init_process_group()
    device = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // given.ep, given.ep), mesh_dim_names=("efsdp", "ep")
    )

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 16), *(Block(given.experts, 16) for _ in range(2)), nn.Linear(16, 32)
    )
    for block in model[1:-1]:
        block.experts.split(mesh["ep"])
    shard_model(model, mesh=mesh, units=[by_name("*.experts", mesh="efsdp"), by_class(Block)])
    optimizer = shardkit.step_on_local_shards(torch.optim.AdamW(model.parameters(), lr=3e-2))

    losses = []
    for step in range(given.steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        # ranks have other numbers
        tokens = torch.randint(32, (32 + 16 * dist.get_rank(),), generator=generator).to(device)
        count = shardkit.global_token_count(tokens.numel(), model)
        loss = F.cross_entropy(model(tokens), (5 * tokens + 3) % 32, reduction="sum")
        shardkit.scale_loss(loss, count, model).backward()
        shardkit.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append((total / count).item())
    if given.save:
        shardkit.checkpoint.save_checkpoint(given.save, model)
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(main()):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}")
    dist.destroy_process_group()

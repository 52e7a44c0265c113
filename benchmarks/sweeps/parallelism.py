"""Three parallelisms at once on 8 ranks against one process: HSDP x TP, FSDP x TP x PP, FSDP x CP x TP.

About a minute on two cores: ``python -m benchmarks.sweeps.parallelism``.
Each trains 3 steps in float64 from meta init, with clipping and AdamW, and saves; the checkpoint
is loaded into the model without any parallelism. Printed are the largest differences from one
process, relative to the largest element of each tensor.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import clip_grad_norm_, init_on_meta, materialize, shard_model, step_on_local_shards
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.grads import accumulate, global_token_count, scale_loss
from shardkit.testing import RankPool

LAYOUTS = {
    "HSDP x TP": ("dp_replicate", "dp", "tp"),
    "FSDP x TP x PP": ("pp", "dp", "tp"),
    "FSDP x CP x TP": ("dp", "cp", "tp"),
}
STEPS = 3
MICRO_BATCHES = 4


class GatherTokens(torch.autograd.Function):
    """Concatenate the tokens of all ranks; each one's gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather along dim 1."""
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Reduce, and scatter along dim 1."""
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), dim=1)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class Block(nn.Module):
    """Causal attention of one head and an MLP, with a scalar parameter, which shardkit
    replicates.
    """

    group: dist.ProcessGroup | None = None  # the ranks that share a sequence

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query_key = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Add the attention's output, and the MLP's times the scalar."""
        normed, first = self.norm(x), 0
        query, keys = self.query_key(normed).chunk(2, dim=-1)
        values = normed
        if self.group is not None:
            keys, values = (GatherTokens.apply(t, self.group) for t in (keys, values))
            first = self.group.rank() * x.shape[1]
        positions = first + torch.arange(x.shape[1])
        causal = positions[:, None] >= torch.arange(keys.shape[1])
        x = x + nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=causal)
        return x + self.gain * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four blocks between an embedding and a head; a stage has only some of them."""

    embed: nn.Module | None
    head: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or what the next stage gets."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def batch(step: int, reader: int) -> tuple[Tensor, Tensor]:
    """Token numbers and labels of one data-parallel rank; some labels do not count."""
    generator = torch.Generator().manual_seed(100 * step + reader)
    ids = torch.randint(32, (8, 10), generator=generator)
    return ids, (ids * 3 % 32).masked_fill(ids < 8 * reader, -100)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def build(mesh: DeviceMesh) -> Model:
    """Cut the stage if there are stages, split blocks over "tp", shard over the data axes."""
    torch.manual_seed(0)
    with init_on_meta():
        model = Model()
    data_axes, tp = mesh["dp"], mesh["tp"]
    if "dp_replicate" in names_of(mesh):
        data_axes = mesh["dp_replicate", "dp"]
    if "cp" in names_of(mesh):  # FSDP shards over both: a second mesh, in which they are one axis
        joined = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_cp", "tp"))
        data_axes, tp = joined["dp_cp"], joined["tp"]
    if "pp" in names_of(mesh):
        if mesh["pp"].get_local_rank() == 0:
            del model.blocks["2"], model.blocks["3"]
            model.head = None
        else:
            del model.blocks["0"], model.blocks["1"]
            model.embed = None
    for block in model.blocks.values():
        if "cp" in names_of(mesh):
            block.group = mesh["cp"].get_group()
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_model(model, mesh=data_axes)
    materialize(model)
    return model


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh's axes."""
    return mesh.mesh_dim_names or ()


def train_sharded(
    mesh: DeviceMesh, model: Model, optimizer: torch.optim.Optimizer, reader: int
) -> list[float]:
    """Train on this rank's batches, in micro-batches; return the norms. Collective."""
    pp = mesh["pp"] if "pp" in names_of(mesh) else None
    tokens = torch.zeros(())

    def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return scale_loss(summed_loss(logits, labels), tokens, model)

    if pp is not None:
        number, device = pp.get_local_rank(), torch.device("cpu")
        stage = PipelineStage(model, number, 2, device, group=pp.get_group())
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mean_loss, scale_grads=False)
    norms = []
    for step in range(STEPS):
        ids, labels = batch(step, reader)
        if "cp" in names_of(mesh):
            number = mesh["cp"].get_local_rank()
            ids, labels = ids.chunk(2, dim=1)[number], labels.chunk(2, dim=1)[number]
        tokens = global_token_count((labels != -100).sum(), model)
        if pp is None:
            for last in range(MICRO_BATCHES):
                own = slice(last, None, MICRO_BATCHES)
                with accumulate(model, last=last == MICRO_BATCHES - 1):
                    mean_loss(model(ids[own]), labels[own]).backward()
        elif stage.is_first:
            schedule.step(ids)
        else:
            schedule.step(target=labels)
        group = None if pp is None else pp.get_group()
        norms.append(clip_grad_norm_(model, 0.5, group=group).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_plain(model: Model, optimizer: torch.optim.Optimizer, readers: int) -> list[float]:
    """Train one process on the batches of all data-parallel ranks; return the norms."""
    norms = []
    for step in range(STEPS):
        loss, tokens = torch.zeros(()), torch.zeros(())
        for reader in range(readers):
            ids, labels = batch(step, reader)
            loss = loss + summed_loss(model(ids), labels)
            tokens = tokens + (labels != -100).sum()
        (loss / tokens).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def values_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole parameters and optimizer state, by name. Collective."""
    values = {}
    for name, param in model.named_parameters():
        tensors = {name: param.detach()}
        for key, value in optimizer.state[param].items():
            tensors[f"{name} {key}"] = value
        for label, tensor in tensors.items():
            values[label] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return values


def difference(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    worst = 0.0
    for name, value in values.items():
        scale = expected[name].abs().max()
        worst = max(worst, ((value - expected[name]).abs().max() / scale).item())
    return worst


def compare(layout: str, folder: Path) -> dict[str, float]:
    """Train, save and load in one layout; return differences from one process. Collective."""
    torch.set_default_dtype(torch.float64)
    # full_tensor says that its gathers are several
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=LAYOUTS[layout])
    model = build(mesh)
    torch.manual_seed(0)
    plain = Model()
    initial = dict(plain.named_parameters())
    result = {"initial values": 0.0}
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        result["initial values"] += (full != initial[name]).sum().item()
    reader, readers = mesh["dp"].get_local_rank(), 2
    if "dp_replicate" in names_of(mesh):
        reader, readers = reader + 2 * mesh["dp_replicate"].get_local_rank(), 4
    optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    norms = train_sharded(mesh, model, optimizer, reader)
    expected = train_plain(plain, plain_optimizer, readers)
    assert min(expected) > 0.5, "nothing to clip"
    result["norms"] = max(abs(a - b) / b for a, b in zip(norms, expected, strict=True))
    values = values_of(model, optimizer)
    result["parameters and state"] = difference(values, values_of(plain, plain_optimizer))
    save_checkpoint(folder / "saved", model, optimizer)
    load_checkpoint(folder / "saved", plain, plain_optimizer)
    result["after loading"] = difference(values, values_of(plain, plain_optimizer))
    return result


if __name__ == "__main__":
    with RankPool(8, timeout=600) as pool:
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as folder:
                results = pool.run(compare, layout, Path(folder))
            for name in results[0]:
                print(f"{layout:16}{name:24}{max(result[name] for result in results):.1e}")

"""What docs/parallelism.md says of initial values: one hash of all, whatever the parallelism.

A minute: ``PYTHONPATH=. python benchmarks/sweeps/initial_bits.py`` prints a table.
"""

from __future__ import annotations

import hashlib
import logging
import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import by_class, init_on_meta, materialize, shard_model
from shardkit.testing import RankPool

BLOCKS = 4
# Of each layout the axes of its mesh, and the sizes to try.
LAYOUTS: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
    "TP": (("tp",), [(2,), (4,), (8,)]),
    "FSDP": (("dp",), [(ranks,) for ranks in range(1, 9)]),
    "FSDP, offloaded to the CPU": (("dp",), [(4,)]),
    "HSDP": (("dp_replicate", "dp"), [(2, 2), (2, 4), (4, 2)]),
    "FSDP x TP": (("dp", "tp"), [(2, 2), (4, 2), (2, 4)]),
    "HSDP x TP": (("dp_replicate", "dp", "tp"), [(2, 2, 2)]),
    "PP x FSDP": (("pp", "dp"), [(2, 2), (4, 2), (2, 4)]),
    "PP x FSDP x TP": (("pp", "dp", "tp"), [(2, 2, 2)]),
}


class Block(nn.Module):
    """Sizes that ranks share unevenly; initializers of torch, and one that depends on the place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(22), nn.Linear(22, 42), nn.Linear(42, 22)
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        with torch.no_grad():
            self.down.weight.div_((2 * place + 2) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 22)
        self.blocks = nn.ModuleDict({str(place): Block(place) for place in range(BLOCKS)})
        self.head = nn.Linear(22, 37)
        nn.init.orthogonal_(self.head.weight)


def cut(model: Model, stage: int, stages: int) -> None:
    """Keep what belongs to one stage, under the names of the whole model."""
    for place in range(BLOCKS):
        if place * stages // BLOCKS != stage:
            del model.blocks[str(place)]
    if stage > 0:
        del model.embed
    if stage < stages - 1:
        del model.head


def digests(model: nn.Module) -> dict[str, str]:
    """Hash every parameter of this rank's model, gathered by torch. Collective."""
    found = {}
    for name, param in model.named_parameters():
        value: Tensor = param.full_tensor() if isinstance(param, DTensor) else param
        header = f"{name} {value.dtype} {tuple(value.shape)} "
        data = value.detach().contiguous().numpy().tobytes()
        found[name] = hashlib.sha256(header.encode() + data).hexdigest()
    return found


def initialized(layout: str, sizes: tuple[int, ...]) -> dict[str, str]:
    """Build the model on this rank as the page says, and hash its parameters. Collective."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of slow gathers
    axes = LAYOUTS[layout][0]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    torch.manual_seed(0)
    with init_on_meta():
        model = Model()
    if "pp" in axes:
        cut(model, mesh["pp"].get_local_rank(), mesh["pp"].size())
    if "tp" in axes:
        for block in model.blocks.values():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
    data_axes = tuple(axis for axis in axes if axis.startswith("dp"))
    if data_axes:
        policy = CPUOffloadPolicy(pin_memory=False) if "offload" in layout else OffloadPolicy()
        shard_model(model, mesh=mesh[data_axes], units=by_class(Block), offload_policy=policy)
    return digests(materialize(model))


def joined(digests_of_ranks: list[dict[str, str]]) -> str:
    """Return one hash of all parameters; ranks that have the same parameter must agree."""
    together: dict[str, str] = {}
    for of_rank in digests_of_ranks:
        for name, digest in of_rank.items():
            assert together.setdefault(name, digest) == digest, name
    text = " ".join(f"{name} {together[name]}" for name in sorted(together))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table() -> str:
    torch.manual_seed(0)
    rows = [("plain torch", "one process", joined([digests(Model())]))]
    for layout, (axes, shapes) in LAYOUTS.items():
        for sizes in shapes:
            with RankPool(math.prod(sizes), timeout=300) as pool:
                found = joined(pool.run(initialized, layout, sizes))
            mesh = " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
            rows.append((layout, f"`{mesh}`", found))
            print(*rows[-1], flush=True)
    lines = [
        "| Layout | Ranks | SHA-256 of all parameters, its first digits |",
        "| --- | --- | --- |",
    ]
    for layout in dict.fromkeys(row[0] for row in rows):
        for digest in dict.fromkeys(row[2] for row in rows if row[0] == layout):
            ranks = [row[1] for row in rows if (row[0], row[2]) == (layout, digest)]
            lines.append(f"| {layout} | {', '.join(ranks)} | `{digest}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())

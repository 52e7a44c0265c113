"""Tiny plain-torch models, one for each oddity that a sharding rule may trip over."""

import torch
from small_models import Block
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo_entry import Entry, floats
from zoo_usual import VOCAB, WIDTH, NanoGpt, blocks, next_token, run, stacked, tokens, vectors

# Parameters that are not like the others.


class Scalar(nn.Module):
    """A parameter without dimensions, such as CLIP's logit_scale."""

    def __init__(self):
        super().__init__()
        self.layers = blocks()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return run(self.layers, x) * self.logit_scale.exp()


class Frozen(nn.Module):
    """Frozen embedding and first blocks, one frozen norm in a block that trains."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.layers = blocks(4)
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].norm.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(run(self.layers, self.embed(ids)))


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False).to(torch.bfloat16)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.lora_b(self.lora_a(x))


def lora():
    """A frozen bf16 base with fp32 adapters that train."""
    model = NanoGpt(tied=False).requires_grad_(False)
    for block in model.transformer.h:
        block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
    return model


class MixedBlock(nn.Module):
    """bf16 linear layers and an fp32 norm, all of which train."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.linear(self.norm(x.float()).bfloat16())


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MixedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(run(self.layers, x).float())


class Narrow(nn.Module):
    """First dimensions of 1, 2 and 3: fewer than there are ranks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.inp, self.out, self.gain = (
            nn.Linear(WIDTH, 3),
            nn.Linear(3, 1),
            nn.Parameter(torch.ones(2)),
        )

    def forward(self, x):
        return self.out(run(self.layers, self.inp(x)).tanh()) * self.gain


# Modules that are not called once each, in order.


def shared_weight():
    """Two blocks share a weight, each by its own name."""
    model = nn.Sequential(*blocks(4))
    model[2].up.weight = model[0].up.weight
    return model


class Unordered(nn.Module):
    """Blocks called from last to first, one of them twice and one never."""

    def __init__(self):
        super().__init__()
        self.layers = blocks(4)

    def forward(self, x):
        return run([self.layers[i] for i in (3, 1, 0, 1)], x)


class MoeBlock(nn.Module):
    """Top-1 routing. Experts without tokens are not called."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view_as(x)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MoeBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(run(self.layers, x))


class OwnCheckpointing(nn.Module):
    """The model recomputes its own blocks, and takes and returns tuples and dicts between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x):
        state = {"x": x, "step": 0}
        for layer in self.layers:
            state = checkpoint(layer, state, scale=0.5, use_reentrant=False)
        return state["x"]


class TupleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, state, *, scale):
        return {"x": self.block(state["x"]) * scale, "step": state["step"] + 1}


ODD = {
    "scalar": Entry(Scalar, vectors),
    "frozen": Entry(Frozen, tokens, next_token),
    "lora": Entry(lora, tokens, next_token),
    "mixed_dtypes": Entry(MixedDtypes, vectors),
    "narrow": Entry(Narrow, lambda seed: {"x": floats(seed, 2, WIDTH)}),
    "shared_weight": Entry(shared_weight, stacked),
    "unordered": Entry(Unordered, vectors),
    "moe": Entry(Moe, vectors, uneven=True),
    "own_checkpointing": Entry(OwnCheckpointing, vectors),
}

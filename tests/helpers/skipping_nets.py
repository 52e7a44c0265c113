"""Models of which ranks skip parts: a vision tower before the decoder, experts that may get no
token.
"""

import torch
from small_models import Block
from torch import Tensor, nn

EXPERTS = 3


class Tower(nn.Module):
    """Registered in another order than it runs in, and the last block's output is not used."""

    def __init__(self, width):
        super().__init__()
        self.merge = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.patch = nn.Linear(6, width)

    def forward(self, image):
        x = self.patch(image)
        for block in reversed(self.blocks):
            x, before = block(x), x
        return self.merge(before).tanh()


class Experts(nn.Module):
    """A router that gives whole samples to experts; those without a sample are not called."""

    def __init__(self, width, experts):
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x, chosen):
        out = x
        for index, expert in enumerate(self.experts):
            rows = [row for row, choice in enumerate(chosen) if choice == index]
            if rows:
                out = out.index_add(0, torch.tensor(rows), expert(x[rows]))
        return out


class Net(nn.Module):
    """Tower first by name and second by call, as in transformers."""

    def __init__(self, width=8):
        super().__init__()
        self.visual = Tower(width)
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList([Block(width), Experts(width, EXPERTS), Block(width)])
        self.project = nn.Linear(width, width)
        self.head = nn.Linear(width, 20)

    def forward(self, ids, image, chosen):
        x = self.embed(ids)
        if image is not None:
            x = torch.cat([self.project(self.visual(image)), x], 1)
        x = self.layers[1](self.layers[0](x), chosen)
        return self.head(self.layers[2](x)).tanh()


def net():
    torch.manual_seed(0)
    return Net().double()


Batch = tuple[Tensor, Tensor | None, list[int]]


def batch(seed, rank, image, chosen=None, require_grad=False):
    """What a rank gets in one step: two samples, each for one expert."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(20, (2, 5), generator=source)
    pixels = torch.randn(2, 3, 6, generator=source, dtype=torch.double)
    drawn = torch.randint(EXPERTS, (2,), generator=source).tolist()
    pixels.requires_grad_(require_grad)
    return ids, pixels if image else None, drawn if chosen is None else chosen

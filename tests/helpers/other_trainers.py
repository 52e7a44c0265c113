"""The functions of docs/integrations.md, what they train, and the plain loop that they must agree
with.

Other trainers find ranks by torchrun's environment, and accelerate keeps its state for the process:
``torchrun`` gives the ranks of a pool both for one run. The packages take seconds to import:
``packages`` does so in pytest's process, once for all ranks.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ROWS, BATCH, CLIP, LR = 16, 4, 0.5, 1e-2  # BATCH: rows of a step's micro-batch, over all ranks
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def packages(*names):
    """Import what the module's tests need; skip them where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            pytest.importorskip(name)


def of_the_page(name):
    """A function of docs/integrations.md."""
    namespace = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(code, namespace)
    return namespace[name]


@contextmanager
def torchrun():
    """Give this rank the environment of torchrun; forget accelerate's state, before and after."""
    from accelerate.state import AcceleratorState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    settings = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    more = {"MASTER_ADDR": "none", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}
    with mock.patch.dict(os.environ, settings | more):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config)


def rows(count=ROWS):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def batch(of):
    return {name: torch.stack([row[name] for row in of]) for name in of[0]}


def plain_loop(steps, accumulate=1, decay=0.01, rows_of=ROWS):
    """Train the unsharded model on the global batches, in this process alone."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=decay)
    losses, norms = [], []
    for number in range(steps * accumulate):
        start = number * BATCH % rows_of
        loss = model(**batch(rows()[start : start + BATCH])).loss
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    assert min(norms) > CLIP  # each step was clipped
    return Trained(model, losses, norms)


class Trained:
    """A model after training, and its losses and norms of gradients."""

    def __init__(self, model, losses, norms):
        self.model, self.losses, self.norms = model, losses, norms

    def assert_like(self, model, prefix=""):
        """The sharded ``model`` has these parameters but for the rounding of sums over ranks."""
        whole = full(model)
        for name, param in self.model.named_parameters():
            torch.testing.assert_close(whole[prefix + name], param.detach(), rtol=1e-4, atol=2e-5)


def full(model):
    params = ((name, param.detach()) for name, param in model.named_parameters())
    return {
        name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in params
    }


def assert_same(first, second):
    """Bit-equal."""
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]

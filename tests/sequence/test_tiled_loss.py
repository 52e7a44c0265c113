"""The loss in tiles: that of the whole, with logits that are never whole."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from memory_count import counted_peak
from meshes import mesh_of
from small_models import Decoder
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    ShardkitError,
    accumulate,
    apply_plan,
    by_name,
    global_token_count,
    group,
    plan_model,
    scale_loss,
    shard_model,
)
from shardkit.memory import estimate
from shardkit.sequence import split_sequence, tiled_loss
from shardkit.testing import comm_counts, distributed, fake_world

WORDS = 23


class Model(Decoder):
    """Returns logits, or the loss of targets."""

    tiles = 3

    def __init__(self, tied, words=WORDS):
        super().__init__(layers=2, vocabulary=words, tied=tied)
        if not tied:
            self.head.bias = nn.Parameter(torch.randn(words))

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return (
            self.head(x).clone()
            if targets is None
            else tiled_loss(self.head, x, targets, tiles=self.tiles)
        )


def whole_loss(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def batches(seed):
    """Micro-batches: uneven numbers of tokens and labels, tokens without any label, and none at
    all.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, shape in enumerate([(2, 7 + seed), (1, 2), (3, 5), (1, 0)]):
        tokens = torch.randint(WORDS, shape, generator=generator)
        labels = torch.randint(WORDS, shape, generator=generator)
        found.append(
            (
                tokens,
                labels.masked_fill(torch.rand(shape, generator=generator) < number / 2 + 0.1, -100),
            )
        )
    return found


CASES = {
    "default": {},
    "tied": {"tied": True},
    "of the root": {"units": "layers.*"},
    "alone, resharded": {"units": [by_name("head", reshard_after_forward=True), "layers.*"]},
    "cast": {
        "units": [
            by_name("head", mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32)),
            "layers.*",
        ]
    },
    "resharded": {
        "units": [group("norm", "head", reshard_after_forward=True), "layers.*"],
        "checkpoint_activations": True,
    },
}


@distributed(world_size=2)
def test_losses_and_gradients_are_those_of_the_whole():
    for name, case in CASES.items():
        torch.manual_seed(0)
        plain = Model(case.get("tied", False)).double()
        model = copy.deepcopy(plain)
        arguments = {key: value for key, value in case.items() if key != "tied"}
        plan = plan_model(model, mesh=MeshSpec.sharded(2), **arguments)
        assert bool(arguments) or (("norm", "head") if not case else ("embed", "norm", "head")) in [
            unit.modules for unit in plan.units
        ]
        apply_plan(model, plan)
        everything = [batches(rank) for rank in range(2)]
        count = sum((labels != -100).sum() for each in everything for _, labels in each)
        expected = sum(whole_loss(plain, *batch) for each in everything for batch in each) / count
        expected.backward()
        mine = everything[dist.get_rank()]
        tokens = global_token_count(sum((labels != -100).sum() for _, labels in mine), model)
        losses = []
        for place, batch in enumerate(mine):
            with accumulate(model, last=place == len(mine) - 1):
                losses.append(model(*batch))
                scale_loss(losses[-1], tokens, model).backward()
        total = torch.stack(losses).sum().detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total / tokens, expected.detach(), rtol=1e-15, atol=0)
        for (fqn, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            assert (grad - other.grad).norm() <= 1e-15 * other.grad.norm(), (name, fqn)
        model.zero_grad()
        with comm_counts() as counts:
            model(*mine[0]).backward()
        assert counts == plan.collectives(), name
        with torch.no_grad():
            found, logits = model(*mine[0]), model(mine[0][0])
        whole = F.cross_entropy(
            logits.flatten(0, 1).double(), mine[0][1].flatten(), reduction="sum"
        )
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)


def test_logits_are_never_whole_and_memory_is_predicted():
    tokens, peaks = torch.randint(401, (2, 60)), {}
    for tiles in (1, 8):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
            model = Model(tied=False, words=401)
            model.tiles = tiles
            plan = plan_model(model, mesh=MeshSpec.sharded(4), mp_policy=policy)
            row = estimate(
                model, plan=plan, batch=(tokens, tokens), optimizer="none", loss=lambda loss: loss
            )["ZeRO-3"]
            peak = counted_peak(model, plan, lambda m: m(tokens, tokens).backward())
            assert row.peak is not None
            assert row.peak.total - 2 * tokens.nbytes == pytest.approx(peak, rel=0.02)
            peaks[tiles, policy.param_dtype] = peak
    logits = tokens.numel() * 401 * 4
    assert peaks[1, None] > 2 * logits
    assert peaks[8, None] < 0.9 * logits
    assert peaks[8, torch.bfloat16] < 0.9 * logits


def test_other_losses():
    """Capped logits and weights of tokens, which bf16 does not round."""
    torch.manual_seed(0)
    head = nn.Linear(4, 9)
    hidden, labels = (
        torch.randn(2, 5, 4),
        torch.stack([torch.randint(9, (2, 5)).float(), torch.rand(2, 5)], -1),
    )

    def loss(logits, labels):
        each = F.cross_entropy(3 * torch.tanh(logits / 3), labels[:, 0].long(), reduction="none")
        return (each * labels[:, 1]).sum()

    expected = loss(head(hidden).flatten(0, 1), labels.flatten(0, 1))
    torch.testing.assert_close(tiled_loss(head, hidden, labels, tiles=4, loss=loss), expected)
    seen = []
    with fake_world(1):
        shard_model(head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        tiled_loss(
            head,
            hidden,
            labels,
            tiles=1,
            loss=lambda logits, given: seen.append(given) or logits.sum(),
        )
    assert torch.equal(seen[0], labels.flatten(0, 1))


def test_bad_arguments_and_the_head_as_it_was():
    head, hidden, labels = (
        nn.Linear(4, 9),
        torch.randn(2, 5, 4),
        torch.zeros(2, 5, dtype=torch.long),
    )
    with pytest.raises(
        ShardkitError, match=re.escape("labels have shape (2, 4), and hidden has (2, 5, 4).")
    ):
        tiled_loss(head, hidden, labels[:, 1:], tiles=2)
    with pytest.raises(IndexError):
        tiled_loss(head, hidden, labels + 9, tiles=2)
    assert "forward" not in vars(head)
    head.forward = own = lambda x: F.linear(x, head.weight)
    tiled_loss(head, hidden, labels, tiles=2).backward()
    assert head.forward is own
    assert head.bias.grad is None
    model = Model(tied=False)
    with fake_world(2):
        shard_model(model, units="layers.*")
        # parameters of the root's unit
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor"):
            tiled_loss(model.head, torch.randn(2, 5, 8), labels, tiles=2)


@distributed(world_size=2)
def test_in_the_forward_of_a_model_of_transformers_whose_sequences_are_split():
    class Llama(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, targets=None, **rest):
            if targets is None:
                return super().forward(input_ids, position_ids=position_ids, **rest)
            hidden = self.model(input_ids, position_ids=position_ids, **rest).last_hidden_state
            return tiled_loss(self.lm_head, hidden, targets, tiles=3)

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    plain = Llama(config).double()
    model = shard_model(copy.deepcopy(plain))
    ids, labels = batches(0)[2]
    logits = plain(ids, use_cache=False).logits  # transformers' own loss is in float32
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    expected.backward()
    sequence = split_sequence(model, mesh_of((2,))["dp_shard"])
    part = sequence.split({"input_ids": ids, "labels": labels})
    found = model(targets=part.pop("labels"), **part)
    scale_loss(found, 1, model).backward()
    found = found.detach().clone()
    dist.all_reduce(found)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (param.grad.full_tensor() - other.grad).norm() <= 1e-7 * other.grad.norm()

"""Splitting sequences over ranks changes nothing but the order of sums: float64, against one process."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tf
from meshes import mesh_of
from sequence_parity import difference, kinds, parity, pictures, split, vision_language
from zoo_transformers import SIZES

from shardkit import shard_model
from shardkit.errors import PlanError, ShardkitError
from shardkit.sequence import split_sequence, ulysses
from shardkit.sequence.exchange import Heads, deal
from shardkit.testing import comm_counts, distributed

SIZE = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "initializer_range": 0.3}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SINKS = {"head_dim": 8, "num_local_experts": 4, "experts_implementation": "eager", **LOCAL}
MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},  # fewer key heads than ranks
    "GptOss": {"num_key_value_heads": 2, **SINKS},  # eager attention, a parameter for each head
}
for _name in (*MODELS, "Qwen3VL", "Mamba"):  # here, so that no rank imports them
    getattr(tf, f"{_name}ForConditionalGeneration" if _name == "Qwen3VL" else f"{_name}ForCausalLM")


def build(name, **more):
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(**{**SIZE, **MODELS.get(name, {}), **more})
    return getattr(tf, f"{name}ForCausalLM")(config).double()


def adapted(model):
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora).double()


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=4, backend="gloo")
def test_parity(name):
    apart = parity(build(name), [kinds(0), kinds(1)], sp=2)
    assert max(apart) < 1e-14


@distributed(world_size=4, backend="gloo")
def test_adapters_recomputed_blocks_and_four_ranks():
    apart = parity(adapted(build("Qwen3")), [kinds(0)], sp=4, checkpoint_activations=True)
    assert max(apart) < 1e-14


@distributed(world_size=4, backend="gloo")
def test_a_vision_language_model_splits_its_text():
    loss, grads = parity(vision_language(), [[pictures(0), pictures(2, 18)], [pictures(1), pictures(3)]], sp=2)
    assert loss < 1e-14
    assert grads < 1e-8  # the encoder's positions are float32, and its gradient is the sum of two parts


@distributed(world_size=2, backend="gloo")
def test_the_models_own_loss_is_the_mean_of_the_whole():
    model = build("Llama")
    plain = copy.deepcopy(model)
    sequence = split(model, 2)
    loss = model(**sequence.split(kinds(0)[0])).loss
    loss.backward()
    expected = plain(**kinds(0)[0]).loss
    expected.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    assert abs(loss / 2 - expected) < 1e-6  # transformers rounds logits to float32
    assert difference(model, plain) < 1e-6


@distributed(world_size=2, backend="gloo")
def test_collectives_bytes_and_scores():
    model, batch = build("GptOss"), kinds(0)[0]
    whole = model(input_ids=batch["input_ids"]).logits.detach()
    sequence = split(model, 2)
    with torch.no_grad(), comm_counts() as counts:
        logits = model(**sequence.split({"input_ids": batch["input_ids"]})).logits
    calls, sent = sequence.traffic(2 * 14)
    assert counts.other == {"alltoall_base_": calls}
    assert (calls, sent) == (8, 2 * (32 + 16 + 16 + 32) * 8 * 14 // 2)
    assert (sequence.gather(logits)[:, :13] - whole).abs().max() < 1e-12


@distributed(world_size=2, backend="gloo")
def test_bad_batches_are_errors_on_both_ranks():
    model = build("Llama")
    sequence, ids = split(model, 2), kinds(0)[0]["input_ids"]
    with pytest.raises(ShardkitError, match=r"not from sequence\.split"):
        model(input_ids=ids)
    with pytest.raises(ShardkitError, match="Each of these ranks cuts its part from the same batch"):
        sequence.split({"input_ids": ids + dist.get_rank()})
    bad = {"weights": ids.float(), "labels": ids} if dist.get_rank() else {"labels": ids}
    with pytest.raises(ShardkitError, match=r"weights|the same batch"):
        sequence.split({"input_ids": ids, **bad})
    with pytest.raises(ShardkitError, match="masks of pairs of tokens"):
        sequence.split({"input_ids": ids, "attention_mask": torch.ones(2, 1, 13, 13)})
    bad_embeds = torch.full((2, 13, 8), float("nan") if dist.get_rank() else 1.0)
    with pytest.raises(ShardkitError, match="Each of these ranks cuts its part from the same batch"):
        sequence.split({"inputs_embeds": bad_embeds})
    part = sequence.split({"input_ids": ids})
    assert torch.equal(part["input_ids"], sequence.cut(ids))


class Neighbours(tf.LlamaForCausalLM):
    """A model that mixes tokens where no name shows it."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        output.logits = output.logits + output.logits.roll(1, 1)
        return output


REFUSED = {
    "heads": (
        lambda: build("Llama", num_attention_heads=3, hidden_size=48, num_key_value_heads=3),
        "3 attention heads",
    ),
    "mamba": (lambda: build("Mamba"), "a MambaModel|has linear_attention"),
    "hidden": (lambda: Neighbours(build("Llama").config).double(), "of the tokens differ"),
    "plain": (lambda: torch.nn.Linear(4, 4), "without a model of transformers"),
}


@pytest.mark.parametrize("name", REFUSED)
@distributed(world_size=2, backend="gloo")
def test_what_cannot_be_split_is_refused_and_unchanged(name):
    make, said = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    shard_model(model)
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(PlanError, match=said):
        split_sequence(model, mesh_of((2,), "sp")["sp"])
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    if name == "hidden":
        assert model(input_ids=kinds(0)[0]["input_ids"]).logits.isfinite().all()


@distributed(world_size=2, backend="gloo")
def test_gradients_must_be_summed_over_the_ranks():
    with pytest.raises(PlanError, match="not sharded"):
        split_sequence(build("Llama"), mesh_of((2,), "sp")["sp"])


@distributed(world_size=2, backend="gloo")
def test_ulysses_around_any_attention():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 1, 1))
    options = {"is_causal": True, "enable_gqa": True}
    whole = F.scaled_dot_product_attention(query, key, value, **options)
    whole.square().sum().backward()
    expected = [x.grad.clone() for x in (query, key, value)]
    parts = [x.detach().chunk(2, 2)[dist.get_rank()].requires_grad_() for x in (query, key, value)]
    out = ulysses(F.scaled_dot_product_attention, mesh_of((2,), "sp").get_group())(*parts, **options)
    assert torch.equal(out, whole.detach().chunk(2, 2)[dist.get_rank()])
    out.square().sum().backward()
    for part, grad in zip(parts, expected, strict=True):
        assert (part.grad - grad.chunk(2, 2)[dist.get_rank()]).abs().max() < 1e-14


def test_heads_are_dealt():
    assert deal(8, 8, 4) == Heads(queries=2, keys=2, copies=1)
    assert deal(8, 2, 4) == Heads(queries=2, keys=1, copies=2)
    assert deal(12, 3, 2) == Heads(queries=6, keys=3, copies=2)
    assert deal(6, 2, 3) == Heads(queries=2, keys=2, copies=3)  # the middle rank serves halves of both key heads
    with pytest.raises(PlanError, match="6 query heads and 2 key and value heads, on 4 ranks"):
        deal(6, 2, 4)

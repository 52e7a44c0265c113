"""Splitting sequences over ranks changes nothing but the order of sums: float64, against one
process.
"""

import copy
import dataclasses
import functools
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tf
from cpu_ranks import on_ranks
from memory_count import counted_peak
from meshes import mesh_of
from split_training import difference, differences, kinds, loss_of, pictures, split, vision_language
from transformers import masking_utils
from transformers.models.llama import modeling_llama
from zoo_transformers import SIZES

from shardkit import MeshSpec, accumulate, plan_model, shard_model
from shardkit.errors import PlanError, ShardkitError
from shardkit.memory import estimate
from shardkit.sequence import split_sequence, training_mesh, ulysses
from shardkit.sequence.heads import Heads, deal
from shardkit.testing import comm_counts, fake_world

SIZE = {
    **SIZES,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SINKS = {"head_dim": 8, "num_local_experts": 4, "experts_implementation": "eager", **LOCAL}
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
}
LONG = {"original_max_position_embeddings": 13, "rope_parameters": ROPE}
MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},  # fewer key heads than ranks
    "GptOss": {"num_key_value_heads": 2, **SINKS},  # eager attention, a parameter for each head
    # long frequencies from 14 tokens on: not in a part
    "Phi3": {"num_key_value_heads": 4, "pad_token_id": 0, **LONG},
}
OWN = {
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}
for _name in (*MODELS, *OWN, "Mamba", "MiniMax", "Lfm2"):  # here, so that no rank imports them
    getattr(tf, f"{_name}ForCausalLM")


def build(name, **more):
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(
        **{**SIZE, **MODELS.get(name, {}), **OWN.get(name, {}), **more}
    )
    return getattr(tf, f"{name}ForCausalLM")(config).double()


def adapted(model):
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora).double()


@pytest.mark.parametrize("name", MODELS)
@on_ranks(4)
def test_a_split_model_trains_like_the_whole(name):
    off = differences(build(name), [kinds(0), kinds(1)], sp=2)
    assert max(off) < 1e-14


@on_ranks(2)
def test_eager_attention_of_rows_that_are_padded_on_the_left():
    """The last token of the padding has a label, and no key: eager attention takes the mean of all
    keys then.
    """
    # its softmax is float32, and nan for float64
    model = build("Llama", attn_implementation="eager").float()
    loss, grads = differences(model, [kinds(0)[1:2]], sp=2)
    assert max(loss, grads) < 1e-6


@on_ranks(4)
def test_adapters_checkpointed_blocks_and_four_ranks():
    off = differences(adapted(build("Qwen3")), [kinds(0)], sp=4, checkpoint_activations=True)
    assert max(off) < 1e-14


@on_ranks(4)
def test_a_vision_language_model_splits_its_text():
    loss, grads = differences(
        vision_language(), [[pictures(0), pictures(2, 18)], [pictures(1), pictures(3)]], sp=2
    )
    assert loss < 1e-14
    # the encoder's positions are float32, and its gradient is the sum of two parts
    assert grads < 1e-8


@on_ranks(2)
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


@on_ranks(2)
def test_scores_and_embeddings():
    model, ids = build("GptOss"), kinds(0)[0]["input_ids"]
    whole = model(input_ids=ids).logits.detach()
    embeddings = model.get_input_embeddings()(ids).detach()
    sequence = split(model, 2)
    for batch in ({"input_ids": ids}, {"inputs_embeds": embeddings}):
        with torch.no_grad():
            logits = model(**sequence.split(batch)).logits
        assert (sequence.gather(logits)[:, :13] - whole).abs().max() < 1e-12


@pytest.mark.parametrize("checkpointed", [False, True])
@on_ranks(2)
def test_collectives_of_a_step(checkpointed):
    model = build("Qwen3")
    plan = plan_model(model, checkpoint_activations=checkpointed)
    sequence = split(model, 2, checkpoint_activations=checkpointed)
    parts = [sequence.split(batch) for batch in kinds(0)[:2]]
    with comm_counts() as counts:
        for part in parts:
            with accumulate(model, last=part is parts[-1]):
                loss_of(model(**part).logits, part["labels"]).backward()
    layers, each = 2, 12 if checkpointed else 8
    assert counts == dataclasses.replace(
        plan.collectives(2), all_to_alls=layers * each * len(parts)
    )


def test_memory_is_predicted():
    """Half the tokens, and inside of attention all tokens of half the heads; counted on the sharded
    model.
    """
    models = [build("Llama", attn_implementation="eager") for _ in range(3)]
    plan, batch, parts = (
        plan_model(models[0], mesh=MeshSpec.sharded(4)),
        {"input_ids": torch.ones(2, 100).long()},
        [],
    )

    def split_batch(model):
        return split_sequence(model, training_mesh(sp=2)["sp"]).split(batch)

    def step(model):
        parts.extend([] if parts else [split_batch(model)])
        model(**parts[0]).logits.mean().backward()

    def peak(model, batch):
        mean = {"loss": lambda output: output.logits.mean(), "optimizer": 0.0}
        return estimate(model, plan=plan, batch=batch, **mean)["ZeRO-3"].peak.total

    with fake_world(4):
        predicted = peak(models[0], split_batch(models[0]))
    assert counted_peak(models[1], plan, step) == pytest.approx(predicted, rel=0.01)
    assert predicted < 0.6 * peak(models[2], batch | {"use_cache": False})


@on_ranks(2)
def test_bad_batches_are_errors_on_both_ranks():
    model = build("Llama")
    sequence, ids = split(model, 2), kinds(0)[0]["input_ids"]
    with pytest.raises(ShardkitError, match=r"not from sequence\.split"):
        model(input_ids=ids)
    left, right = torch.ones_like(ids).triu(1), torch.ones_like(ids).triu()
    bad = [  # on rank 1
        ({"input_ids": ids}, {"input_ids": ids.flip(1)}, "input_ids"),  # the same sum
        (
            {"inputs_embeds": torch.ones(2, 13, 8)},
            {"inputs_embeds": torch.full((2, 13, 8), torch.nan)},
            "inputs_embeds",
        ),
        ({"input_ids": ids}, {"input_ids": ids, "weights": ids.float()}, "weights"),
        ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids.flip(0)}, "labels"),
        (
            {"input_ids": ids, "attention_mask": left},
            {"input_ids": ids, "attention_mask": right},
            "attention_mask",
        ),
    ]
    for *batches, name in bad:
        with pytest.raises(ShardkitError, match=f"rank 1 differs from rank 0 in {name}"):
            sequence.split(batches[dist.get_rank()])
    with pytest.raises(ShardkitError, match="Masks of pairs of tokens"):
        sequence.split({"input_ids": ids, "attention_mask": torch.ones(2, 1, 13, 13)})
    part = sequence.split({"input_ids": ids})
    assert torch.equal(part["input_ids"], sequence.cut(ids))


class Marked(tf.LlamaForCausalLM):
    """A model whose mask depends on the tokens."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        def seen(batch, head, query, key):
            return input_ids[batch, key] % 2 == 0

        make = functools.partial(masking_utils.create_causal_mask, and_mask_function=seen)
        with mock.patch.object(modeling_llama, "create_causal_mask", make):
            return super().forward(input_ids, attention_mask, **kwargs)


REFUSED = {
    "heads": (
        lambda: build("Llama", num_attention_heads=3, hidden_size=48, num_key_value_heads=3),
        "3 query heads and 3 key and value heads, on 2 ranks",
    ),
    "mamba": (lambda: build("Mamba"), "MambaForCausalLM takes no position_ids"),
    "linear": (
        lambda: build("MiniMax"),
        "self_attn is a FSDPMiniMaxLightningAttention|self_attn is a MiniMaxL",
    ),
    "convolution": (
        lambda: build("Lfm2", layer_types=["conv", "full_attention"]),
        "layers.0.conv.* is a .*Conv",
    ),
    "own attention": (lambda: build("GPTNeo"), "does not run on"),
    "own positions": (lambda: build("OPT"), "has other logits"),
    "mask": (
        lambda: Marked(build("Llama").config).double(),
        "seen masks attention by what a rank knows",
    ),
    "plain": (lambda: torch.nn.Linear(4, 4), "contain a model of transformers"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_cannot_be_split_is_refused_and_unchanged(name):
    make, said = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    shard_model(model)
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(PlanError, match=said):
        split_sequence(model, mesh_of((2,), "sp")["sp"])
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    if name == "own positions":
        assert model(input_ids=kinds(0)[0]["input_ids"]).logits.isfinite().all()


@on_ranks(2)
def test_gradients_must_be_summed_over_the_ranks():
    with pytest.raises(PlanError, match="is not sharded"):
        split_sequence(build("Llama"), mesh_of((2,), "sp")["sp"])


@on_ranks(2)
def test_ulysses_around_any_attention():
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 8, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)
    )
    options = {"is_causal": True, "enable_gqa": True}
    whole = F.scaled_dot_product_attention(query, key, value, **options)
    whole.square().sum().backward()
    expected = [x.grad.clone() for x in (query, key, value)]
    parts = [x.detach().chunk(2, 2)[dist.get_rank()].requires_grad_() for x in (query, key, value)]
    out = ulysses(F.scaled_dot_product_attention, mesh_of((2,), "sp").get_group())(
        *parts, **options
    )
    assert torch.equal(out, whole.detach().chunk(2, 2)[dist.get_rank()])
    assert out.is_contiguous()  # models view it
    out.square().sum().backward()
    for part, grad in zip(parts, expected, strict=True):
        assert (part.grad - grad.chunk(2, 2)[dist.get_rank()]).abs().max() < 1e-14


def test_heads_are_dealt():
    assert deal(8, 8, 4) == Heads(queries=2, keys=2, copies=1)
    assert deal(8, 2, 4) == Heads(queries=2, keys=1, copies=2)
    assert deal(12, 3, 2) == Heads(queries=6, keys=3, copies=2)
    # the middle rank serves halves of both key heads
    assert deal(6, 2, 3) == Heads(queries=2, keys=2, copies=3)
    with pytest.raises(PlanError, match="6 query heads and 2 key and value heads, on 4 ranks"):
        deal(6, 2, 4)

"""PEFT's adapters on sharded bases: the losses, files and merged weights of plain peft, and resume,
bit for bit.
"""

import json

import pytest
import torch
from cpu_ranks import on_ranks
from sent_bytes import GATHER, SentBytes
from torch import Tensor, nn

from shardkit import (
    MeshSpec,
    ShardingPlan,
    ShardkitError,
    accumulate,
    full_params,
    group,
    plan_model,
    shard_model,
)
from shardkit.checkpoint import load_checkpoint, save_checkpoint, save_pretrained
from shardkit.memory.allocations import OptimizerBytes, unit_bytes
from shardkit.optim import step_on_local_shards
from shardkit.plan import Collectives
from shardkit.testing import comm_counts

peft = pytest.importorskip("peft")
# transformers' own deprecation, met by peft
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(16).view(2, 8)


def base(kind="float32", tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if kind == "float32":
        return model
    model = model.bfloat16()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head" and kind != "bfloat16":
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, to_nf4(module))
    return model


def to_nf4(module):
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    module.weight = nn.Parameter(to_nf4(module.weight.detach(), 16, 8), requires_grad=False)
    return module


TARGETS = {"target_modules": ["q_proj", "down_proj"]}


def config(kind):
    return {
        "lora": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], **TARGETS),
        "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **TARGETS),
        "ia3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **TARGETS),
        "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        "alone": lambda: peft.LoraConfig(r=4, **TARGETS),
    }[kind]()


def adapted(on, kind, tied=False):
    """Adapters are in float32, as ``get_peft_model`` makes them."""
    model = base(on, tied)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(kind))


def train(model, optimizer=None, steps=2):
    params = [param for param in model.parameters() if param.requires_grad]
    if optimizer is None:
        optimizer = step_on_local_shards(torch.optim.AdamW(params, lr=1e-2, foreach=False))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def check(path, on, kind, tied):
    plain, model = adapted(on, kind, tied), adapted(on, kind, tied)
    dtypes = {name: param.dtype for name, param in plain.named_parameters()}
    model = shard_model(model)
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    expected, _ = train(plain)
    losses, optimizer = train(model)
    assert losses == expected
    assert losses[1] != losses[0]

    if kind == "prefix":  # peft computes what it saves of prompts
        with full_params(model):
            model.save_pretrained(path / "adapter")
    else:
        save_pretrained(model, path / "adapter")
    again = peft.PeftModel.from_pretrained(base(on, tied), path / "adapter")
    want, found = (peft.get_peft_model_state_dict(each) for each in (plain, again))
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())

    save_checkpoint(path / "checkpoint", model, optimizer, trainable_only=True)
    other = shard_model(adapted(on, kind, tied))
    params = [param for param in other.parameters() if param.requires_grad]
    resumed = step_on_local_shards(torch.optim.AdamW(params, lr=1e-2, foreach=False))
    load_checkpoint(path / "checkpoint", other, resumed)
    assert train(other, resumed)[0] == train(model, optimizer)[0]


CASES = [
    *[("float32", kind, False) for kind in ("dora", "ia3", "vera", "prefix")],
    ("float32", "lora", True),
    ("bfloat16", "alone", False),
]


@on_ranks(2)
def test_adapters_train_resume_and_load_into_plain_peft(tmp_path):
    for number, (on, kind, tied) in enumerate(CASES):
        check(tmp_path / str(number), on, kind, tied)


ADAPTERS_APART = [
    group("**.lora_A.*", "**.lora_B.*", reshard_after_forward=False),
    "base_model.model.model.layers.*",
]


@on_ranks(2)
def test_a_frozen_base_is_gathered_once_for_all_micro_batches():
    plain, model = adapted("bfloat16", "alone"), adapted("bfloat16", "alone")
    plan = plan_model(model, units=ADAPTERS_APART, mesh=MeshSpec.sharded(2))
    shard_model(model, units=ADAPTERS_APART)
    for micro in range(3):
        (plain(input_ids=IDS + micro, labels=IDS + micro).loss / 3).backward()
    # two units stay gathered, two do not
    for keep, gathers in ((None, 2 + 2 * 2 * 3), ("frozen", 4)):
        model.zero_grad()
        with comm_counts() as counted:
            for micro in range(3):
                with accumulate(model, last=micro == 2, keep_unsharded=keep):
                    (model(input_ids=IDS + micro, labels=IDS + micro).loss / 3).backward()
        assert (
            counted
            == plan.collectives(3, keep_unsharded=keep)
            == Collectives(gathers, reduce_scatters=1)
        )
        trained = [
            (mine, its)
            for mine, its in zip(model.parameters(), plain.parameters(), strict=True)
            if its.requires_grad
        ]
        assert all(torch.equal(mine.grad.full_tensor(), its.grad) for mine, its in trained)


@on_ranks(2)
def test_adapters_on_a_quantized_base(tmp_path):
    pytest.importorskip("torchao")
    check(tmp_path, "nf4", "alone", False)


@on_ranks(2)
def test_merging_has_the_bits_of_plain_peft_or_is_refused(tmp_path):
    for kind in ("alone", "dora", "ia3", "vera"):
        plain, model = adapted("float32", kind), shard_model(adapted("float32", kind))
        train(plain), train(model)
        with pytest.raises(ShardkitError, match=r"q_proj\.merge cannot run while .*full_params"):
            model.merge_and_unload()
        expected = {
            name: value.clone() for name, value in plain.merge_and_unload().state_dict().items()
        }
        assert any(
            not torch.equal(value, expected[name]) for name, value in base().state_dict().items()
        )
        with full_params(model, writeback=True):
            merged = model.merge_and_unload()
        found = {name: tensor.full_tensor() for name, tensor in merged.state_dict().items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), kind
        save_pretrained(merged, tmp_path / kind)
    assert (tmp_path / "dora" / "model.safetensors").exists()


@on_ranks(2)
def test_the_plan_counts_what_a_quantized_base_holds_and_gathers():
    pytest.importorskip("torchao")
    model = adapted("nf4", "alone")
    plan = plan_model(model)
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    sizes = [unit_bytes(plan, unit, OptimizerBytes.of("none")) for unit in plan.units]
    model = shard_model(model)
    held = quantized = 0
    for param in model.parameters():
        local = param.to_local()
        parts = (
            [getattr(local, name) for name in local.__tensor_flatten__()[0]]
            if type(local) is not Tensor
            else []
        )
        held += sum(part.nbytes for part in parts or [local])
        quantized += bool(parts)
    with SentBytes() as sent:
        model(IDS)
    # scaler_mean and the 16 values of nf4: every rank holds them, and none gathers them
    whole = quantized * 17 * 2
    assert quantized == 14
    assert held == sum(size.shard for size in sizes) + whole // 2
    assert 2 * sent.bytes[GATHER] == sum(size.gather for size in sizes) - whole


@on_ranks(2)
def test_a_quantized_base_is_not_gathered():
    pytest.importorskip("torchao")
    model = shard_model(adapted("nf4", "alone"))
    with pytest.raises(ShardkitError, match=r"q_proj"), full_params(model):
        pass

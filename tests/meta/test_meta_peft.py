"""PEFT's adapters on models that were built on meta: bit-equal to PEFT on real weights, or refused
by name.
"""

import pytest
import torch
from meta_check import check_same_as_ordinary
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import ShardkitError, init_on_meta, materialize, shard_model
from shardkit.checkpoint import load_pretrained
from shardkit.testing import fake_world

# transformers' own deprecation, met by PEFT
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
    "ia3": None,
}


@pytest.fixture(autouse=True)
def world():
    with fake_world(2):
        yield


def base():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def adapted(model, kind):
    peft = pytest.importorskip("peft")
    if kind == "ia3":
        config = peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    else:
        config = peft.LoraConfig(**{"target_modules": TARGETS, "r": 4} | KINDS[kind])
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_made_inside(kind):
    model = check_same_as_ordinary(lambda: adapted(base(), kind))
    assert any(
        "lora_B" in fqn or "ia3_l" in fqn or "embedding_B" in fqn
        for fqn, _ in model.named_parameters()
    )


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize(
    "context", [init_on_meta, lambda: torch.device("meta")], ids=["recorded", "plain"]
)
def test_adapters_made_afterwards_are_refused_by_name(kind, context):
    """PEFT moves them to the base's device, meta, where their values are lost."""
    with context():
        model = base()
    model = shard_model(adapted(model, kind))
    with pytest.raises(ShardkitError, match=r"q_proj|k_proj") as error:
        materialize(model)
    assert "does not guess values" in str(error.value)
    assert all(param.is_meta for param in model.parameters())


def on_meta(kind):
    torch.manual_seed(5)
    with init_on_meta():
        model = adapted(base(), kind)
    return shard_model(model)


@pytest.mark.parametrize("kind", ["lora", "rslora", "gaussian", "ia3"])
def test_load_pretrained_of_the_base(tmp_path, kind):
    """The base has the hub's names. Adapters are as PEFT made them inside."""
    saved = base()
    saved.save_pretrained(tmp_path)
    torch.manual_seed(5)
    values = dict(adapted(base(), kind).named_parameters())
    model = on_meta(kind)
    keys = load_pretrained(model, tmp_path, strict=False)
    assert not keys.unexpected_keys
    loaded = dict(saved.named_parameters())
    for fqn, param in model.named_parameters():
        name = fqn.removeprefix("base_model.model.").replace(".base_layer.", ".")
        expected = values[fqn] if name in keys.missing_keys else loaded[name]
        part = expected.chunk(2, param.placements[0].dim)[0]
        assert torch.equal(param.to_local(), part), fqn
    # as does a file of the PeftModel itself
    whole = {fqn: torch.ones(param.shape) for fqn, param in model.named_parameters()}
    save_file(whole, tmp_path / "whole.safetensors")
    load_pretrained(model, tmp_path / "whole.safetensors")
    assert all(param.to_local().eq(1).all() for param in model.parameters())


def test_load_pretrained_refuses_adapters_made_afterwards(tmp_path):
    base().save_pretrained(tmp_path)
    with init_on_meta():
        model = base()
    with pytest.raises(ShardkitError, match=r"q_proj\.lora_A.*does not guess values"):
        load_pretrained(shard_model(adapted(model, "lora")), tmp_path, strict=False)


def test_load_pretrained_refuses_files_without_any_of_the_names(tmp_path):
    save_file({"other.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ShardkitError, match=r"no tensor of the model.*other\.weight"):
        load_pretrained(shard_model(base()), tmp_path, strict=False)


OTHER = torch.zeros(2, dtype=torch.bfloat16)
OF_MODULES = [
    lambda m: m.to(device="cpu"),
    lambda m: m.to("cpu", torch.bfloat16, True),
    lambda m: m.to(OTHER),
    lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    lambda m: m.to("cpu", memory_format=torch.preserve_format),
    lambda m: m.to(m.weight.device).cpu().double(),
]
OF_TENSORS = [
    lambda t: t.to("cpu"),
    lambda t: t.to("cpu", None, False, True),
    lambda t: t.to(torch.float64, False, True),
    lambda t: t.to(t, copy=True),
    lambda t: OTHER.to(t, copy=True) + t[:2],
    lambda t: t.to("cpu", copy=True, memory_format=torch.contiguous_format),
]


def test_moves_and_casts_inside():
    for move in OF_MODULES:
        check_same_as_ordinary(
            lambda move=move: nn.Sequential(move(nn.Linear(3, 3)), nn.Linear(3, 2))
        )

    def build(move):
        made = torch.rand(3)
        moved = move(made)
        made.mul_(2)  # what is the same tensor changes with it, a copy does not
        return nn.ParameterList([nn.Parameter(made), nn.Parameter(moved.detach().clone())])

    for move in OF_TENSORS:
        check_same_as_ordinary(lambda move=move: build(move))

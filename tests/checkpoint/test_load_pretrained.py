"""load_pretrained: plain, sharded and meta models from files in Hugging Face's form."""

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from safetensors.torch import save_file
from safetensors_kinds import TpBlock, assert_holds, tp_and_fsdp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardkit import init_on_meta, shard_model
from shardkit.checkpoint import load_pretrained
from shardkit.errors import CheckpointError
from shardkit.testing import fake_world

MESHES = {"fsdp": (4,), "hsdp": (2, 2)}


class Net(nn.Module):
    """Ties, uneven dims, buffers of both kinds, a frozen and a half-precision parameter, an integer
    buffer.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 3).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.logspace(0, 1, 7), persistent=False)
        self.register_buffer("noise", torch.randn(4), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x * self.gain).clone() + self.narrow(x).sum()


def net(seed):
    torch.manual_seed(seed)
    made = Net()
    with torch.no_grad():
        for each in (*made.parameters(), *made.norm.buffers()):
            each.copy_(torch.randn(each.shape) * 10)
    return made


def built(seed, meta=True):
    torch.manual_seed(seed)
    with init_on_meta() if meta else nullcontext():
        return Net()


def sharded(model, mesh="fsdp", **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(MESHES[mesh]), **options)
    return fully_shard(model, mesh=mesh_of(MESHES[mesh]), **options)


def stored(model):
    """What a file of the model has: ties once."""
    state = model.state_dict()
    return {name: state[name].detach().clone() for name in state if name != "head.weight"}


def state_of(model):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: state[name] for name in stored(model)}


def written(directory, seed=0):
    """A file that every rank writes for itself, so that no barrier is needed."""
    path = os.path.join(directory, f"{dist.get_rank() if dist.is_initialized() else 0}.safetensors")
    tensors = stored(net(seed))
    save_file(tensors, path)
    return path, tensors


# ---- models of every kind ------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_into_a_sharded_model(mesh, tmp_path):
    path, whole = written(tmp_path)
    model = sharded(net(1), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.arange(4)).sum().backward()  # leaves the root unsharded
    before = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    noise = model.noise.clone()
    with CommDebugMode() as comms:
        assert load_pretrained(model, path) == ([], [])
    # of a flag or a digest each
    assert comms.get_total_counts() <= 5 * len(MESHES[mesh]), comms.get_comm_counts()
    assert_holds(state_of(model), whole)
    assert {name: id(each) for name, each in model.state_dict(keep_vars=True).items()} == before
    assert torch.equal(model.noise, noise)
    assert model.head.weight is model.embed.weight
    optimizer.zero_grad()
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    moved = model.blocks[0].weight.full_tensor()
    assert not torch.equal(moved, whole["blocks.0.weight"]), "the optimizer steps on something else"


@pytest.mark.parametrize("how", ["recorded", "offloaded", "converted"])
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_into_a_meta_model(mesh, how, tmp_path):
    path, whole = written(tmp_path)
    expected = built(3, meta=False)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    model = sharded(built(3), mesh, **offload)
    before = {name: id(each) for name, each in model.named_parameters()}
    dtype = torch.bfloat16 if how == "converted" else None
    load_pretrained(model, path, dtype=dtype)
    assert {name: id(each) for name, each in model.named_parameters()} == before
    wanted = {
        name: each.to(dtype) if dtype and each.is_floating_point() else each
        for name, each in whole.items()
    }
    assert_holds(state_of(model), wanted)
    for name in ("frequencies", "noise"):  # what the construction made, also where that was random
        assert torch.equal(model.get_buffer(name), expected.get_buffer(name))
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    if how == "recorded":
        model(torch.arange(4)).sum().backward()


@pytest.mark.parametrize("meta", [False, True])
@on_ranks(4)
def test_beside_tensor_parallelism(meta, tmp_path):
    whole = TpBlock().state_dict()
    save_file(whole, tmp_path / f"{dist.get_rank()}.safetensors")
    with init_on_meta() if meta else nullcontext():
        block = TpBlock()
    load_pretrained(tp_and_fsdp(block), tmp_path / f"{dist.get_rank()}.safetensors")
    assert_holds(block.state_dict(), whole)


def test_into_a_meta_model_that_is_not_sharded(tmp_path):
    path, whole = written(tmp_path)
    model = built(3)
    load_pretrained(model, path)
    assert_holds(state_of(model), whole)
    assert torch.equal(model.noise, built(3, meta=False).noise)


def test_wrappers_are_no_part_of_names(tmp_path):
    source = TpBlock()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = nn.Module()
    model.add_module("_orig_mod", TpBlock())  # as torch.compile wraps
    assert all(name.startswith("_orig_mod.") for name in model.state_dict())
    load_pretrained(model, tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True)
    )


# ---- Hugging Face, both ways ---------------------------------------------------------------------


def llama(seed=0, tied=True):
    # not at the top: ranks would import it for every test
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=51, tie_word_embeddings=tied, **sizes))


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saved_is_read(tied, tmp_path):
    expected = llama(tied=tied)
    expected.save_pretrained(tmp_path, max_shard_size="20KB")
    with fake_world(4):  # no values travel, so a pretended world reads the right ones
        with init_on_meta():
            model = llama(seed=1, tied=tied)
        shard_model(model)
        load_pretrained(model, tmp_path)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_holds(dict(model.named_parameters()), dict(expected.named_parameters()))
        for (name, a), (_, b) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
            assert torch.equal(a, b), name
            assert name.endswith("inv_freq")


# ---- names ---------------------------------------------------------------------------------------

PATTERNS = [(r"^base\.blocks\.(\d+)\.", r"blocks.\1."), (r"^base\.", ""), ("^junk$", "narrow.bias")]


@pytest.mark.parametrize("how", ["function", "patterns", "names"])
def test_names_are_mapped(how, tmp_path):
    whole = stored(net(0))
    in_file = {f"base.{name}": tensor for name, tensor in whole.items()}
    if how == "function":
        in_file["junk"] = torch.ones(1)

        def key_map(name):
            return None if name == "junk" else name.removeprefix("base.")

    elif how == "patterns":
        in_file["junk"] = in_file.pop("base.narrow.bias")
        key_map = PATTERNS
    else:
        key_map = {f"base.{name}": name for name in whole}
    save_file(in_file, tmp_path / "a.safetensors")
    model = net(1)
    load_pretrained(model, tmp_path, key_map=key_map)
    assert_holds(state_of(model), whole)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "both"])
def test_any_name_of_a_tie_is_enough(name, tmp_path):
    whole = stored(net(0))
    weight = whole.pop("embed.weight")
    names = ["embed.weight", "head.weight"] if name == "both" else [name]
    save_file(whole | {each: weight.clone() for each in names}, tmp_path / "a.safetensors")
    model = net(1)
    assert load_pretrained(model, tmp_path) == ([], [])
    assert torch.equal(model.head.weight, weight)


@pytest.mark.parametrize("meta", [True, False])
@on_ranks(4)
def test_not_strict_leaves_the_rest_as_it_was_built(meta, tmp_path):
    path, whole = written(tmp_path)
    partial = {name: tensor for name, tensor in whole.items() if not name.startswith("blocks.0")}
    save_file(partial | {"more": torch.ones(1)}, path)
    expected, model = built(5, meta=False), sharded(built(5, meta))
    loaded = load_pretrained(model, path, strict=False)
    assert loaded == (["blocks.0.weight", "blocks.0.bias"], ["more"])
    kept = {name: expected.get_parameter(name) for name in loaded.missing_keys}
    assert_holds(state_of(model), whole | kept)


# ---- refused, with nothing changed ---------------------------------------------------------------


def snapshot(model):
    """The tensor objects of a model, and their values."""
    seen = []
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen += [id(tensor), None if local.is_meta else local.tolist()]
    return seen


@pytest.mark.parametrize("meta", [True, False])
@on_ranks(4)
def test_what_does_not_fit_changes_nothing_on_any_rank(meta, tmp_path):
    path, whole = written(tmp_path)
    model = sharded(built(1, meta))
    before = snapshot(model)
    wrong = whole | {
        "gain": torch.ones(2),
        "more": torch.ones(1),
        "narrow.bias": torch.ones(3, dtype=torch.int32),
    }
    del wrong["blocks.1.bias"]
    save_file(wrong, path)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(model, path)
    assert [line.partition(" (")[0] for line in str(caught.value).splitlines()[1:]] == [
        "- of a different shape or dtype: gain",
        "- of a different shape or dtype: narrow.bias",
        "- missing: blocks.1.bias",
        "- unexpected: more",
    ]
    assert snapshot(model) == before
    if dist.get_rank() == 1:
        save_file(whole, path)  # one rank sees other files than the rest, and they fit
    with pytest.raises(CheckpointError):
        load_pretrained(model, path)
    assert snapshot(model) == before


@on_ranks(4)
def test_a_disk_that_fails_half_way_leaves_a_meta_model_on_meta(tmp_path):
    path, _ = written(tmp_path)
    model = sharded(built(1))
    before = snapshot(model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:

            def fail(*_):
                raise OSError(5, "Input/output error")

            patch.setattr("shardkit.checkpoint.byte_ranges.staged", fail)
        with pytest.raises(CheckpointError, match="rank 2: OSError"):
            load_pretrained(model, path)
    assert snapshot(model) == before
    load_pretrained(model, path)

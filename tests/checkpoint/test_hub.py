"""The hub's own layout, read and written by ranks: what transformers fuses, splits, renames and
permutes.
"""

import copy
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from hub_nets import MODELS, TEXT, made
from memory_count import LiveStorages
from meshes import mesh_of
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import PermuteForRope, WeightConverter

from shardkit import full_state_dict, init_on_meta, shard_model
from shardkit.checkpoint import (
    byte_ranges,
    convert_checkpoint,
    load_pretrained,
    named_full_tensors,
    save_checkpoint,
    save_pretrained,
)
from shardkit.checkpoint.byte_ranges import part_of, staged
from shardkit.errors import CheckpointError, ShardkitError


def files_of(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, different
    assert wanted


def is_fused(parameter):
    return parameter.ndim == 3 and parameter.shape[1] > 1


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_reads_and_writes_what_save_pretrained_writes(name, tmp_path):
    """Into a model with values, one on meta, and one whose experts are sharded on
    their second dim.
    """
    mesh, plain = mesh_of((2,)), made(name, 1)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    plain.save_pretrained(theirs)  # of ranks the first alone writes
    dist.barrier()
    wanted = type(plain).from_pretrained(theirs).state_dict()
    assert files_of(theirs).keys() != wanted.keys()  # or this would show nothing

    model = shard_model(made(name, 2), mesh=mesh)
    with init_on_meta():
        empty = made(name, 2)
    shard_model(empty, mesh=mesh)
    across = fully_shard(
        made(name, 2), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if is_fused(p) else None
    )
    for each in (model, empty, across):
        load_pretrained(each, theirs)
        assert_equal(full_state_dict(each, rank0_only=False), wanted)

    save_pretrained(across, tmp_path / "across")
    assert_equal(files_of(tmp_path / "across"), files_of(theirs))
    before = copy.deepcopy(model.config.to_dict())
    save_pretrained(model, ours, max_shard_size=40_000)
    assert model.config.to_dict() == before
    assert_equal(files_of(ours), files_of(theirs))
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == files_of(theirs).keys()
    again, info = type(plain).from_pretrained(ours, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(again.state_dict(), wanted)


@on_ranks(2)
def test_permuted_weights_pass_through_memory_whole(tmp_path):
    """A conversion that is more than moving boxes: exact both ways; reads of the others stay
    partial.
    """
    plain = made("mixtral", 1)
    operation = PermuteForRope()
    # transformers 5.20, the newest for Python 3.10, needs to be told
    operation.permute_layer_names = ["q_proj"]
    permute = WeightConverter(["self_attn.q_proj.weight"], ["self_attn.q_proj.weight"], [operation])
    plain._weight_conversions = [permute]
    model = shard_model(made("mixtral", 1), mesh=mesh_of((2,)))
    model._weight_conversions = [permute]
    theirs = tmp_path / "theirs"
    plain.save_pretrained(theirs)
    save_pretrained(model, tmp_path / "ours")
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(files_of(theirs)[q], plain.state_dict()[q])
    assert_equal(files_of(tmp_path / "ours"), files_of(theirs))


@on_ranks(2)
def test_adapters_are_saved_as_peft_saves_them(tmp_path):
    mesh = mesh_of((2,))
    model = get_peft_model(
        made("llama", 3), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    )
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs, is_main_process=mesh.get_rank() == 0)
    shard_model(model, mesh=mesh)
    save_pretrained(model, tmp_path / "ours")
    assert_equal(files_of(tmp_path / "ours"), files_of(theirs))
    configs = [
        json.loads((path / "adapter_config.json").read_text())
        for path in (theirs, tmp_path / "ours")
    ]
    for config in configs:
        config["target_modules"].sort()  # a set in peft
    assert configs[0] == configs[1]
    loaded = PeftModel.from_pretrained(made("llama", 3), tmp_path / "ours")
    assert_equal(get_peft_model_state_dict(loaded), files_of(theirs))


@on_ranks(2)
def test_each_rank_reads_its_own_experts_alone(tmp_path):
    """Of a stacked tensor that is sharded on dim 0, no more bytes than the shard has."""
    mesh = mesh_of((2,))
    theirs = tmp_path / "theirs"
    MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=4)).save_pretrained(theirs)
    dist.barrier()
    model = shard_model(MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=4)), mesh=mesh)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            byte_ranges,
            "staged",
            lambda part, dtype: seen.append(part[0].nbytes) or staged(part, dtype),
        )
        load_pretrained(model, theirs)
    assert sum(seen) == sum(part_of(parameter)[0].nbytes for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_errors_are_the_same_on_every_rank_and_leave_what_was_there(tmp_path):
    model = shard_model(made("llama", 3), mesh=mesh_of((2,)))
    save_checkpoint(tmp_path / "checkpoint", model)
    save_pretrained(model, tmp_path / "hub")
    before = sorted(os.listdir(tmp_path / "hub"))
    plain = shard_model(nn.Sequential(nn.Linear(4, 4)), mesh=mesh_of((2,)))
    adapted = get_peft_model(made("llama", 3), LoraConfig(target_modules=["q_proj"]))
    cases = {
        "Pass the PeftModel": lambda: save_pretrained(adapted.get_base_model(), tmp_path / "new"),
        "got Sequential": lambda: save_pretrained(plain, tmp_path / "new"),
        "pass overwrite=True": lambda: save_pretrained(model, tmp_path / "hub"),
        "must not be a checkpoint": lambda: save_pretrained(
            model, tmp_path / "checkpoint", overwrite=True
        ),
        "differs from rank 0 in path": lambda: save_pretrained(
            model, tmp_path / f"new{mesh_of((2,)).get_rank()}"
        ),
    }
    for said, call in cases.items():
        with pytest.raises(CheckpointError, match=said):
            call()
    assert sorted(os.listdir(tmp_path / "hub")) == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "hub"]


@pytest.mark.parametrize("name", [*MODELS, "llama"])
@on_ranks(2)
def test_a_stream_of_hub_names_is_what_save_pretrained_writes(name, tmp_path):
    plain, theirs = made(name, 1), tmp_path / "theirs"
    plain.save_pretrained(theirs)
    dist.barrier()
    model = shard_model(made(name, 1), mesh=mesh_of((2,)))
    stream = list(named_full_tensors(model, names="hub", bucket_bytes=20_000))
    assert len(dict(stream)) == len(stream)
    assert_equal(dict(stream), files_of(theirs))
    assert all(tensor.is_contiguous() for _, tensor in stream)


@on_ranks(2)
def test_a_stream_holds_one_bucket_and_its_arguments_are_checked():
    model = shard_model(made("mixtral", 1), mesh=mesh_of((2,)))
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    with LiveStorages() as live:
        for parameter in model.parameters():
            live.see(parameter.to_local().untyped_storage())
        own = live.live
        stream = named_full_tensors(model, names="hub", bucket_bytes=20_000)
        while next(stream, None) is not None:  # which holds none that was yielded
            assert live.live - own <= max(20_000, largest) + 1_000
    assert live.peak - own <= 2 * largest + 1_000  # what is converted, and what it is converted to
    with pytest.raises(ShardkitError, match='must be "model" or "hub"'):
        next(named_full_tensors(model, names="hf"))
    with pytest.raises(ShardkitError, match="bucket_bytes must be"):
        next(named_full_tensors(model, bucket_bytes=None))
    with pytest.raises(CheckpointError, match="got Linear"):
        next(named_full_tensors(nn.Linear(2, 2), names="hub"))
    with pytest.raises(ShardkitError, match="in names"):
        next(named_full_tensors(model, names=("hub", "model")[dist.get_rank()]))


class Host(NamedTuple):
    """An engine as the trainer sees it, which answers when it has loaded a file."""

    group: dist.ProcessGroup

    def load(self, file):
        dist.broadcast_object_list([file], src=0, group=self.group)
        dist.barrier(self.group)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_vl"])
@on_ranks(4)
def test_the_pages_loop_feeds_an_engine_outside_of_the_mesh(name, tmp_path):
    """Two ranks train, and two are an engine, which gets the hub's names and tensors."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp_shard",))  # which every rank makes
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    send, put, put_in_file = [block for block in blocks if "put(bucket" in block]
    names = {"torch": torch, "dist": dist, "named_full_tensors": named_full_tensors}
    exec(send, names)
    exec(put.replace("[0, 3]", "[0, 2, 3]").replace("send(model", "()  # "), names)
    if rank == 0:
        made(name, 1).bfloat16().save_pretrained(tmp_path / "wanted")
    dist.barrier()
    if rank < 2:
        model = shard_model(made(name, 1), mesh=mesh)
        names["send"](model, names["put"], 20_000)
        exec(put_in_file, names)
        engine = Host(names["to_engine"])
        put_there = partial(names["put"], engine=engine, file=tmp_path / "bucket")
        names["send"](model, put_there, 20_000)
        return
    buckets = list(names["receive"]())
    received = {}
    for bucket in buckets:
        received |= bucket
    assert_equal(received, files_of(tmp_path / "wanted"))
    largest = max(tensor.nbytes for tensor in received.values())
    for bucket in buckets:
        assert 0 < sum(tensor.nbytes for tensor in bucket.values()) <= max(20_000, largest)
        dist.broadcast_object_list(file := [None], src=0, group=names["to_engine"])
        assert_equal(load_file(file[0]), bucket)
        dist.barrier(names["to_engine"])


# ---- one process: what is beside the weights -----------------------------------------------------


def test_a_plain_model_and_what_is_beside_it(tmp_path):
    model = made("llama", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
    save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16, overwrite=True)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "lm_head.weight" not in files_of(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert_equal(again.state_dict(), model.bfloat16().state_dict())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_save_that_is_stopped_at_any_rename_leaves_a_whole_model(stop, tmp_path, monkeypatch):
    """As a kill does, but that what is cleared at the end is cleared."""
    place, old = tmp_path / "out", made("llama", 3)
    save_pretrained(old, place, max_shard_size=1 << 12)
    (place / "tokenizer.json").write_text("{}")
    (place / "checkpoint-1").mkdir()
    (place / "checkpoint-1" / "trainer_state.json").write_text("{}")
    rename, seen = os.rename, []

    def stops(source, target):
        seen.append(target.name)
        if len(seen) == at:
            raise stop
        rename(source, target)

    for at in (1, 2):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", stops)
            with pytest.raises((KeyboardInterrupt, CheckpointError, OSError)):
                save_pretrained(made("llama", 4), place, overwrite=True)
        (name,) = os.listdir(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert_equal(again.state_dict(), old.state_dict())
        assert name == ("out" if stop is OSError or at == 1 else ".out.old")
    new = made("llama", 5)
    save_pretrained(new, place, overwrite=True)
    assert_equal(AutoModelForCausalLM.from_pretrained(place).state_dict(), new.state_dict())
    assert os.listdir(tmp_path) == ["out"]
    assert (place / "tokenizer.json").exists()
    assert (place / "checkpoint-1" / "trainer_state.json").exists()
    assert not list(place.glob("model-*"))


@pytest.mark.parametrize("strict", [True, False])
def test_float8_weights_with_scales_are_refused(strict, tmp_path):
    model = made("llama", 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {
        name: value.to(torch.float8_e4m3fn) for name, value in before.items() if "q_proj" in name
    }
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in tensors}
    save_file(
        {**before, **tensors, **scales, "lm_head.weight": torch.ones(1)},
        tmp_path / "fp8.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"8-bit weights with scales: .*q_proj\.weight"):
        load_pretrained(model, tmp_path / "fp8.safetensors", strict=strict)
    assert_equal(model.state_dict(), before)


def test_names_in_a_checkpoint_are_the_models_own(tmp_path):
    model = made("mixtral", 1)
    save_checkpoint(tmp_path / "c", model)
    other = made("mixtral", 2)
    load_pretrained(other, tmp_path / "c")
    assert_equal(other.state_dict(), model.state_dict())


def test_a_converted_file_has_every_name_of_a_tied_tensor_on_one_storage(tmp_path):
    model = made("llama", 3)
    save_checkpoint(tmp_path / "c", model)
    convert_checkpoint(tmp_path / "c", tmp_path / "c.pt")
    full = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    tied = [full["lm_head.weight"], full["model.embed_tokens.weight"]]
    assert tied[0].untyped_storage().data_ptr() == tied[1].untyped_storage().data_ptr()
    model.load_state_dict(full)

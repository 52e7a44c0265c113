"""What is special in the configurations of transformers and axolotl."""

import pytest
import torch
from small_models import Decoder

from shardkit import MeshSpec
from shardkit.errors import TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Ranks

BF16, FP16 = torch.bfloat16, torch.float16


def read(config, world=16):
    return read_config(config, Ranks(world, per_node=8))


def support(config, key):
    """Of the note on a key."""
    return next(note.support for note in read(config).notes if note.argument == key)


def axolotl(**config):
    return {"base_model": "x", **config}


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "mesh", "reshards", "wraps", "offload"),
    [
        ("shard_grad_op auto_wrap", MeshSpec.sharded(16), False, True, False),
        ("no_shard", MeshSpec.hybrid(16, 1), False, False, False),
        ("hybrid_shard auto_wrap", MeshSpec.hybrid(2, 8), True, True, False),
        (["hybrid_shard_zero2", "offload"], MeshSpec.hybrid(2, 8), False, False, True),
    ],
)
def test_the_words_of_fsdp(words, mesh, reshards, wraps, offload):
    reading = read({"fsdp": words})
    target = reading.target
    assert reading.format == "transformers"
    assert (target.mesh, target.reshard_after_forward) == (mesh, reshards)
    assert (target.wraps, target.offload) == (wraps, offload)


@pytest.mark.parametrize(
    ("fsdp", "section", "wraps", "classes"),
    [
        ("auto_wrap", {"transformer_layer_cls_to_wrap": "A"}, True, ("A",)),
        (True, {}, True, ()),  # those that the model declares
        (True, {"auto_wrap_policy": "NO_WRAP"}, False, ()),
    ],
)
def test_the_units_of_transformers(fsdp, section, wraps, classes):
    target = read({"fsdp": fsdp, "fsdp_config": section}).target
    assert (target.wraps, target.classes) == (wraps, classes)


def test_units_that_are_named_without_auto_wrap_are_not_made():
    section = {"transformer_layer_cls_to_wrap": "A", "min_num_params": 100}
    reading = read({"fsdp": "full_shard", "fsdp_config": section})
    assert not reading.target.wraps
    assert [note.support for note in reading.notes] == ["mapped", "noted", "noted", "noted"]
    assert "the whole model is unsharded at once" in reading.notes[-1].sentence


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"fsdp": "auto_wrap", "fsdp_config": {"min_num_params": 9}}, "fsdp_config.min_num_params"),
        ({"fsdp": "auto_wrap", "fsdp_min_num_params": 9}, "fsdp_min_num_params"),  # before 4.34
        (
            {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
            "fsdp_config.auto_wrap_policy",
        ),
        ({"fsdp": "hybrid_shard", "fsdp_config": {"version": 2}}, "fsdp"),
        ({"fsdp": "", "fsdp_config": {}}, "fsdp"),
        (axolotl(tiled_mlp=True), "tiled_mlp"),
        (axolotl(context_parallel={"size": 8}), "context_parallel"),
    ],
)
def test_what_is_refused(config, key):
    assert [note.argument for note in read(config).refused] == [key]


@pytest.mark.parametrize(
    ("fsdp", "section", "version"),
    [
        (True, {}, 2),
        (True, {"version": 1}, 1),
        ("full_shard", {}, 1),
        ("full_shard", {"version": 2}, 2),
    ],
)
def test_a_switch_is_version_2_and_words_are_version_1(fsdp, section, version):
    target = read({"fsdp": fsdp, "fsdp_config": section}).target
    assert (target.strategy is None) == (version == 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fsdp": "fully_shard"}, "and offload and auto_wrap, got fully_shard"),
        ({"fsdp": 3}, "fsdp must be true, or words such as full_shard auto_wrap, got 3"),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
            "sharding_strategy is FULL_SHARD, but elsewhere the strategy is SHARD_GRAD_OP",
        ),
        ({"fsdp": "full_shard", "fsdp_config": "absent.json"}, "absent.json cannot be read"),
        (
            axolotl(fsdp_version=1, fsdp_config={"version": 2}),
            "fsdp_version is 1, but fsdp_config says 2",
        ),
        (
            axolotl(fsdp_version=1, tensor_parallel_size=2),
            "sizes of axes need FSDP version 2",
        ),
    ],
)
def test_wrong_values(config, said):
    with pytest.raises(TranslationError) as error:
        read(config)
    assert said in str(error.value)


def test_fsdp_config_may_be_a_file(tmp_path):
    path = tmp_path / "fsdp_config.json"
    path.write_text('{"fsdp_offload_params": true, "zz": 1}')
    config = {"fsdp": "full_shard auto_wrap", "fsdp_config": str(path)}
    assert read(config).target.offload
    assert support(config, "fsdp_config.zz") == "unknown"


@pytest.mark.parametrize(
    ("config", "dtype"), [({"bf16": True}, BF16), ({"fp16": True}, FP16), ({"bf16": False}, None)]
)
def test_dtypes_of_training_arguments(config, dtype):
    assert read({"fsdp": True, **config}).target.dtype is dtype
    root = from_config({"fsdp": "full_shard", **config}, Decoder(), world_size=16).plan.units[-1]
    assert (root.mp_policy.param_dtype, root.mp_policy.reduce_dtype) == (dtype, dtype)


# --- axolotl --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_axolotls_prefix_is_optional(prefix):
    section = {f"{prefix}offload_params": True, f"{prefix}reshard_after_forward": False}
    target = read(axolotl(fsdp_version=2, fsdp_config=section)).target
    assert (target.offload, target.reshard_after_forward) == (True, False)
    assert not target.root_reshards


@pytest.mark.parametrize("offloads", [True, False])
def test_pinned_memory_is_version_2s_to_turn_off(offloads):
    section = {"offload_params": offloads, "cpu_offload_pin_memory": False}
    key = "fsdp_config.cpu_offload_pin_memory"
    assert support(axolotl(fsdp_version=1, fsdp_config=section), key) == "refused"
    second = axolotl(fsdp_version=2, fsdp_config=section)
    assert (support(second, key), read(second).target.pin_memory) == ("mapped", False)


def test_the_sizes_of_axolotls_axes():
    section = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    sizes = {"dp_shard_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 4}
    config = axolotl(**section, **sizes)
    assert read(config).target.mesh == MeshSpec.sharded(8)
    assert [support(config, key) for key in sizes] == ["mapped", "noted", "mapped"]


def test_axolotls_other_ranks_shard_so_their_number_must_be_known():
    config = axolotl(
        fsdp_version=2, dp_replicate_size=2, fsdp_config={"auto_wrap_policy": "NO_WRAP"}
    )
    assert read(config, 16).target.mesh == MeshSpec.hybrid(2, 8)
    with pytest.raises(TranslationError, match="number of ranks is given neither by"):
        from_config(config, Decoder())

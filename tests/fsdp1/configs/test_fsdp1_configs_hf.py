"""What is special in the configurations of transformers and axolotl."""

import pytest
import torch
from small_models import Decoder

from shardkit import MeshSpec
from shardkit.errors import TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Precision, Ranks, Wrap

BF16, FP16 = torch.bfloat16, torch.float16


def read(config, world=16, per_node=8, **options):
    return read_config(config, Ranks(world, per_node), **options)


def support(reading, key):
    return next(note.support for note in reading.notes if note.argument == key)


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "mesh", "reshard"),
    [
        ("shard_grad_op auto_wrap", MeshSpec.sharded(16), False),
        ("no_shard", MeshSpec.hybrid(16, 1), False),
        ("hybrid_shard auto_wrap", MeshSpec.hybrid(2, 8), True),
        (["hybrid_shard_zero2", "offload"], MeshSpec.hybrid(2, 8), False),
    ],
)
def test_the_words_of_fsdp(words, mesh, reshard):
    reading = read({"fsdp": words})
    target = reading.target
    assert (reading.format, target.mesh, target.reshard_after_forward) == ("transformers", mesh, reshard)
    assert target.offload == ("offload" in words)
    assert target.wrap == Wrap("declared" if "auto_wrap" in words else "root")
    assert target.strategy is not None


@pytest.mark.parametrize(
    ("config", "wrap"),
    [
        ({"fsdp": "auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "A"}}, Wrap("classes", ("A",))),
        ({"fsdp": True, "fsdp_config": {}}, Wrap("declared")),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, Wrap("root")),
    ],
)
def test_the_units_of_transformers(config, wrap):
    assert read(config).target.wrap == wrap


def test_units_by_size_are_refused_by_the_key_that_asks_for_them():
    reading = read({"fsdp": "auto_wrap", "fsdp_config": {"min_num_params": 9}})
    assert [note.argument for note in reading.notes if note.support == "refused"] == ["fsdp_config.min_num_params"]
    old = read({"fsdp": "auto_wrap", "fsdp_min_num_params": 9})  # before transformers 4.34
    assert support(old, "fsdp_min_num_params") == "refused"


def test_units_that_are_named_without_auto_wrap_are_not_made():
    section = {"transformer_layer_cls_to_wrap": "A", "min_num_params": 100}
    reading = read({"fsdp": "full_shard", "fsdp_config": section})
    assert reading.target.wrap == Wrap("root")
    assert [note.support for note in reading.notes] == ["mapped", "noted", "noted", "noted"]
    assert "the whole model is gathered at once" in reading.notes[-1].sentence


def test_a_switch_is_version_2_and_words_are_version_1():
    assert read({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}).target.strategy is None
    assert read({"fsdp": True, "fsdp_config": {"version": 1}}).target.strategy is not None
    assert read({"fsdp": "full_shard", "fsdp_config": {"version": 2}}).target.strategy is None
    assert support(read({"fsdp": "hybrid_shard", "fsdp_config": {"version": 2}}), "fsdp") == "refused"
    assert support(read({"fsdp": "", "fsdp_config": {}}), "fsdp") == "refused"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fsdp": "fully_shard"}, "and offload and auto_wrap, got fully_shard"),
        ({"fsdp": 3}, "fsdp must be true, words such as full_shard auto_wrap, or a list of them, got 3"),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
            "fsdp_config.sharding_strategy is FULL_SHARD, but elsewhere the strategy is SHARD_GRAD_OP",
        ),
        ({"fsdp": "full_shard", "fsdp_config": "absent.json"}, "absent.json cannot be read"),
    ],
)
def test_wrong_training_arguments(config, said):
    with pytest.raises(TranslationError) as error:
        read(config)
    assert said in str(error.value)


def test_fsdp_config_may_be_a_file(tmp_path):
    path = tmp_path / "fsdp_config.json"
    path.write_text('{"fsdp_offload_params": true, "zz": 1}')
    reading = read({"fsdp": "full_shard auto_wrap", "fsdp_config": str(path)})
    assert reading.target.offload
    assert support(reading, "fsdp_config.zz") == "unknown"


def test_dtypes_of_training_arguments():
    assert read({"fsdp": "full_shard", "bf16": True}).target.precision == Precision(BF16, BF16, None, BF16)
    assert read({"fsdp": True, "fsdp_config": {}, "fp16": True}).target.precision == Precision(FP16, FP16, FP16)
    assert read({"fsdp": "full_shard", "bf16": False}).target.precision == Precision()


# --- axolotl --------------------------------------------------------------------------------------------------------


def axolotl(**config):
    return {"base_model": "x", **config}


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_axolotls_prefix_is_optional(prefix):
    section = {
        f"{prefix}{key}": value for key, value in (("offload_params", True), ("state_dict_type", "FULL_STATE_DICT"))
    }
    target = read(axolotl(fsdp_version=2, fsdp_config=section | {f"{prefix}reshard_after_forward": False})).target
    assert (target.offload, target.state_dict_type, target.reshard_after_forward) == (True, "full", False)
    assert not target.root_reshards


def test_pinned_memory_is_version_2s_to_turn_off():
    section = {"offload_params": True, "cpu_offload_pin_memory": False}
    key = "fsdp_config.cpu_offload_pin_memory"
    for offloads in (True, False):
        section["offload_params"] = offloads
        with pytest.raises(TranslationError, match=r"FSDP1 always pins offloaded parameters\. Set fsdp_version: 2"):
            from_config(axolotl(fsdp_version=1, fsdp_config=section), Decoder(), world_size=16)
        reading = read(axolotl(fsdp_version=2, fsdp_config=section))
        assert (support(reading, key), reading.target.pin_memory) == ("mapped" if offloads else "noted", False)


def test_the_sizes_of_axolotls_axes():
    sizes = {"dp_shard_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 4}
    reading = read(axolotl(fsdp_version=2, fsdp_config={"reshard_after_forward": True}, **sizes))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.sharded(8), {"tp": 2, "cp": 4})
    assert [support(reading, key) for key in sizes] == ["mapped", "noted", "mapped"]
    rest = read(axolotl(fsdp_version=2, tensor_parallel_size=2, fsdp_config={"reshard_after_forward": True}))
    assert rest.target.mesh == MeshSpec.sharded(8)
    with pytest.raises(TranslationError, match="tensor_parallel_size needs FSDP version 2"):
        read(axolotl(fsdp_version=1, tensor_parallel_size=2, fsdp_config={}))


def test_axolotls_section_of_context_parallelism():
    section = {"size": 8, "backend": "auto"}
    config = {"dp_shard_size": 2, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    reading = read(axolotl(context_parallel=section, **config))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.sharded(16), {"cp": 8})
    with pytest.raises(TranslationError, match=r"context_parallel\.size is 8, but context_parallel_size is 2"):
        read(axolotl(context_parallel=section, context_parallel_size=2, **config))


def test_axolotls_tiles_are_of_mlps():
    reading = read(axolotl(tiled_mlp=True, tiled_mlp_num_shards=4, tiled_mlp_use_original_mlp=False))
    assert reading.target.tiles == 4
    assert [support(reading, f"tiled_mlp{rest}") for rest in ("", "_num_shards")] == ["mapped", "mapped"]
    assert support(reading, "tiled_mlp_use_original_mlp") == "noted"
    assert support(read(axolotl(tiled_mlp=True)), "tiled_mlp") == "refused", "its number of tiles is not in the file"
    assert read(axolotl(tiled_mlp=False, tiled_mlp_num_shards=4)).target.tiles == 1


def test_versions_that_disagree_are_an_error():
    with pytest.raises(TranslationError, match=r"fsdp_version is 1, but fsdp_config says 2"):
        read(axolotl(fsdp_version=1, fsdp_config={"version": 2}))

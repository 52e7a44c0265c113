"""What is special in the configurations of transformers, axolotl and ROLL."""

import pytest
import torch
import torch.nn as nn
from expert_net import ExpertNet
from small_models import Block, Decoder

from shardkit import MeshSpec
from shardkit.errors import PlanError, TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Precision, Ranks, Wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def read(config, world=16, per_node=8, **options):
    return read_config(config, Ranks(world, per_node), **options)


def support(reading, key):
    return next(note.support for note in reading.notes if note.argument == key)


# --- transformers ---------------------------------------------------------------------------------


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
    assert (reading.format, target.mesh, target.reshard_after_forward) == (
        "transformers",
        mesh,
        reshard,
    )
    assert target.offload == ("offload" in words)
    assert target.wrap == Wrap("declared" if "auto_wrap" in words else "root")
    assert target.strategy is not None


@pytest.mark.parametrize(
    ("config", "wrap"),
    [
        (
            {"fsdp": "auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "A"}},
            Wrap("classes", ("A",)),
        ),
        ({"fsdp": True, "fsdp_config": {}}, Wrap("declared")),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, Wrap("root")),
    ],
)
def test_the_units_of_transformers(config, wrap):
    assert read(config).target.wrap == wrap


def test_units_by_size_are_refused_by_the_key_that_asks_for_them():
    reading = read({"fsdp": "auto_wrap", "fsdp_config": {"min_num_params": 9}})
    assert [note.argument for note in reading.notes if note.support == "refused"] == [
        "fsdp_config.min_num_params"
    ]
    old = read({"fsdp": "auto_wrap", "fsdp_min_num_params": 9})  # before transformers 4.34
    assert support(old, "fsdp_min_num_params") == "refused"
    named = read(
        {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}}
    )
    assert support(named, "fsdp_config.auto_wrap_policy") == "refused"


def test_units_that_are_named_without_auto_wrap_are_not_made():
    section = {"transformer_layer_cls_to_wrap": "A", "min_num_params": 100}
    reading = read({"fsdp": "full_shard", "fsdp_config": section})
    assert reading.target.wrap == Wrap("root")
    assert [note.support for note in reading.notes] == ["mapped", "noted", "noted", "noted"]
    assert "the whole model is gathered at once" in reading.notes[-1].sentence


def test_a_switch_is_version_2_and_words_are_version_1():
    assert (
        read({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}).target.strategy
        is None
    )
    assert read({"fsdp": True, "fsdp_config": {"version": 1}}).target.strategy is not None
    assert read({"fsdp": "full_shard", "fsdp_config": {"version": 2}}).target.strategy is None
    assert (
        support(read({"fsdp": "hybrid_shard", "fsdp_config": {"version": 2}}), "fsdp") == "refused"
    )
    assert support(read({"fsdp": "", "fsdp_config": {}}), "fsdp") == "refused"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fsdp": "fully_shard"}, "and offload and auto_wrap, got fully_shard"),
        ({"fsdp": 3}, "fsdp must be true, or words such as full_shard auto_wrap, got 3"),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
            "fsdp_config.sharding_strategy is FULL_SHARD, but elsewhere the strategy is "
            "SHARD_GRAD_OP",
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
    assert read({"fsdp": "full_shard", "bf16": True}).target.precision == Precision(
        BF16, BF16, None, BF16
    )
    assert read({"fsdp": True, "fsdp_config": {}, "fp16": True}).target.precision == Precision(
        FP16, FP16, FP16
    )
    assert read({"fsdp": "full_shard", "bf16": False}).target.precision == Precision()


# --- axolotl --------------------------------------------------------------------------------------


def axolotl(**config):
    return {"base_model": "x", **config}


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_axolotls_prefix_is_optional(prefix):
    section = {
        f"{prefix}{key}": value
        for key, value in (("offload_params", True), ("state_dict_type", "FULL_STATE_DICT"))
    }
    target = read(
        axolotl(fsdp_version=2, fsdp_config=section | {f"{prefix}reshard_after_forward": False})
    ).target
    assert (target.offload, target.reshard_after_forward) == (True, False)
    assert not target.root_reshards


def test_pinned_memory_is_version_2s_to_turn_off():
    section = {"offload_params": True, "cpu_offload_pin_memory": False}
    key = "fsdp_config.cpu_offload_pin_memory"
    for offloads in (True, False):
        section["offload_params"] = offloads
        with pytest.raises(
            TranslationError, match=r"FSDP1 always pins offloaded parameters\. Set fsdp_version: 2"
        ):
            from_config(axolotl(fsdp_version=1, fsdp_config=section), Decoder(), world_size=16)
        reading = read(axolotl(fsdp_version=2, fsdp_config=section))
        assert (support(reading, key), reading.target.pin_memory) == ("mapped", False)


def test_the_sizes_of_axolotls_axes():
    sizes = {"dp_shard_size": 2, "tensor_parallel_size": 2, "context_parallel_size": 4}
    reading = read(axolotl(fsdp_version=2, fsdp_config={"reshard_after_forward": True}, **sizes))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.sharded(8), {"tp": 2, "cp": 4})
    assert [support(reading, key) for key in sizes] == ["mapped", "noted", "mapped"]
    rest = read(
        axolotl(fsdp_version=2, tensor_parallel_size=2, fsdp_config={"reshard_after_forward": True})
    )
    assert rest.target.mesh == MeshSpec.sharded(8)
    with pytest.raises(TranslationError, match="sizes of axes need FSDP version 2"):
        read(axolotl(fsdp_version=1, tensor_parallel_size=2, fsdp_config={}))


def test_axolotls_section_of_context_parallelism():
    section = {"size": 8, "backend": "auto"}
    config = {"dp_shard_size": 2, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    reading = read(axolotl(context_parallel=section, **config))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.sharded(16), {"cp": 8})
    with pytest.raises(
        TranslationError, match=r"context_parallel\.size is 8, but context_parallel_size is 2"
    ):
        read(axolotl(context_parallel=section, context_parallel_size=2, **config))


def test_axolotls_tiles_are_of_mlps():
    reading = read(
        axolotl(tiled_mlp=True, tiled_mlp_num_shards=4, tiled_mlp_use_original_mlp=False)
    )
    assert reading.target.tiles == 4
    assert [support(reading, f"tiled_mlp{rest}") for rest in ("", "_num_shards")] == [
        "mapped",
        "mapped",
    ]
    assert support(reading, "tiled_mlp_use_original_mlp") == "noted"
    assert support(read(axolotl(tiled_mlp=True)), "tiled_mlp") == "refused", (
        "its number of tiles is not in the file"
    )
    assert read(axolotl(tiled_mlp=False, tiled_mlp_num_shards=4)).target.tiles == 1


def test_versions_that_disagree_are_an_error():
    with pytest.raises(TranslationError, match=r"fsdp_version is 1, but fsdp_config says 2"):
        read(axolotl(fsdp_version=1, fsdp_config={"version": 2}))


def test_axolotls_other_ranks_shard_so_their_number_must_be_known():
    config = axolotl(
        fsdp_version=2, dp_replicate_size=2, fsdp_config={"auto_wrap_policy": "NO_WRAP"}
    )
    assert read(config, 16).target.mesh == MeshSpec.hybrid(2, 8)
    with pytest.raises(TranslationError, match="the number of ranks is given neither by"):
        from_config(config, Decoder())


# --- ROLL -----------------------------------------------------------------------------------------


def roll(role=(), **config):
    return {
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": config},
        **dict(role),
    }


@pytest.mark.parametrize(
    ("size", "mesh"),
    [(1, None), (0, None), (-1, None), (16, None), (64, None), (8, (2, 8)), (4, (4, 4))],
)
def test_rolls_fsdp_size(size, mesh):
    expected = MeshSpec.hybrid(*mesh) if mesh else MeshSpec.sharded(16)
    assert read(roll(fsdp_size=size)).target.mesh == expected
    by_devices = roll({"device_mapping": "list(range(0,16))"}, fsdp_size=size)
    assert read(by_devices, None, None).target.mesh == expected


def test_roll_may_be_the_configuration_of_a_strategy_alone():
    config = {
        "fsdp_size": 8,
        "param_dtype": "float32",
        "reshard_after_forward": False,
        "wrap_policy": {"transformer_layer_cls_to_wrap": "Block"},
    }
    whole, alone = read(roll(**config)), read(config)
    assert alone.target == whole.target
    assert alone.target.precision.param is FP32
    assert {note.support for note in alone.notes} == {"mapped"}


def test_rolls_wrong_values():
    for config, world, said in (
        (roll(fsdp_size=5), 16, "fsdp_size 5 does not divide 16 ranks"),
        (roll({"device_mapping": "gpus"}), 16, "device_mapping must be a list"),
        (roll(ep_size=3), 16, "ep_size 3 must divide the ranks that shard, 16 ranks"),
        (roll(ep_size=3), None, "an unknown number of ranks"),
    ):
        with pytest.raises(TranslationError, match=said):
            read(config, world)


def test_a_sequence_axis_shards_parameters_too():
    reading = read(roll({"model_args": {"ulysses_size": 2}}, fsdp_size=4))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.hybrid(4, 4), {"sp": 2})
    assert support(reading, "model_args.ulysses_size") == "mapped"


def test_rolls_tiles_are_of_mlps():
    reading = read(roll(apply_tiled_mlp=True))
    assert reading.target.tiles == 4
    assert read(roll(apply_tiled_mlp=False, tiled_num_shards=8)).target.tiles == 1
    with pytest.raises(
        TranslationError, match="tiles needs a class of the model that is named as an MLP"
    ):
        from_config(roll(apply_tiled_mlp=True), Decoder(), world_size=16)


def test_rolls_dtypes_are_its_defaults():
    assert read(roll()).target.precision == Precision(BF16, FP32)
    assert read(roll(param_dtype="fp16", reduce_dtype="fp16")).target.precision == Precision(
        FP16, FP16
    )


class Vision(nn.Module):
    """A vision tower of blocks beside a decoder with a head, named as transformers names them."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(*[Block() for _ in range(2)])
        self.model = Decoder()
        self.lm_head = nn.Linear(11, 5)

    def forward(self, pixels, tokens):
        return self.lm_head(self.model(tokens)) + self.visual(pixels).sum()

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.lm_head


def test_vision_blocks_take_inputs_as_they_are_and_ends_are_units():
    wrap = {"wrap_embeddings": True, "wrap_lm_output": True}
    config = roll(fsdp_size=8, wrap_policy=wrap, reshard_after_forward=True)
    plan = from_config(config, Vision(), world_size=16).plan
    casts = {unit.name: unit.mp_policy.cast_forward_inputs for unit in plan.units}
    towers = {"visual.0": False, "visual.1": False}
    blocks = dict.fromkeys(
        ("model.embed", "lm_head", *(f"model.layers.{i}" for i in range(3)), "(root)"), True
    )
    assert casts == towers | blocks
    assert all(unit.reshard_after_forward is True for unit in plan.units)


def test_experts_are_units_only_with_the_patch_that_calls_them_all():
    policy = {"transformer_layer_cls_to_wrap": "Block", "moe_experts": "Linear"}
    assert read(roll(wrap_policy=policy)).target.wrap == Wrap("classes", ("Block",))
    patched = read(roll(wrap_policy=policy, apply_expert_patch=True))
    assert patched.target.wrap == Wrap("classes", ("Block", "Linear"), skipped=("Linear",))


def test_rolls_expert_parallelism_puts_experts_on_an_axis_of_their_own():
    config = roll(
        ep_size=4, efsdp_size=2, fsdp_size=8, wrap_policy={"transformer_layer_cls_to_wrap": "Block"}
    )
    reading = read(config)
    assert reading.target.mesh == MeshSpec((2, 2, 4), ("dp_replicate", "efsdp", "ep"))
    keys = [f"strategy_args.strategy_config.{key}" for key in ("ep_size", "efsdp_size")]
    assert [support(reading, key) for key in keys] == ["mapped", "mapped"]
    plan = from_config(config, ExpertNet(), world_size=16).plan
    assert {unit.name: unit.mesh for unit in plan.units if unit.mesh} == {
        f"layers.{layer}.experts": "efsdp" for layer in range(2)
    }
    assert {plan.mesh_of(unit).shape for unit in plan.units} == {(2, 2), (2, 8)}
    with pytest.raises(PlanError, match="_experts_in_one_parameter matches no module"):
        from_config(config, nn.Sequential(Block(), Block()), world_size=16)

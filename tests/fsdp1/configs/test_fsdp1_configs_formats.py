"""What is special in the configurations of ROLL, Lightning, DeepSpeed and plain files."""

import pytest
import torch
import torch.nn as nn
from expert_net import ExpertNet
from small_models import Block, Decoder
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit import MeshSpec
from shardkit.errors import PlanError, TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Precision, Ranks, Wrap
from shardkit.fsdp1.configs.write import accelerate2, notes_on_accelerate, notes_on_script

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def read(config, world=16, per_node=8, **options):
    return read_config(config, Ranks(world, per_node), **options)


def support(reading, key):
    return next(note.support for note in reading.notes if note.argument == key)


# --- ROLL -----------------------------------------------------------------------------------------------------------


def roll(role=(), **config):
    return {"strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": config}, **dict(role)}


@pytest.mark.parametrize(
    ("size", "mesh"),
    [(1, None), (0, None), (-1, None), (16, None), (64, None), (8, (2, 8)), (2, (8, 2)), (4, (4, 4))],
)
def test_rolls_fsdp_size(size, mesh):
    expected = MeshSpec.hybrid(*mesh) if mesh else MeshSpec.sharded(16)
    assert read(roll(fsdp_size=size)).target.mesh == expected
    by_devices = roll({"device_mapping": "list(range(0,16))"}, fsdp_size=size)
    assert read(by_devices, None, None).target.mesh == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (roll(fsdp_size=5), "fsdp_size: 5 does not divide 16 ranks"),
        (roll({"device_mapping": "gpus"}), "device_mapping: 'gpus'"),
    ],
)
def test_rolls_wrong_values(config, said):
    with pytest.raises(TranslationError, match=said):
        read(config)


def test_a_sequence_axis_shards_parameters_too():
    reading = read(roll({"model_args": {"ulysses_size": 2}}, fsdp_size=4))
    assert (reading.target.mesh, reading.target.axes) == (MeshSpec.hybrid(4, 4), {"sp": 2})
    assert support(reading, "model_args.ulysses_size") == "mapped"
    assert "parallelism_config_sp_size: 2" in accelerate2(reading.target)


def test_rolls_tiles_are_of_mlps():
    reading = read(roll(apply_tiled_mlp=True))
    assert reading.target.tiles == 4
    assert read(roll(apply_tiled_mlp=False, tiled_num_shards=8)).target.tiles == 1
    for notes in (notes_on_script, notes_on_accelerate):
        assert "MLPs in 4 tiles" in [note.value for note in notes(reading.target)]
    with pytest.raises(TranslationError, match="tiles: no class of the model is named as an MLP"):
        from_config(roll(apply_tiled_mlp=True), Decoder(), world_size=16)


def test_rolls_dtypes_are_its_defaults():
    assert read(roll()).target.precision == Precision(BF16, FP32)
    assert read(roll(param_dtype="fp16", reduce_dtype="fp16")).target.precision == Precision(FP16, FP16)


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


def test_vision_blocks_take_inputs_as_they_are_and_ends_are_units():
    wrap = {"wrap_embeddings": True, "wrap_lm_output": True}
    config = roll(fsdp_size=8, wrap_policy=wrap, reshard_after_forward=True)
    plan = from_config(config, Vision(), world_size=16).plan
    casts = {unit.name: unit.mp_policy.cast_forward_inputs for unit in plan.units}
    towers = {"visual.0": False, "visual.1": False}
    blocks = dict.fromkeys(("model.embed", "lm_head", *(f"model.layers.{i}" for i in range(3)), "(root)"), True)
    assert casts == towers | blocks
    assert all(unit.reshard_after_forward is True for unit in plan.units)
    target = read(config).target
    assert [note.support for note in notes_on_script(target)] == ["noted", "refused"]


def test_experts_are_units_only_with_the_patch_that_calls_them_all():
    policy = {"transformer_layer_cls_to_wrap": "Block", "moe_experts": "Linear"}
    assert read(roll(wrap_policy=policy)).target.wrap == Wrap("classes", ("Block",))
    patched = read(roll(wrap_policy=policy, apply_expert_patch=True))
    assert patched.target.wrap == Wrap("classes", ("Block", "Linear"), skipped=("Linear",))


def test_rolls_expert_parallelism_puts_experts_on_an_axis_of_their_own():
    config = roll(ep_size=4, efsdp_size=2, fsdp_size=8, wrap_policy={"transformer_layer_cls_to_wrap": "Block"})
    reading = read(config)
    assert reading.target.mesh == MeshSpec((2, 2, 4), ("dp_replicate", "efsdp", "ep"))
    keys = [f"strategy_args.strategy_config.{key}" for key in ("ep_size", "efsdp_size")]
    assert [support(reading, key) for key in keys] == ["mapped", "mapped"]
    plan = from_config(config, ExpertNet(), world_size=16).plan
    assert {unit.name: unit.mesh for unit in plan.units if unit.mesh} == {
        f"layers.{layer}.experts": "efsdp" for layer in range(2)
    }
    assert {plan.mesh_of(unit).shape for unit in plan.units} == {(2, 2), (2, 8)}
    assert any(note.support == "refused" for note in notes_on_script(reading.target))
    assert any(note.support == "refused" for note in notes_on_accelerate(reading.target))
    with pytest.raises(PlanError, match="_experts_in_one_parameter: matches no module"):
        from_config(config, nn.Sequential(Block(), Block()), world_size=16)


@pytest.mark.parametrize(("world", "said"), [(16, "ep_size: 3 of 16 ranks"), (None, "ep_size: 3 of an unknown number")])
def test_rolls_expert_parallelism_divides_the_ranks(world, said):
    with pytest.raises(TranslationError, match=said):
        read(roll(ep_size=3), world)


# --- Lightning ------------------------------------------------------------------------------------------------------


def test_another_engine_by_name_is_refused():  # which once failed an assertion
    reading = read({"trainer": {"strategy": "fsdp_native", "devices": 8}})
    assert support(reading, "trainer.strategy") == "refused"


def lightning(**arguments):
    return read(arguments, format="lightning")


def test_lightnings_classes_are_named():
    arguments = {
        "sharding_strategy": "SHARD_GRAD_OP",
        "auto_wrap_policy": ["small_models.Block"],
        "activation_checkpointing_policy": "Block",
        "cpu_offload": True,
        "mixed_precision": {"param_dtype": "bf16", "cast_forward_inputs": True},
    }
    translation = from_config(arguments, Decoder(), world_size=4, format="lightning")
    blocks = [unit for unit in translation.plan.units if unit.name != "(root)"]
    assert [unit.name for unit in blocks] == ["layers.0", "layers.1", "layers.2"]
    assert all(unit.checkpoint_activations and unit.offloads for unit in blocks)
    assert all(unit.mp_policy.param_dtype is BF16 and unit.mp_policy.cast_forward_inputs for unit in blocks)
    assert not any(unit.reshard_after_forward for unit in translation.plan.units)


def test_lightnings_module_wrap_policy_is_read_as_a_file_writes_it():  # which was once refused as an object
    policy = {
        "class_path": "torch.distributed.fsdp.wrap.ModuleWrapPolicy",
        "init_args": {"module_classes": ["a.Block"]},
    }
    reading = lightning(auto_wrap_policy=policy, activation_checkpointing_policy=policy, sharding_strategy=1)
    assert reading.target.wrap.classes == ("Block",)
    assert reading.target.checkpoint_activations


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({Block}), {Block}, {"class_path": "ModuleWrapPolicy"}, [], 5])
def test_lightnings_policies_are_refused_as_objects_of_the_program(policy):
    assert support(lightning(auto_wrap_policy=policy, sharding_strategy=1), "auto_wrap_policy") == "refused"


@pytest.mark.parametrize(
    ("precision", "dtype", "said"),
    [("bf16-mixed", BF16, "torch.autocast"), ("16-true", FP16, "Build the model"), (32, None, "float32 throughout")],
)
def test_lightnings_precision(precision, dtype, said):
    config = {"trainer": {"strategy": "fsdp", "devices": 8, "precision": precision}}
    reading = read(config, None, None)
    assert (reading.target.precision.param, reading.target.mesh) == (dtype, MeshSpec.sharded(8))
    assert said in next(note.sentence for note in reading.notes if note.argument == "trainer.precision")


def test_lightnings_wrong_values():
    with pytest.raises(TranslationError, match=r"device_mesh: \[2, 4\] on 16 ranks"):
        lightning(device_mesh=[2, 4], sharding_strategy="HYBRID_SHARD")
    with pytest.raises(TranslationError, match="device_mesh: with FULL_SHARD"):
        lightning(device_mesh=[2, 8])
    with pytest.raises(TranslationError, match=r"trainer\.strategy: not given"):
        lightning(trainer={"devices": 8})


def test_model_parallel_is_fsdp2_on_the_nodes():
    target = lightning(save_distributed_checkpoint=True, data_parallel_size="auto").target
    assert (target.mesh, target.axes) == (MeshSpec.sharded(2), {"tensor_parallel": 8})


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


def zero(**section):
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("section", "mesh", "reshard"),
    [
        ({"stage": 0}, MeshSpec.hybrid(16, 1), False),
        ({"stage": 1}, MeshSpec.sharded(16), False),
        ({"stage": 2}, MeshSpec.sharded(16), False),
        ({"stage": 3}, MeshSpec.sharded(16), True),
        ({"stage": 3, "zero_hpz_partition_size": 8}, MeshSpec.sharded(16), 8),
        ({"stage": 3, "zero_hpz_partition_size": 16}, MeshSpec.sharded(16), True),
        ({"stage": 3, "mics_shard_size": 8}, MeshSpec.hybrid(2, 8), True),
        ({"stage": 3, "mics_shard_size": 16}, MeshSpec.sharded(16), True),
        ({"stage": 2, "mics_shard_size": 8}, MeshSpec.sharded(16), False),
    ],
)
def test_zero_stages(section, mesh, reshard):
    target = read(zero(**section)).target
    assert (target.mesh, target.reshard_after_forward) == (mesh, reshard)
    assert type(target.reshard_after_forward) is type(reshard)
    plan = from_config(zero(**section), Decoder(), world_size=16).plan
    assert (plan.mesh, plan.units[0].reshard_after_forward) == (mesh, reshard)


def test_deepspeeds_dtypes_are_of_parameters_gradients_and_buffers():
    model = nn.BatchNorm1d(4)
    config = {**zero(stage=3), "bf16": {"enabled": True}, "communication_data_type": "fp32"}
    translation = from_config(config, model, world_size=2)
    assert translation.plan.units[-1].mp_policy.reduce_dtype is FP32
    assert translation.buffer_dtypes == {"running_mean": BF16, "running_var": BF16}
    with pytest.raises(TranslationError, match="fp16: enabled, and bf16 too"):
        read({**config, "fp16": {"enabled": True}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (zero(stage=3, zero_hpz_partition_size=5), "zero_hpz_partition_size: 5 does not divide 16 ranks"),
        (zero(stage=3, mics_shard_size=5), "mics_shard_size: 5 does not divide 16 ranks"),
        # Once rounded down without a word.
        ({**zero(stage=3), "tensor_parallel": {"autotp_size": 3}}, "autotp_size: 3 does not divide 16 ranks"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_errors(config, said):
    with pytest.raises(TranslationError, match=said):
        read(config)


def test_a_switch_written_as_text_is_a_switch():
    config = {**zero(stage=3), "bf16": {"enabled": True}, "fp32_allreduce": "true"}
    assert read(config).target.precision.reduce is FP32


# --- plain ----------------------------------------------------------------------------------------------------------


def test_a_plain_file():
    reading = read(
        {"fsdp": True, "sharding_strategy": "HYBRID_SHARD", "world_size": 32, "gpus_per_node": 4}, None, None
    )
    assert (reading.format, reading.target.mesh) == ("plain", MeshSpec.hybrid(8, 4))
    assert not reading.target.sync_module_states  # FSDP1's default, where accelerate's is true
    off = read({"fsdp": False, "sharding_strategy": "FULL_SHARD"})
    assert support(off, "fsdp") == "refused"


def test_a_plain_files_mixed_precision_is_fsdp1s():
    mixed = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": True}
    wrap = {"transformer_layer_cls_to_wrap": "Block", "fsdp": True, "sharding_strategy": 1}
    plan = from_config({**wrap, "mixed_precision": mixed}, Decoder(), world_size=2).plan
    assert all(unit.mp_policy.cast_forward_inputs for unit in plan.units)
    assert {unit.mp_policy.reduce_dtype for unit in plan.units} == {FP32}
    low = {**wrap, "mixed_precision": {"param_dtype": "bf16", "keep_low_precision_grads": True}}
    assert support(read(low), "mixed_precision.keep_low_precision_grads") == "refused"

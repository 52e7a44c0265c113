"""What is special in the configurations of ROLL."""

import pytest
import torch
import torch.nn as nn
from expert_net import ExpertNet
from small_models import Block, Decoder

from shardkit import MeshSpec
from shardkit.errors import PlanError, TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Precision, Ranks, Wrap, accelerate2, notes_on_accelerate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def read(config, world=16, per_node=8, **options):
    return read_config(config, Ranks(world, per_node), **options)


def support(reading, key):
    return next(note.support for note in reading.notes if note.argument == key)


def roll(role=(), **config):
    return {"strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": config}, **dict(role)}


@pytest.mark.parametrize(
    ("size", "mesh"),
    [(1, None), (0, None), (-1, None), (16, None), (64, None), (8, (2, 8)), (4, (4, 4))],
)
def test_rolls_fsdp_size(size, mesh):
    expected = MeshSpec.hybrid(*mesh) if mesh else MeshSpec.sharded(16)
    assert read(roll(fsdp_size=size)).target.mesh == expected
    by_devices = roll({"device_mapping": "list(range(0,16))"}, fsdp_size=size)
    assert read(by_devices, None, None).target.mesh == expected


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
    assert "parallelism_config_sp_size: 2" in accelerate2(reading.target)


def test_rolls_tiles_are_of_mlps():
    reading = read(roll(apply_tiled_mlp=True))
    assert reading.target.tiles == 4
    assert read(roll(apply_tiled_mlp=False, tiled_num_shards=8)).target.tiles == 1
    assert "MLPs in 4 tiles" in [note.value for note in notes_on_accelerate(reading.target)]
    with pytest.raises(TranslationError, match="tiles needs a class of the model that is named as an MLP"):
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

    def get_output_embeddings(self):
        return self.lm_head


def test_vision_blocks_take_inputs_as_they_are_and_ends_are_units():
    wrap = {"wrap_embeddings": True, "wrap_lm_output": True}
    config = roll(fsdp_size=8, wrap_policy=wrap, reshard_after_forward=True)
    plan = from_config(config, Vision(), world_size=16).plan
    casts = {unit.name: unit.mp_policy.cast_forward_inputs for unit in plan.units}
    towers = {"visual.0": False, "visual.1": False}
    blocks = dict.fromkeys(("model.embed", "lm_head", *(f"model.layers.{i}" for i in range(3)), "(root)"), True)
    assert casts == towers | blocks
    assert all(unit.reshard_after_forward is True for unit in plan.units)
    target = read(roll(param_dtype="bf16", reduce_dtype="bf16")).target
    for model, expected in ((None, ["noted"]), (Decoder(), []), (Vision(), ["refused"])):
        assert [note.support for note in notes_on_accelerate(target, model)] == expected


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
    assert any(note.support == "refused" for note in notes_on_accelerate(reading.target))
    with pytest.raises(PlanError, match="_experts_in_one_parameter matches no module"):
        from_config(config, nn.Sequential(Block(), Block()), world_size=16)

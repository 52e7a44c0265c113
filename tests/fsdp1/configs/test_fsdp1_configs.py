"""Configuration files of other tools: what each comes to, as a target and as a plan."""

from pathlib import Path

import pytest
import torch
from small_models import Decoder

from shardkit import MeshSpec, apply_plan
from shardkit.errors import TranslationError
from shardkit.fsdp1.configs import from_config, read_config
from shardkit.fsdp1.configs.target import Ranks
from shardkit.testing import comm_counts, fake_world

FILES = sorted((Path(__file__).parent / "files").iterdir())
HYBRID = MeshSpec.hybrid(2, 8)


def read(config, world=None, per_node=None, **options):
    return read_config(config, Ranks(world, per_node), **options)


class Declaring(Decoder):
    _no_split_modules = ("Block",)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_examples_are_plans_that_can_be_applied(file):
    model = Declaring()
    translation = from_config(file, model, world_size=16, ranks_per_node=8)
    assert {note.support for note in translation.notes}.isdisjoint({"refused", "unknown"})
    plan = translation.plan
    with fake_world(plan.mesh.size):
        apply_plan(model, plan)
        with comm_counts() as counts:
            model(torch.zeros(2, 3, dtype=torch.long)).float().sum().backward()
    assert counts == plan.collectives()


# --- accelerate -----------------------------------------------------------------------------------

NAMES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
MESHES = [MeshSpec.sharded(16), MeshSpec.sharded(16), MeshSpec.hybrid(16, 1), HYBRID, HYBRID]
RESHARDS = [True, False, False, True, False]


def accelerate(**fsdp):
    section = {f"fsdp_{key}": value for key, value in fsdp.items()}
    return {
        "distributed_type": "FSDP",
        "num_processes": 16,
        "num_machines": 2,
        "fsdp_config": section,
    }


@pytest.mark.parametrize("key", ["sharding_strategy", "reshard_after_forward"])
def test_each_strategy_of_version_1_keeps_its_mesh(key):
    for number, (name, mesh, reshard) in enumerate(zip(NAMES, MESHES, RESHARDS, strict=True), 1):
        for written in (str(number), name.lower()):
            target = read(accelerate(**{key: written})).target
            assert (target.mesh, target.reshard_after_forward) == (mesh, reshard)


@pytest.mark.parametrize("value", [True, "false"])
def test_reshard_after_forward_as_a_switch_is_version_2s(value):
    """As accelerate, which raises for it in version 1."""
    config = accelerate(reshard_after_forward=value)
    with pytest.raises(TranslationError, match=r"true and false need fsdp_version: 2\), got"):
        read(config)
    config["fsdp_config"]["fsdp_version"] = 2
    assert read(config).target.reshard_after_forward is (value is True)


def test_all_wrong_values_are_said_at_once():
    config = accelerate(sharding_strategy=6, offload_params="perhaps") | {"mixed_precision": "int8"}
    with pytest.raises(TranslationError) as error:
        read(config)
    lines = str(error.value).splitlines()
    subjects = [line.partition(" ")[0] for line in lines]
    assert sorted(subjects) == [
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_sharding_strategy",
        "mixed_precision",
    ]
    assert "must be true or false, got 'perhaps'. Use true." in str(error.value)


def test_a_hybrid_strategy_needs_the_ranks_of_a_node():
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    with pytest.raises(TranslationError, match="ranks_per_node"):
        read(config, 16)
    assert read(config, 16, 4).target.mesh == MeshSpec.hybrid(4, 4)
    with pytest.raises(
        TranslationError,
        match=r"needs a known number of ranks for HYBRID_SHARD\. Pass world_size=16",
    ):
        read(config)


def test_context_parallel_ranks_shard_and_tensor_parallel_ones_do_not():
    sizes = {"dp_shard_size": 2, "cp_size": 4, "tp_size": 2}
    section = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    target = read(accelerate(version=2) | {"parallelism_config": section}).target
    assert target.mesh == MeshSpec.sharded(8)
    with pytest.raises(TranslationError, match="make 16 ranks, but there are 8"):
        read(accelerate(version=2) | {"parallelism_config": section, "num_processes": 8})


# --- Refusing, and formats ------------------------------------------------------------------------


def test_a_refused_key_raises_unless_it_is_asked_not_to():
    config = accelerate(state_dict_type="LOCAL_STATE_DICT")
    with pytest.raises(
        TranslationError, match=r"fsdp_config\.fsdp_state_dict_type LOCAL_STATE_DICT is refused"
    ):
        from_config(config, Decoder())
    translation = from_config(config, Decoder(), strict=False)
    assert [note.argument for note in translation.refused] == ["fsdp_config.fsdp_state_dict_type"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 3}}, "has none of the keys of a known format"),
        ({"distributed_type": "FSDP", "base_model": "x"}, "keys of accelerate .*, and of axolotl"),
        ({"actor_train": {"strategy_args": {}}}, "got 'ROLL'. .* to shard_model"),
    ],
)
def test_what_is_not_recognized_says_what_was_seen(config, said):
    with pytest.raises(TranslationError, match=said):
        read(config)


def test_the_format_may_be_named():
    assert read({"fsdp_config": {"fsdp_offload_params": True}}, format="axolotl").target.offload
    with pytest.raises(TranslationError, match=r"format must be one of accelerate, .*, got 'nemo'"):
        read({}, format="nemo")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "", "must be a mapping of keys to values, got NoneType"),
        ("a.json", "[1]", "got list"),
    ],
)
def test_a_file_that_holds_no_keys_is_an_error(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(TranslationError, match=said):
        read(tmp_path / name)


# --- With a model ---------------------------------------------------------------------------------


def test_a_plan_needs_the_ranks_and_classes_that_are_there():
    with pytest.raises(
        TranslationError, match=r"number of ranks is given neither by.*Pass world_size=8"
    ):
        from_config({"fsdp": "full_shard", "fsdp_config": {}}, Decoder())
    config = accelerate(auto_wrap_policy=1, transformer_layer_cls_to_wrap="LlamaDecoderLayer")
    with pytest.raises(
        TranslationError,
        match=r"names LlamaDecoderLayer, not in the model\. Its classes are Block, Decoder",
    ):
        from_config(config, Decoder())


def test_blocks_are_checkpointed_and_the_rest_is_not():
    wrap = {"auto_wrap_policy": 1, "transformer_layer_cls_to_wrap": "Block,Embedding"}
    config = accelerate(activation_checkpointing=True, **wrap)
    units = from_config(config, Decoder()).plan.units
    blocks = {f"layers.{i}" for i in range(3)}
    assert {unit.name for unit in units} == {"embed", "(root)", *blocks}
    assert {unit.name for unit in units if unit.checkpoint_activations} == blocks

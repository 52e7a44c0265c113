"""translate_fsdp1: every argument of FSDP1 ends in the plan or in a note, or in one clear error."""

import dataclasses
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from fsdp1_models import ConvNet, fsdp1
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Block, Decoder, snapshot
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from shardkit import MeshSpec
from shardkit.errors import TranslationError
from shardkit.fsdp1 import SUPPORT, translate_fsdp1
from shardkit.fsdp1.translate.notes import ROWS
from shardkit.testing import fake_world

BF16, F32 = torch.bfloat16, torch.float32
PAGE = Path(__file__).parents[3] / "docs" / "migrating-from-fsdp1.md"
BLOCKS = ModuleWrapPolicy({Block})


def notes_by_argument(translation):
    return {note.argument: note for note in translation.notes}


# The table.


def test_the_table_has_every_argument_and_field_of_fsdp1_and_so_has_the_page():
    expected = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self"}
    for name, kind in (("mixed_precision", MixedPrecision), ("cpu_offload", CPUOffload)):
        expected |= {f"{name}.{field.name}" for field in dataclasses.fields(kind)}
    assert set(ROWS) == expected | {"ranks_per_node", "world_size"}
    assert {answer.partition(": ")[0] for answer in ROWS.values()} <= SUPPORT.keys()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE))
    for name, answer in ROWS.items():
        assert rows[name] == answer.partition(": ")[0], name
    assert all(rows[strategy.name] == "mapped" for strategy in ShardingStrategy)
    methods = set(vars(FullyShardedDataParallel)) - set(vars(nn.Module))
    for name in methods | {"named_parameters", "state_dict", "load_state_dict"}:
        assert name.startswith("_") or f"`{name}`" in PAGE.read_text(), name


def test_the_arguments_are_fsdp1s_with_its_defaults():
    theirs = dict(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    ours = dict(inspect.signature(translate_fsdp1).parameters)
    assert list(ours) == ["model", *list(theirs)[2:], "ranks_per_node", "world_size"]
    assert all(ours[name].default == theirs[name].default for name in list(theirs)[2:])


# Any arguments.

DTYPES = st.sampled_from([None, BF16, torch.float16, F32])
PRECISIONS = st.builds(
    MixedPrecision,
    DTYPES,
    DTYPES,
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(nn.modules.batchnorm._BatchNorm,), (), (nn.LayerNorm, nn.Embedding)]),
)
POLICIES = st.sampled_from(
    [
        BLOCKS,
        {Block},
        functools.partial(size_based_auto_wrap_policy, min_num_params=50),
        CustomPolicy(
            lambda module: (
                {"sharding_strategy": ShardingStrategy.NO_SHARD} if type(module) is Block else False
            )
        ),
        CustomPolicy(
            lambda module: {"cpu_offload": CPUOffload(True)} if type(module) is Block else False
        ),
        "no policy",
    ]
)
STRATEGY = st.sampled_from(
    [*ShardingStrategy, "full_shard", "ShardingStrategy.NO_SHARD", 4, "5", 7, "zero"]
)
ARGUMENTS_OF = {
    "sharding_strategy": STRATEGY,
    "cpu_offload": st.sampled_from([CPUOffload(True), CPUOffload(False)]),
    "auto_wrap_policy": POLICIES,
    "backward_prefetch": st.sampled_from([None, *BackwardPrefetch]),
    "mixed_precision": PRECISIONS,
    "ignored_modules": st.sampled_from([lambda model: [model.head], nn.Module.children]),
    "param_init_fn": st.sampled_from([lambda module: module.to_empty(device="cpu")]),
    "device_id": st.sampled_from([0, torch.device("cpu"), "cuda:1"]),
    "sync_module_states": st.booleans(),
    "forward_prefetch": st.booleans(),
    "use_orig_params": st.booleans(),
    "ignored_states": st.sampled_from([lambda model: [model.head], nn.Module.parameters]),
    "ranks_per_node": st.sampled_from([1, 2, 3, 4, 0, "8"]),
    "world_size": st.sampled_from([1, 2, 6, 8, 0]),
}
GRID = st.fixed_dictionaries({}, optional=ARGUMENTS_OF)


@settings(max_examples=150, deadline=None)
@given(GRID, st.sampled_from([Decoder, lambda: Decoder(tied=True), ConvNet]))
def test_any_arguments_give_a_translation_or_its_error(drawn, build):
    model = build()
    for name in ("ignored_modules", "ignored_states"):
        if name in drawn:
            drawn[name] = drawn[name](model)
    before = snapshot(model)
    try:
        translation = translate_fsdp1(model, **drawn)
    except TranslationError:
        return
    finally:
        assert snapshot(model) == before
    translation.plan.check()
    assert_nothing_dropped(translation, drawn)


def assert_nothing_dropped(translation, given):
    """Each argument that is not FSDP1's default has a note of what became of it, and so has each
    field.
    """
    notes = notes_by_argument(translation)
    parameters = inspect.signature(translate_fsdp1).parameters
    for name, value in given.items():
        if value is not parameters[name].default and value != parameters[name].default:
            assert name in notes, name
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            if getattr(value, field.name) != field.default:
                assert f"{name}.{field.name}" in notes
    for note in notes.values():
        assert note.support in SUPPORT
        assert note.support != "refused"
        assert note.argument in ROWS
        assert note.sentence
        assert str(note) in str(translation)


# Strategies.


@pytest.mark.parametrize(
    ("strategy", "mesh", "reshards"),
    [
        ("FULL_SHARD", MeshSpec.sharded(8), True),
        ("SHARD_GRAD_OP", MeshSpec.sharded(8), False),
        ("NO_SHARD", MeshSpec.hybrid(8, 1), False),
        ("HYBRID_SHARD", MeshSpec.hybrid(2, 4), True),
        ("_HYBRID_SHARD_ZERO2", MeshSpec.hybrid(2, 4), False),
    ],
)
def test_a_strategy_in_any_form_is_a_mesh_and_resharding(strategy, mesh, reshards):
    enum, plain = ShardingStrategy[strategy], strategy.strip("_")
    forms = [enum, strategy, plain.lower(), f"ShardingStrategy.{plain}", plain.replace("_", "-")]
    for form in [*forms, enum.value]:
        arguments = {"world_size": 8, "ranks_per_node": 4, "auto_wrap_policy": BLOCKS}
        plan = translate_fsdp1(Decoder(), sharding_strategy=form, **arguments).plan
        assert (plan.mesh, plan.units[0].reshard_after_forward) == (mesh, reshards)
        assert plan.units[-1].reshard_after_forward is False  # FSDP1 keeps its root


def test_the_node_size_comes_from_torchrun_an_argument_or_an_error(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(
        TranslationError, match=r"the number of ranks per node is unknown.*ranks_per_node=8"
    ):
        translate_fsdp1(Decoder(), sharding_strategy="HYBRID_SHARD", world_size=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    plan = translate_fsdp1(Decoder(), sharding_strategy="HYBRID_SHARD", world_size=16).plan
    assert plan.mesh == MeshSpec.hybrid(4, 4)
    with pytest.raises(TranslationError, match="3 does not divide 16"):
        translate_fsdp1(
            Decoder(), sharding_strategy="HYBRID_SHARD", world_size=16, ranks_per_node=3
        )


# Settings of units.


def test_buffers_follow_the_unit_around_them():
    model = ConvNet()
    model.register_buffer("scale", torch.ones(2))
    model.stem.register_buffer("steps", torch.ones(2, dtype=torch.int64))
    model.head.register_buffer("ignored", torch.ones(2))
    translation = translate_fsdp1(
        model,
        mixed_precision=MixedPrecision(BF16, buffer_dtype=torch.float16),
        auto_wrap_policy={nn.Conv2d},
        ignored_modules=[model.head],
    )
    assert translation.buffer_dtypes == {"scale": torch.float16}  # BatchNorm keeps its statistics


def test_cpu_offload_pins_only_for_an_accelerator():
    policy = CustomPolicy(lambda module: {"cpu_offload": CPUOffload(True)})
    for arguments in ({"cpu_offload": CPUOffload(True)}, {"auto_wrap_policy": policy}):
        offload = translate_fsdp1(Decoder(), **arguments).plan.units[0].offload_policy
        assert isinstance(offload, CPUOffloadPolicy)
        assert offload.pin_memory == torch.accelerator.is_available()


def test_a_module_without_mixed_precision_casts_nothing_as_in_fsdp1():
    """Outputs are cast back for ``_module_classes_to_ignore`` only, BatchNorm as a rule."""
    policy = CustomPolicy(
        lambda module: {"mixed_precision": None} if isinstance(module, Block) else False
    )
    plan = translate_fsdp1(
        Decoder(), auto_wrap_policy=policy, mixed_precision=MixedPrecision(BF16)
    ).plan
    blocks = [unit for unit in plan.units if unit.name.startswith("layers.")]
    assert [unit.mp_policy for unit in blocks] == [MixedPrecisionPolicy()] * 3
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plan = translate_fsdp1(
        model, auto_wrap_policy={nn.Linear}, mixed_precision=MixedPrecision(BF16)
    ).plan
    policies = {unit.name: unit.mp_policy for unit in plan.units}
    assert policies["1"] == MixedPrecisionPolicy(F32, F32, output_dtype=BF16)


def test_code_broadcasts_once_the_device_is_chosen_and_a_plan_says_that_it_does_not():
    """``init_device_mesh`` makes the process group, and gives each rank its device."""
    translation = translate_fsdp1(Decoder(), sync_module_states=True, world_size=2)
    code = translation.to_python()
    steps = [
        "mesh = init_device_mesh(",
        ".to(device_type)",
        "distributed.broadcast(",
        "fully_shard(",
    ]
    assert sorted(steps, key=code.index) == steps
    plan = translation.plan.to_python()
    assert "distributed.broadcast(" not in plan
    assert "# note: the first rank's parameters and buffers are broadcast before sharding" in plan


def test_what_a_custom_policy_cannot_have_alone_is_refused():
    for own, match in (
        ({"device_id": 1}, "sets device_id for embed alone"),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "sets NO_SHARD for embed in FULL_SHARD"),
    ):
        policy = CustomPolicy(
            lambda module, own=own: own if isinstance(module, nn.Embedding) else False
        )
        with pytest.raises(TranslationError, match=match):
            translate_fsdp1(Decoder(), auto_wrap_policy=policy)


# Repairs.


def test_what_fsdp2_cannot_have_is_repaired_and_noted():
    model = Decoder(tied=True)
    model.layers[0].norm.bfloat16()
    translation = translate_fsdp1(
        model, auto_wrap_policy={nn.Embedding, nn.Linear, nn.ModuleList, Block}
    )
    units = [unit.name for unit in translation.plan.units]
    assert "[embed, head]" in units
    assert "layers" not in units
    assert notes_by_argument(translation)["auto_wrap_policy"].support == "noted"
    assert any("share a parameter" in note for note in translation.plan.notes)
    lone = translate_fsdp1(Decoder(), auto_wrap_policy={nn.ModuleList})
    assert [unit.name for unit in lone.plan.units] == ["(root)"]
    assert "layers: has no forward, so the unit around it" in lone.plan.notes[0]
    # FSDP1 has one dtype in a unit, and fails
    mixed = translate_fsdp1(model, auto_wrap_policy=BLOCKS)
    assert "layers.0.norm" in [unit.name for unit in mixed.plan.units]


def test_parameters_that_no_unit_can_have_are_replicated():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.decay = nn.Parameter(torch.ones(4, dtype=BF16))

        def forward(self, x):
            return x @ self.weight * self.decay

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.factor

    plan = translate_fsdp1(nn.Sequential(Mixer(), Scale()), auto_wrap_policy={Mixer, Scale}).plan
    assert plan.replicated == ("0.decay", "1.factor")
    assert [unit.name for unit in plan.units] == ["0", "(root)"]
    assert any("0.decay" in note and "are replicated" in note for note in plan.notes)
    assert any("1: without parameters of its own" in note for note in plan.notes)


# Errors.


def test_what_fsdp1_has_wrapped_and_evaluating_in_full_precision_are_refused(monkeypatch):
    with fake_world(2):
        model = Decoder()
        model.layers[1] = fsdp1(model.layers[1])
        with pytest.raises(TranslationError, match=r"layers.1 is wrapped by FSDP1 already"):
            translate_fsdp1(model)
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    with pytest.raises(TranslationError, match="is set, and FSDP_USE_FULL_PREC_IN_EVAL=1"):
        translate_fsdp1(Decoder(), mixed_precision=MixedPrecision(BF16))


def test_what_is_no_model_or_cannot_be_sharded_is_a_translation_error():
    scalar = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    for model, match in (
        (3, "must be a torch.nn.Module, got int"),
        (nn.ReLU(), "no parameters"),
        (scalar, "can be sharded: 0"),
    ):
        with pytest.raises(TranslationError, match=match):
            translate_fsdp1(model)

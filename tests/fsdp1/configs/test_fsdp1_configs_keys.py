"""Random configurations of every format, a target or an error and one note for each key; and what
the tables hold.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Decoder

from shardkit import PlanError
from shardkit.errors import TranslationError
from shardkit.fsdp1 import SUPPORT
from shardkit.fsdp1.configs import from_config, keys, read_config
from shardkit.fsdp1.configs.target import Ranks

TABLES = [getattr(keys, name) for name, kind in keys.__annotations__.items() if kind == "Table"]
# Keys that functions read, and keys of no format; each is drawn wherever keys are.
OTHERS = (
    "sharding_strategy reshard_after_forward auto_wrap_policy transformer_layer_cls_to_wrap "
    "min_num_params version mixed_precision num_processes bf16 fp16 fsdp_version dp_shard_size "
    "tensor_parallel_size zz q_x Qqq 0 zz.top"
)
NAMES = sorted(
    {*OTHERS.split(), *" ".join(key for table in TABLES for key in table).split()} - {"*"}
)
VALUES = st.sampled_from(
    [True, False, "true", None, 1, 2, "8", 16, "full_shard", "HYBRID_SHARD", "bf16", "no", "Block", ["Block", "Linear"],
        "TRANSFORMER_BASED_WRAP", "SHARDED_STATE_DICT", "BACKWARD_POST", {}, {"x": 1}]
)  # fmt: skip
SECTION = st.dictionaries(
    st.sampled_from([*NAMES, *(f"fsdp_{name}" for name in NAMES)]), VALUES, max_size=3
)
START = {
    "accelerate": {"num_processes": 16, "num_machines": 2},
    "transformers": {"fsdp": "full_shard auto_wrap"},
    "axolotl": {"fsdp_version": 2},
}


def leaves(config, notes, path=""):
    """The places of the keys of a configuration: those of a section, unless a note is on the
    section itself.
    """
    answered = {note.argument for note in notes}
    for key, value in config.items():
        place = f"{path}.{key}" if path else str(key)
        below = [argument for argument in answered if argument.startswith(f"{place}.")]
        if isinstance(value, dict) and value and place not in answered and below:
            yield from leaves(value, notes, place)
        else:
            yield place


@pytest.mark.parametrize("name", START)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_key_is_answered_for_once(name, data):
    config = START[name] | data.draw(SECTION) | {"fsdp_config": data.draw(SECTION)}
    ranks = Ranks(data.draw(st.sampled_from([None, 16])), data.draw(st.sampled_from([None, 8])))
    try:
        reading = read_config(config, ranks, format=name)
    except TranslationError:
        return
    arguments = [note.argument for note in reading.notes if note.argument != "units"]
    assert sorted(arguments) == sorted(leaves(config, reading.notes))
    assert all(
        note.support in SUPPORT and note.sentence.endswith((".", "?")) for note in reading.notes
    )
    try:
        translation = from_config(config, MODEL, world_size=16, ranks_per_node=8, format=name)
    except (TranslationError, PlanError):
        return
    translation.plan.check()
    assert translation.plan.mesh.size <= 16  # fewer where other axes share the ranks


@pytest.mark.parametrize("name", START)
def test_a_key_that_is_null_is_as_if_it_was_not_there(name):
    without = read_config(START[name], Ranks(16, 8), format=name)
    for key in NAMES:
        for config in ({key: None}, {"fsdp_config": {key: None}}):
            reading = read_config(config | START[name], Ranks(16, 8), format=name)
            assert reading.target == without.target, config


class Model(Decoder):
    _no_split_modules = ("Block", "Absent")


MODEL = Model()

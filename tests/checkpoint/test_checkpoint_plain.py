"""What checkpoints are made of, without ranks: plain data, checksums, the states of random generators."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.checkpoint.native import own_random_states, resume_random
from shardkit.checkpoint.source import decode, encode
from shardkit.errors import CheckpointError

# --- Plain data -----------------------------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary().map(os.fsdecode),  # with half surrogate pairs
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3])]),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.none(), st.just("$"))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
        st.lists(st.tuples(KEYS, inner), max_size=3).map(OrderedDict),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    """Equal, of equal types, bit for bit but for those of NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isnan(one) == math.isnan(other) and (one != one or str(one) == str(other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, itertools.chain(*one.items()), itertools.chain(*other.items())))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def through_json(value: object) -> object:
    encoded, tensors = encode(value, "extra")
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@settings(max_examples=300)
@given(VALUES)
@example([complex(-math.inf, -math.nan), complex(math.nan, -0.0), math.inf, -math.inf])
def test_plain_data_comes_back_exactly(value):
    assert same(through_json(value), value)


def test_tensors_are_taken_out_and_named_by_where_they_were():
    value = {"ema": [torch.ones(2), {1: torch.zeros(1), "1": torch.ones(1)}], "n": 3}
    encoded, tensors = encode(value, "extra")
    assert list(tensors) == ["extra.ema.0", "extra.ema.1.1", "extra.ema.1.1#1"]
    assert decode(encoded, tensors)["ema"][1]["1"] is value["ema"][1]["1"]
    assert through_json(defaultdict(list, a=[1])) == {"a": [1]}


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, Custom()]}, "extra.a.1 is a test_checkpoint_plain.Custom. A checkpoint holds None, bool"),
        ({"a": {"b": len}}, "extra.a.b is a builtins.builtin_function_or_method."),
        ({(1, Custom()): 2}, "extra.keys.1 is a test_checkpoint_plain.Custom."),
        ({"a": torch.empty(2, device="meta")}, "extra.a is a tensor that is sharded, sparse or on meta (Tensor)."),
    ],
)
def test_what_is_not_plain_is_refused_with_its_path(value, said):
    with pytest.raises(CheckpointError) as caught:
        encode(value, "extra")
    assert said in str(caught.value)


def test_all_that_is_refused_is_listed_and_cycles_end():
    with pytest.raises(CheckpointError) as caught:
        encode({"f": len, "g": [max]}, "extra")
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == ["extra.f", "extra.g.0"]
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="extra contains itself"):
        encode({"loop": loop}, "extra")


@pytest.mark.parametrize(
    "bad", [{"$": 1}, {"$": ["no", 1]}, {"$": ["dtype", "manual_seed"]}, {"$": ["tensor", "x"]}, {"$": ["bytes", 3]}]
)
def test_other_json_is_refused(bad):
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode([bad], {})


SCHEDULERS = torch.optim.lr_scheduler


class Halve:
    def __init__(self) -> None:
        self.base = 0.5

    def __call__(self, epoch: int) -> float:
        return self.base**epoch


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: SCHEDULERS.LambdaLR(optimizer, Halve()),
        lambda optimizer: SCHEDULERS.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: SCHEDULERS.SequentialLR(optimizer, [SCHEDULERS.LinearLR(optimizer)] * 2, milestones=[2]),
        lambda optimizer: SCHEDULERS.MultiStepLR(optimizer, [1, 4, 4]),
        lambda optimizer: SCHEDULERS.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lambda optimizer: SCHEDULERS.ReduceLROnPlateau(optimizer),
    ],
)
def test_the_state_of_torchs_schedulers_is_plain(make):
    state = make(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)).state_dict()
    assert state
    assert same(through_json(state), state)


# --- Random generators ----------------------------------------------------------------------------------------------


def draws() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def seeded(seed: int) -> dict[str, bytes]:
    random.seed(seed)
    torch.manual_seed(seed)
    return {kind: state for kind, state in own_random_states().items() if kind in ("python", "cpu")}


def test_random_generators_go_on_where_they_were_in_a_world_of_the_same_size():
    of_ranks = [seeded(seed) for seed in range(3)]
    expected = draws()  # of the last one
    saved = {kind: [each[kind] for each in of_ranks] for kind in ("python", "cpu")}
    resume_random(saved, rank=2, world_size=3)
    assert draws() == expected
    resume_random(saved, rank=0, world_size=3)
    assert draws() != expected


def test_in_another_world_ranks_differ_reproducibly_unless_all_were_the_same():
    saved = {kind: [seeded(seed)[kind] for seed in range(3)] for kind in ("python", "cpu")}

    def of_rank(rank: int, world_size: int) -> tuple[float, float]:
        resume_random(saved, rank, world_size)
        return draws()

    assert len({of_rank(rank, 2) for rank in range(2)} | {of_rank(0, 4)}) == 3
    assert of_rank(1, 2) == of_rank(1, 2)
    saved = {kind: [seeded(7)[kind]] for kind in ("python", "cpu")}  # all had it
    assert of_rank(0, 2) == of_rank(1, 2)

"""What checkpoints are made of, without ranks: plain data, checksums, the states of random
generators.
"""

import datetime
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
from trees import assert_same

from shardkit._torch.dispatch import default_generator
from shardkit.checkpoint import load_checkpoint, save, save_checkpoint
from shardkit.checkpoint.random_state import random_states, restore_random
from shardkit.checkpoint.source import pack, unpack
from shardkit.errors import CheckpointError

# --- Plain data -----------------------------------------------------------------------------------


class Strings(dict):
    pass


PAIR = namedtuple("PAIR", "a b")


KEPT = [
    *(None, True, -(1 << 70), 1.5, complex(-math.inf, -0.0), "\ud800", b"", bytearray(b"a")),
    *(torch.bfloat16, torch.uint4, torch.device("cuda", 3), torch.Size([2, 3])),
    *([1, [2.5, ()]], {"a": {None: {3}}, (1, "$"): [{}]}, frozenset({1})),
    *(Counter("aab"), OrderedDict(b=1, a=[2])),
]
REFUSED = [
    *(defaultdict(int), defaultdict(list, a=[1]), Strings(a=1), PAIR(1, 2), deque([1]), range(3)),
    *(1 << 3000, slice(1, 2), Path("a"), datetime.date(2026, 1, 1), Ellipsis, torch.Generator()),
]


def test_types_come_back_with_the_values(tmp_path):
    model, parameter = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(2))
    save_checkpoint(tmp_path / "a", model, extra=[KEPT, parameter])
    kept, loaded = load_checkpoint(tmp_path / "a", model)
    assert_same(kept, KEPT)
    assert_same(loaded, parameter)


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_types_that_would_not_come_back_are_refused(value, tmp_path):
    with pytest.raises(CheckpointError, match="extra cannot be saved"):
        save_checkpoint(tmp_path / "a", torch.nn.Linear(1, 1), extra={"v": value})
    assert not any(tmp_path.iterdir())


def holding_itself():
    loop = []
    loop.append(loop)
    return loop


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"a": [1, Custom()]},
            "extra cannot be saved, since it holds test_checkpoint_plain.Custom. A checkpoint",
        ),
        ({"a": {"b": lambda: 1}}, "extra cannot be saved, since it holds .*<lambda>"),
        ({(1, Custom()): 2}, "test_checkpoint_plain.Custom"),
        (holding_itself(), "extra cannot be saved, since it holds itself"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_class(value, said):
    with pytest.raises(CheckpointError, match=said):
        pack(value, "extra")


SCHEDULERS = torch.optim.lr_scheduler


class Halve:
    def __init__(self):
        self.base = 0.5

    def __call__(self, epoch):
        return self.base**epoch


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: SCHEDULERS.LambdaLR(optimizer, Halve()),
        lambda optimizer: SCHEDULERS.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: SCHEDULERS.SequentialLR(
            optimizer, [SCHEDULERS.LinearLR(optimizer)] * 2, milestones=[2]
        ),
        lambda optimizer: SCHEDULERS.MultiStepLR(optimizer, [1, 4, 4]),
        lambda optimizer: SCHEDULERS.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lambda optimizer: SCHEDULERS.ReduceLROnPlateau(optimizer),
    ],
)
def test_the_state_of_torchs_schedulers_is_plain(make):
    state = make(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)).state_dict()
    assert state
    assert unpack(pack(state, "scheduler")) == state


# --- Random generators ----------------------------------------------------------------------------


def draws():
    return random.random(), torch.rand(()).item()


def seeded(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    return {kind: state for kind, state in random_states().items() if kind in ("python", "cpu")}


def test_random_generators_go_on_where_they_were():
    states = seeded(3)
    expected = draws()
    restore_random(states)
    assert draws() == expected


def test_the_random_state_of_a_gpu_is_skipped_by_a_cuda_build_without_a_gpu(tmp_path):
    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    model = torch.nn.Linear(2, 2)
    states = {**random_states(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    with mock.patch.object(save, "random_states", return_value=states):
        save_checkpoint(tmp_path / "a", model)
    drawn = draws()
    with mock.patch.object(torch.accelerator, "current_accelerator", current_accelerator):
        load_checkpoint(tmp_path / "a", model)
    assert draws() == drawn


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_an_accelerator_that_has_not_started_gets_generators(name, monkeypatch):
    class NotStarted:  # as torch.cuda before its first use
        default_generators: tuple[torch.Generator, ...] = ()

        def current_device(self):
            self.default_generators = (torch.Generator(),)
            return 0

    module = NotStarted()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    generator = default_generator(torch.device(name))
    assert generator is module.default_generators[0]

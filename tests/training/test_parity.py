"""A sharded model trains as the plain one does: on every model of the zoo, and under every setting
on a few.

``plain_and_sharded`` has the rank's body, and says why no bit may differ between losses, gradients,
parameters and buffers.
"""

import itertools
from collections import Counter

import pytest
import step_settings
import torch
from cpu_ranks import on_ranks
from meshes import mesh_of
from plain_and_sharded import assert_trains_like_plain
from sent_bytes import GATHER, SentBytes
from zoo import ZOO

from benchmarks.sweeps.random_models import GOOD, drawn, outcomes
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "checkpoint": {"checkpoint_activations": True},
    "prefetch": {"prefetch": 3},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": BFLOAT16},
}
ON_4_RANKS = {
    "hsdp": {"mesh": (2, 2), "optimizer": "adamw", "steps": 3},
    "ddp-like": {"mesh": (4, 1)},
    "reshard-to-2": {"reshard_after_forward": 2},
    "checkpoint-hsdp-prefetch": {"checkpoint_activations": True, "mesh": (2, 2), "prefetch": 2},
    "bf16-hsdp-keep": {"mp_policy": BFLOAT16, "mesh": (2, 2), "reshard_after_forward": False},
}
# Tied, encoder-decoder with a shared embedding, frozen: what the settings may disturb.
VARIETY = ["nanogpt_tied", "t5", "frozen"]


@pytest.mark.parametrize("name", ZOO)
@on_ranks(2)
def test_default_rule(name):
    # Two ranks and two steps, so that each counts once; steps on local shards take less time than
    # on DTensors.
    assert_trains_like_plain(name, mesh=(2,), optimizer="adamw on local shards", steps=2)


@pytest.mark.parametrize("name", VARIETY)
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_settings(setting, name):
    assert_trains_like_plain(name, mesh=(2,), optimizer="sgd", steps=2, **SETTINGS[setting])


@pytest.mark.parametrize(
    ("setting", "name"), [*zip(ON_4_RANKS, itertools.cycle(VARIETY), strict=False)]
)
@on_ranks(4)
def test_settings_on_4_ranks(setting, name):
    assert_trains_like_plain(name, **{"optimizer": "sgd", "steps": 2} | ON_4_RANKS[setting])


def thaw_and_freeze(model, step):
    """The model was built with more of it frozen."""
    frozen = {0: model.layers[:2], 3: model.layers[1:]}
    model.requires_grad_(True)
    if step in frozen:
        frozen[step].requires_grad_(False)


@pytest.mark.parametrize(
    "options", [{}, {"mp_policy": BFLOAT16}, {"replicate": "**norm*"}], ids=str
)
@on_ranks(2)
def test_unfrozen_and_frozen_between_steps(options):
    sgd = {"mesh": (2,), "optimizer": "sgd", "steps": 4, "before_step": thaw_and_freeze}
    assert_trains_like_plain("frozen", **sgd, **options)


def train_where_settings_meet(mesh):
    """With weights in float32, and in torchao's float8 where not compiled, which takes long."""
    cells = [cell for cell in step_settings.pairs() if mesh in cell]
    assert step_settings.seen(cells) == dict.fromkeys(cells, "exact")
    pytest.importorskip("torchao")
    cells = [cell for cell in cells if cell[1] == "False"]
    assert step_settings.seen(cells, "float8") == dict.fromkeys(cells, "exact")


@on_ranks(2, timeout=600)
def test_settings_that_meet():
    train_where_settings_meet("FSDP")


@on_ranks(4, timeout=600)
def test_settings_that_meet_on_two_axes():
    train_where_settings_meet("HSDP")


@on_ranks(2)
def test_float8_weights_are_gathered_in_float8():
    pytest.importorskip("torchao")
    sent = []
    for build in (step_settings.Net, step_settings.float8_net):
        torch.manual_seed(0)
        model = shard_model(build(), mesh=mesh_of((2,)))
        with SentBytes() as counts:
            model(**step_settings.NET.batch(0)).sum().backward()
        sent.append(counts.bytes[GATHER])
    weights = sum(
        param.numel() for name, param in model.layers.named_parameters() if param.ndim == 2
    )
    # in forward and backward, one byte for four, of the half that this rank has
    assert sent[0] - sent[1] == 2 * (4 - 1) * weights / 2


# Random models.


@on_ranks(2)
def test_equal_or_refused():
    cases = drawn(12, 1)  # benchmarks/sweeps/random_cases.py draws others
    found = outcomes(cases)
    counts = Counter(each.partition(":")[0] for each in found)
    assert not [
        pair for pair in zip(found, cases, strict=True) if pair[0].partition(":")[0] not in GOOD
    ]
    assert counts["equal"] >= 4
    assert counts["refused"] >= 1

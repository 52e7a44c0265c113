"""The demo: it runs as the README says, its verdict can be no, and a failing rank fails it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks

from shardkit import demo
from shardkit.__main__ import main
from shardkit.demo import train
from shardkit.demo.train import ByteTransformer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="expectations for CPUs")


def test_the_command_of_the_readme_trains_and_verifies(monkeypatch, capfd):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["demo", "--ranks", "2", "--steps", "3"]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    for words in (
        "ShardingPlan: ",
        "layers.0 .. layers.3",
        "sharded  step 3/3",
        "plain    step 3/3",
    ):
        assert words in shown.out
    assert shown.out.count("  ok\n") == 2
    losses = [
        float(line.split()[-1]) for line in shown.out.splitlines() if line.startswith("sharded ")
    ]
    assert losses[-1] < losses[0] - 1  # it learns


@on_ranks(2)
def test_one_wrong_last_digit_of_one_weight_fails_the_demo():
    def corrupted(job):
        run = original(job)
        weight = run.weights["layers.2.linear1.weight"]
        weight[3, 5] = torch.nextafter(weight[3, 5], weight.new_tensor(1.0))
        return run

    original, codes = train.train_sharded, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "leave", codes.append)  # the rank is the pool's
        patch.setattr(train, "ByteTransformer", partial(ByteTransformer, dim=32, num_layers=3))
        patch.setattr(train, "CONTEXT", 32)
        threads = torch.get_num_threads()
        main(["demo", "--steps", "1"])  # like torchrun, the pool says which rank this is
        patch.setattr(train, "train_sharded", corrupted)
        main(["demo", "--steps", "1"])
        torch.set_num_threads(threads)
    assert codes == ([0, 1] if dist.get_rank() == 0 else [0, 0])


def test_the_command_ends_as_torchrun_does(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ended = SimpleNamespace(returncode=7)
    monkeypatch.setattr(demo.subprocess, "run", lambda command, env: ended)
    assert main(["demo", "--ranks", "2", "--steps", "1"]) == 7


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["demo", "--ranks", "0"], 2, "0 is not a positive number"),
        ([], 2, "COMMAND"),
        (
            ["demo", "--steps", "300", "--ranks", "3"],
            1,
            "--steps is 300, and gradients are summed in another order",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments, code, said, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        got = main(arguments)
    except SystemExit as stop:  # argparse's own
        got = stop.code
    assert got == code
    assert said in capsys.readouterr().err

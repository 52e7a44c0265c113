"""Ranks that disagree, and ranks that are lost, are named with the call and the line."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from disagreeing_ranks import WORLD, is_named, run
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit import ShardkitError, shard_model
from shardkit.apply.mesh import build_mesh
from shardkit.plan import MeshSpec
from shardkit.ranks import listeners, note
from shardkit.testing import distributed, fake_world
from shardkit.watching import watch, watcher
from shardkit.watching.calls import NOTHING, Seen, compose, first_difference, named, tail
from shardkit.watching.watcher import watch_script

# --- On ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "clips to less",
        "raises",
        "is late",
        "is killed",
        "is late, then is killed",
        "first is stopped",
    ],
)
def test_a_disagreement_is_named(kind, tmp_path):
    outcome = run(kind, tmp_path)
    assert is_named(kind, outcome.report), outcome.output


def test_a_script_is_watched_without_changes(tmp_path):
    outcome = run("skips a unit", tmp_path, how="script", mesh=(2, 2))
    assert is_named("skips a unit", outcome.report), outcome.output
    shown = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert re.sub(r"\d+", "N", outcome.report.splitlines()[0]) in re.sub(r"\d+", "N", shown)


def test_ranks_that_do_not_wait_are_named_too(tmp_path):
    outcome = run("skips a unit", tmp_path, how="gpu")
    assert is_named("skips a unit", outcome.report), outcome.output


def test_one_rank_reports_before_gloo_aborts_a_rank(tmp_path):
    outcome = run("skips a smaller unit", tmp_path, after=5.0, how="wait")
    assert is_named("skips a smaller unit", outcome.report), outcome.output
    assert len(outcome.logged) == 1, outcome.output


def test_all_ranks_end_with_the_report(tmp_path):
    outcome = run("clips to less", tmp_path, after=4.0, how="end")
    assert is_named("clips to less", outcome.report), outcome.output
    reported = [outcome.logged[0] in output for output in outcome.output]
    assert reported == [True] * WORLD, outcome.output


@distributed(world_size=2)
def test_ranks_that_agree_are_not_reported():
    model = shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=nn.Linear)
    before = [vars(unit)["_all_gather_comm"] for unit in shardkit._fsdp.fsdp_units(model)]
    with watch(model, after=60) as nothing:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        calls = calls_of(listeners[0].__self__)
    forward = ["all-gather of 0", "all-gather of 1"]
    backward = ["all-gather of 1", "all-gather of 0", "reduce-scatter of 1", "reduce-scatter of 0"]
    assert nothing is None
    assert calls == 3 * (forward + backward)
    assert listeners == []
    assert [vars(unit)["_all_gather_comm"] for unit in shardkit._fsdp.fsdp_units(model)] == before


@distributed(world_size=2)
def test_a_report_of_late_ranks_ends_when_they_go_on():
    model = shard_model(nn.Linear(4, 4))
    with watch(model, after=0.5):
        own = listeners[0].__self__
        until(lambda: own.report)
        assert "no rank has made a call" in own.report
        until(lambda: model(torch.ones(2, 4)) is None or agreed(not own.report))


def until(holds):
    while not holds():
        time.sleep(0.02)


def agreed(holds):
    count = torch.tensor(float(holds))
    dist.all_reduce(count)
    return count == 2


def calls_of(watching):
    return [call for call, _ in watching._calls]


@distributed(world_size=2)
def test_a_rank_whose_process_group_is_destroyed_has_left():
    model = shard_model(nn.Linear(4, 4))
    with watch(model, after=1.0), pytest.MonkeyPatch.context() as patch:
        own = listeners[0].__self__
        patch.setattr(watcher, "dist", SimpleNamespace(is_initialized=lambda: False))
        assert own._gone.wait(10.0)
        assert own.peek(dist.get_rank()).record["left"]


@distributed(world_size=4)
def test_watches_of_other_teams_and_tensor_parallel_models_run_at_once():
    # FSDP over the first axis, TP over the second
    mesh, rank = build_mesh(MeshSpec.hybrid(2, 2)), dist.get_rank()
    whole = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(
        whole, mesh[mesh.mesh_dim_names[1]], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    rows = mesh[mesh.mesh_dim_names[0]]
    shard_model(whole, mesh=rows, units=nn.Linear)
    part = shard_model(nn.Linear(4, 4), mesh=rows)
    with watch(part, after=60), watch(whole, part, after=60):
        stage, both = (listen.__self__ for listen in listeners)
        for _ in range(2):
            (whole(torch.ones(2, 4)).sum() + part(torch.ones(2, 4)).sum()).backward()
        assert (stage.ranks, both.ranks) == ([rank % 2, rank % 2 + 2], [0, 1, 2, 3])
        calls = calls_of(both)
        assert calls.count("all-gather of model 1: (root)") == len(calls_of(stage)) / 2 == 2
        assert "reduce-scatter of 0" in calls
        note("global_token_count" if rank == 3 else "full_state_dict")
        for own in (stage, both):
            for _ in range(3):
                own._poll()
                dist.barrier()
        assert ("ranks differ in call 5" in stage.report) == (rank % 2 == 1)
        assert both.report == ""  # calls of shardkit itself concern the smaller team


# --- Without ranks --------------------------------------------------------------------------------


def test_what_cannot_be_watched():
    model = nn.Linear(2, 2)
    with watch(model):  # no process group: nothing to do
        assert listeners == []
    with fake_world(2), watch(shard_model(model)):
        assert listeners == []
    with (
        pytest.raises(ShardkitError, match="after must be a positive number, got 0"),
        watch(model, after=0),
    ):
        pass
    for setting in ("soon", "30,stop", "-1"):
        with pytest.raises(ShardkitError, match="SHARDKIT_WATCH must be"):
            watch_script(model, setting)


def made(*calls, **rest):
    with_lines = [(call, f"a.py:{number}") for number, call in enumerate(calls, 1)]
    return NOTHING | tail(len(calls), with_lines) | rest


def test_the_first_difference_is_found_with_the_lines_of_its_calls():
    records = {
        0: made("a", "b", "c", line="now"),
        1: made("a", "c", line="now"),
        2: made("a", line="now"),
    }
    difference = first_difference(records)
    assert difference == (2, {0: ("b", "a.py:2"), 1: ("c", "a.py:2"), 2: None})
    assert difference.is_certain
    assert first_difference({0: records[0], 1: records[0]}) is None
    assert not first_difference({0: records[0], 2: records[2]}).is_certain
    report = compose({rank: Seen(record) for rank, record in records.items()}, difference)
    assert report.splitlines()[1:] == [
        "- rank 0: b; a.py:2; now at c; now",
        "- rank 1: c; a.py:2; now",
        "- rank 2: last call: a; now",
    ]


def test_a_rank_that_never_came_is_said():
    here = made("a", line="train.py:3: step()")
    seen = {0: Seen(here), 1: Seen(here), 2: Seen(NOTHING, 9.0, "never entered the watch")}
    text = compose(seen, None)
    assert text.startswith("watch: rank 2 never entered the watch. ")
    assert "\n- ranks 0-1: last call: a; train.py:3: step()\n" in text
    assert named([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"

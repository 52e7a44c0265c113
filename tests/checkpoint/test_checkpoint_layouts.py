"""Every layout of units is written whole and loads into others, by every function of state and
checkpoints.
"""

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from layouts import (
    LAYOUTS,
    assert_equal,
    assert_plain_values,
    built,
    kept,
    plain,
    spoiled,
    stage,
    values_of,
)
from meshes import mesh_of
from safetensors.torch import load_file

from shardkit.checkpoint import (
    convert_checkpoint,
    load_checkpoint,
    load_extras,
    save,
    save_checkpoint,
)
from shardkit.errors import CheckpointError


@on_ranks(4)
def save_and_load(root, source, targets):
    """What is loaded into differs in every element before."""
    net, optimizer = kept(LAYOUTS[source])
    assert_equal(values_of(net, optimizer), values_of(*kept(plain)))
    save_checkpoint(root / "saved", net, optimizer)
    for target in targets:
        other, stepped = spoiled(LAYOUTS[target])
        load_checkpoint(root / "saved", other, stepped)
        assert_plain_values(other, stepped, LAYOUTS[target])


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_is_written_whole_and_loads_into_others(source, tmp_path):
    """The most divided layout loads into all; the others into the next.

    All write the same tensors, which is compared, so what loads into a layout from one of them does
    from the others.
    """
    names = list(LAYOUTS)
    following = names[(names.index(source) + 1) % len(names)]
    save_and_load(tmp_path, source, names if source == "expert_parallel" else [following])
    expected = values_of(*built(plain))
    on_disk = load_file(tmp_path / "saved" / "model.safetensors")
    assert_equal(on_disk, {name: value for name, value in expected.items() if name in on_disk})
    moments = load_file(tmp_path / "saved" / "optimizer.safetensors")
    for name, value in expected.items():
        if name.endswith("/exp_avg"):
            assert torch.equal(moments[f"state.{name.replace('/', '.')}"], value)
    for path in (tmp_path / "full.pt", tmp_path / "dcp"):
        convert_checkpoint(tmp_path / "saved", path)
        net, optimizer = spoiled(plain)
        load_checkpoint(path, net, optimizer)
        assert_equal(values_of(net, optimizer), expected)


# ---- stages, which hold different models ---------------------------------------------------------


@on_ranks(4)
def test_stages_share_a_directory_and_load_into_stages_and_whole_models(tmp_path):
    expected = values_of(*built(plain))
    net, optimizer = built(stage)
    for async_ in (False, True):
        path = tmp_path / f"{async_}"
        extra = {"batches": dist.get_rank()}
        save_checkpoint(path, net, optimizer, extra=extra, async_=async_).wait()
        dist.barrier()
        other, stepped = built(stage, seed=2)
        assert load_checkpoint(path, other, stepped) == extra
        assert_equal(values_of(other, stepped), expected, some=True)
        for target in ("expert_parallel", "one_mesh"):
            other, stepped = spoiled(LAYOUTS[target])
            load_checkpoint(path, other, stepped)
            assert_plain_values(other, stepped, LAYOUTS[target])
    save_checkpoint(tmp_path / "whole", *built(LAYOUTS["expert_parallel"]))
    other, stepped = built(stage, seed=2)
    load_checkpoint(tmp_path / "whole", other, stepped)
    assert_equal(values_of(other, stepped), expected, some=True)
    other.more = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"1 missing|2 missing"):
        load_checkpoint(tmp_path / "whole", other)


@on_ranks(4)
def test_stages_with_the_same_names_are_refused(tmp_path):
    mesh = mesh_of((2, 2), "pp", "dp")
    net = torch.nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.fill_(float(mesh["pp"].get_local_rank()))
    torch.distributed.fsdp.fully_shard(net, mesh=mesh["dp"])
    with pytest.raises(
        CheckpointError, match="full on several meshes, with different values: weight"
    ):
        save_checkpoint(tmp_path / "a", net)
    save_checkpoint(
        tmp_path / "a", torch.nn.ModuleDict({f"stage{mesh['pp'].get_local_rank()}": net})
    )
    whole = torch.nn.ModuleDict({"stage0": torch.nn.Linear(4, 4), "stage1": torch.nn.Linear(4, 4)})
    load_checkpoint(tmp_path / "a", whole)
    assert [float(whole[f"stage{n}"].weight.mean()) for n in (0, 1)] == [0.0, 1.0]
    with pytest.raises(CheckpointError, match=r"1 of 4 ranks|has shape"):
        save_checkpoint(tmp_path / "b", torch.nn.Linear(3 + (dist.get_rank() > 1), 3))


@on_ranks(4)
def test_extra_is_each_ranks_own(tmp_path):
    net, _ = built(LAYOUTS["one_mesh"])
    save_checkpoint(
        tmp_path / "a", net, extra={"batches": dist.get_rank(), "x": torch.ones(dist.get_rank())}
    )
    assert load_checkpoint(tmp_path / "a", net)["batches"] == dist.get_rank()
    assert len(load_checkpoint(tmp_path / "a", net)["x"]) == dist.get_rank()
    other, _ = built(plain)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with mock.patch.object(logging.getLogger("shardkit"), "warning") as warning:
        assert load_checkpoint(tmp_path / "a", other, group=alone)["batches"] == 0
    assert [call.args[1:] for call in warning.mock_calls] == [(tmp_path / "a", 4, 1)]
    assert "load_extras" in warning.mock_calls[0].args[0]
    assert [extra["batches"] for extra in load_extras(tmp_path / "a")] == [0, 1, 2, 3]


@on_ranks(4)
def test_a_rank_that_gives_no_extra_gets_the_first_ranks(tmp_path):
    net, _ = built(LAYOUTS["one_mesh"])
    rank = dist.get_rank()
    for saved, loaded in [([3, None, None, None], [3] * 4), ([0, 1, None, 3], [0, 1, 0, 3])]:
        save_checkpoint(tmp_path / "a", net, extra=saved[rank], overwrite=True)
        assert load_checkpoint(tmp_path / "a", net) == loaded[rank]
        assert load_extras(tmp_path / "a") == loaded


def test_only_checkpoints_of_save_checkpoint_have_extras(tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load_extras(tmp_path / "a.pt")


# ---- what cannot be told from replicas, and what was lost ----------------------------------------


@on_ranks(4)
def test_experts_of_their_own_on_slices_are_refused_unless_equal(tmp_path):
    net, optimizer = built(LAYOUTS["overlapping"])
    save_checkpoint(tmp_path / "equal", net, optimizer)
    with torch.no_grad():
        net.blocks[1].experts.w.add_(mesh_of((2, 2), "efsdp", "ep")["ep"].get_local_rank())
    with pytest.raises(
        CheckpointError,
        match=r"1 tensors are full on several meshes, with different values: blocks\.1\.exp",
    ):
        save_checkpoint(tmp_path / "differ", net, optimizer)
    assert not (tmp_path / "differ").exists()


@on_ranks(4)
def test_pieces_that_nobody_writes_or_several_do_fail_the_save(tmp_path):
    net, _ = built(LAYOUTS["columns"])
    for is_first in (lambda _: dist.get_rank() != 3, lambda _: True):
        with (
            mock.patch.object(save, "is_first_replica", is_first),
            pytest.raises(CheckpointError, match="bytes were written"),
        ):
            save_checkpoint(tmp_path / "a", net)
    dist.barrier()  # rank 0 has removed what was written
    assert not any(tmp_path.iterdir())


@on_ranks(4)
def test_each_argument_that_differs_is_named_with_its_ranks(tmp_path):
    net, optimizer = built(LAYOUTS["one_mesh"])
    last = dist.get_rank() == 3
    cases = {
        r"rank 3 differs from rank 0 in keep \(2 instead of 1\)": {"keep": 2 if last else 1},
        r"rank 3 differs from rank 0 in optimizer \(false instead of true": {
            "optimizer": None if last else optimizer
        },
        r"rank 3 differs from rank 0 in async_ \(true instead of false\)": {"async_": last},
    }
    for said, given in cases.items():
        with pytest.raises(CheckpointError, match=said):
            save_checkpoint(tmp_path / "a", net, **given)
    optimizer.param_groups[0]["lr"] = 0.5 if last else 0.1
    with pytest.raises(CheckpointError, match=r"has other options in the optimizer of rank 3"):
        save_checkpoint(tmp_path / "a", net, optimizer)
    assert not any(tmp_path.iterdir())
    save_checkpoint(
        tmp_path / "a", net, extra={"only": torch.ones(3)} if not dist.get_rank() else None
    )
    with pytest.raises(
        CheckpointError, match=r"rank 3 differs from rank 0 in verify \(false instead of true\)"
    ):
        load_checkpoint(tmp_path / "a", net, verify=not last)
    assert torch.equal(load_checkpoint(tmp_path / "a", net)["only"], torch.ones(3))

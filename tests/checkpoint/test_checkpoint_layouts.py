"""Every layout of units is written whole and loads into others, by every function of state and checkpoints."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts_net import (
    LAYOUTS,
    assert_equal,
    assert_plain_values,
    built,
    full,
    kept,
    plain,
    spoiled,
    stage,
    stage_group,
    values_of,
)
from meshes import mesh_of
from safetensors.torch import load_file

from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, write
from shardkit.errors import CheckpointError
from shardkit.testing import distributed


@distributed(world_size=4, backend="gloo")
def save_and_load(root, source, targets):
    """In both formats; what is loaded into differs in every element before."""
    net, optimizer = kept(LAYOUTS[source])
    assert_equal(values_of(net, optimizer), values_of(*kept(plain)))
    for format in ("safetensors", "dcp"):
        save_checkpoint(root / format, net, optimizer, format=format)
        for target in targets if format == "safetensors" else targets[:1]:
            other, stepped = spoiled(LAYOUTS[target])
            load_checkpoint(root / format, other, stepped)
            assert_plain_values(other, stepped, LAYOUTS[target])
        if len(targets) > 1:
            other, stepped = spoiled(stage)
            load_checkpoint(root / format, other, stepped, strict=False, group=stage_group())
            assert_plain_values(other, stepped, stage)


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_is_written_whole_and_loads_into_others(source, tmp_path):
    """The most divided layout loads into all; the others into the next.

    All write the same tensors, which is compared, so what loads into a layout from one of them does from the others.
    """
    names = list(LAYOUTS)
    following = names[(names.index(source) + 1) % len(names)]
    save_and_load(tmp_path, source, names if source == "expert_parallel" else [following])
    expected = values_of(*built(plain))
    on_disk = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert_equal(on_disk, {name: value for name, value in expected.items() if name in on_disk})
    moments = load_file(tmp_path / "safetensors" / "optimizer.safetensors")
    assert_equal(
        {
            name.removeprefix("state.").replace(".exp_avg", "/exp_avg"): moments[name]
            for name in moments
            if name.endswith(".exp_avg")
        },
        expected,
        some=True,
    )
    for format in ("safetensors", "dcp") if source in ("plain", "expert_parallel") else ("dcp",):
        convert_checkpoint(tmp_path / format, tmp_path / f"{format}.pt")
        convert_checkpoint(tmp_path / format, tmp_path / f"{format}-again", to="dcp")
        for path in (tmp_path / f"{format}.pt", tmp_path / f"{format}-again"):
            net, optimizer = spoiled(plain)
            load_checkpoint(path, net, optimizer)
            assert_equal(values_of(net, optimizer), expected)


# ---- stages, which hold different models ------------------------------------------------------------------------


@distributed(world_size=4, backend="gloo")
def test_stages_save_by_themselves_and_load_into_stages_and_whole_models(tmp_path):
    expected, number = values_of(*built(plain)), mesh_of((2, 2), "pp", "dp")["pp"].get_local_rank()
    net, optimizer = built(stage)
    for format, async_ in (("safetensors", False), ("dcp", False), ("safetensors", True)):
        path = tmp_path / f"{format}-{async_}"
        with pytest.raises(CheckpointError, match=r"ranks 2, 3 differ from rank 0 in model \(.* save with group="):
            save_checkpoint(path / "all", net, format=format, async_=async_)
        group = stage_group()
        save_checkpoint(path / f"stage-{number}", net, optimizer, format=format, async_=async_, group=group).wait()
        other, stepped = built(stage, seed=2)
        load_checkpoint(path / f"stage-{number}", other, stepped, group=group)
        assert_equal(values_of(other, stepped), expected, some=True)
        dist.barrier()
        other, stepped = built(LAYOUTS["expert_parallel"], seed=2)
        for one in (0, 1):
            load_checkpoint(path / f"stage-{one}", other, strict=False)
            manifest = json.loads((path / f"stage-{one}" / "manifest.json").read_text())
            assert manifest["world_size"] == 2
        found = {name: full(value.detach()) for name, value in other.state_dict().items()}
        assert_equal(found, expected, some=True)
        assert sorted(each.name for each in path.iterdir()) == ["stage-0", "stage-1"]


# ---- what cannot be told from replicas, and what was lost -------------------------------------------------------


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@distributed(world_size=4, backend="gloo")
def test_experts_of_their_own_on_slices_are_refused_unless_equal(format, tmp_path):
    net, optimizer = built(LAYOUTS["overlapping"])
    save_checkpoint(tmp_path / "equal", net, optimizer, format=format)
    with torch.no_grad():
        net.blocks[1].experts.w.add_(mesh_of((2, 2), "efsdp", "ep")["ep"].get_local_rank())
    with pytest.raises(
        CheckpointError, match=r"1 tensors are full on several meshes, with different values: blocks\.1\.exp"
    ):
        save_checkpoint(tmp_path / "differ", net, optimizer, format=format)
    assert not (tmp_path / "differ").exists()


@distributed(world_size=4, backend="gloo")
def test_pieces_that_nobody_writes_or_several_do_fail_the_save(tmp_path):
    net, _ = built(LAYOUTS["columns"])
    lies = {"lost": lambda _: dist.get_rank() != 3, "twice": lambda _: True}
    for name in lies:
        said = r"elements written do not add up: .*blocks\.0\.up\.weight \("
        with mock.patch.object(write, "is_first_replica", lies[name]), pytest.raises(CheckpointError, match=said):
            save_checkpoint(tmp_path / name, net)
    dist.barrier()  # rank 0 has removed what was written
    assert not any(tmp_path.iterdir())


@distributed(world_size=4, backend="gloo")
def test_each_argument_that_differs_is_named_with_its_ranks(tmp_path):
    net, optimizer = built(LAYOUTS["one_mesh"])
    last = dist.get_rank() == 3
    cases = {
        r"rank 3 differs from rank 0 in keep \(2 instead of 1\)": {"keep": 2 if last else 1},
        r"rank 3 differs from rank 0 in optimizer \(state\.embed.*missing": {"optimizer": None if last else optimizer},
        r"rank 3 differs from rank 0 in async_ \(true instead of false\)": {"async_": last},
    }
    for said, given in cases.items():
        with pytest.raises(CheckpointError, match=said):
            save_checkpoint(tmp_path / "a", net, **given)
    optimizer.param_groups[0]["lr"] = 0.5 if last else 0.1
    with pytest.raises(CheckpointError, match=r"in optimizer \(param_groups: 0: lr: 0\.5 instead of 0\.1\)"):
        save_checkpoint(tmp_path / "a", net, optimizer)
    assert not any(tmp_path.iterdir())
    save_checkpoint(tmp_path / "a", net, extra={"only": torch.ones(3)} if not dist.get_rank() else None)
    with pytest.raises(CheckpointError, match=r"rank 3 differs from rank 0 in verify \(false instead of true\)"):
        load_checkpoint(tmp_path / "a", net, verify=not last)
    assert torch.equal(load_checkpoint(tmp_path / "a", net)["only"], torch.ones(3))

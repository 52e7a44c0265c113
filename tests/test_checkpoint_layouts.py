"""Every layout of units is written whole and loads into every other, by every function of state and checkpoints."""

from __future__ import annotations

import pytest
from layouts_net import LAYOUTS, assert_equal, built, plain, stage, stage_group, values_of
from safetensors.torch import load_file

from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from shardkit.testing import distributed


@distributed(world_size=4, backend="gloo")
def save_and_load_into_all(root, source):
    """In both formats; what is loaded into differs in every element before."""
    net, optimizer = built(LAYOUTS[source])
    expected = values_of(*built(plain))
    assert_equal(values_of(net, optimizer), expected)
    for format in ("safetensors", "dcp"):
        save_checkpoint(root / format, net, optimizer, format=format)
        for target in LAYOUTS if format == "safetensors" else ("expert_parallel", "columns", "plain"):
            other, stepped = built(LAYOUTS[target], seed=2)
            load_checkpoint(root / format, other, stepped)
            assert_equal(values_of(other, stepped), expected)
        other, stepped = built(stage, seed=2)
        load_checkpoint(root / format, other, stepped, strict=False, group=stage_group())
        assert_equal(values_of(other, stepped), expected, some=True)


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_is_written_whole_and_loads_into_every_other(source, tmp_path):
    save_and_load_into_all(tmp_path, source)
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
    for format in ("safetensors", "dcp"):
        convert_checkpoint(tmp_path / format, tmp_path / f"{format}.pt")
        convert_checkpoint(tmp_path / format, tmp_path / f"{format}-again", to="dcp")
        for path in (tmp_path / f"{format}.pt", tmp_path / f"{format}-again"):
            net, optimizer = built(plain, seed=2)
            load_checkpoint(path, net, optimizer)
            assert_equal(values_of(net, optimizer), expected)

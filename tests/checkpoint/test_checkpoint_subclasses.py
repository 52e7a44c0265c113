"""Checkpoints of tensor subclasses: float8 weights, as their values; others refused."""

import pytest
import torch
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trees import assert_same

from shardkit import init_on_meta, materialize, shard_model
from shardkit.checkpoint import load_checkpoint, load_pretrained, save_checkpoint
from shardkit.errors import CheckpointError
from shardkit.state import full_state_dict
from shardkit.testing import fake_world

pytest.importorskip("torchao", reason="tensor subclasses as people have them")


def build(kind, seed=0, mesh=True):
    """Linears of 129 rows where shards may be uneven, so that blocks fit one rank and not the
    other.
    """
    torch.manual_seed(seed)
    width, rows = (256, 256) if kind == "nf4" else (192, 129)
    net = nn.Sequential(nn.Linear(width, rows), nn.ReLU(), nn.Linear(rows, 512))
    _CONVERT[kind](net)
    if mesh:
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh_of((2,)))
        fully_shard(net, mesh=mesh_of((2,)))
    return net


def to_float8(net):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    )


def to_nf4(net):
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 256), requires_grad=False)


_CONVERT = {"plain": lambda net: None, "float8": to_float8, "nf4": to_nf4}


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parts(tensor):
    """Class and inner tensors of what this rank has, copied."""
    tensor = local(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor.clone()}
    names = tensor.__tensor_flatten__()[0]
    return {
        "class": type(tensor).__name__,
        **{name: getattr(tensor, name).clone() for name in names},
    }


def weights(net):
    return {name: parts(tensor) for name, tensor in net.state_dict().items()}


@on_ranks(2)
def test_float8_weights_come_back_bit_for_bit(tmp_path):
    net, other = build("float8"), build("float8", seed=1)
    saved = weights(net)
    assert all("class" in saved[name] for name in ("0.weight", "2.weight"))
    save_checkpoint(tmp_path / "c", net)
    kept = dict(other.named_parameters())
    load_checkpoint(tmp_path / "c", other)
    assert_same(weights(other), saved)
    assert all(param is kept[name] for name, param in other.named_parameters())


@on_ranks(2)
def test_quantized_weights_are_refused_by_name_and_what_trains_is_saved(tmp_path):
    net = build("nf4")
    with pytest.raises(
        CheckpointError, match=r"of a subclass: 0\.weight \(\w+\), 2\.weight.*trainable_only=True"
    ):
        save_checkpoint(tmp_path / "c", net)
    assert not (tmp_path / "c").exists()
    save_checkpoint(tmp_path / "c", net, trainable_only=True)
    other = build("nf4", seed=1)
    load_checkpoint(tmp_path / "c", other)
    assert_same(local(other[0].bias), local(net[0].bias))
    plain = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 512))
    save_checkpoint(tmp_path / "plain", plain)
    with pytest.raises(CheckpointError, match=r"of a subclass: 0\.weight"):
        load_checkpoint(tmp_path / "plain", other)


@on_ranks(2)
def test_float8_weights_are_plain_in_the_file(tmp_path):
    from safetensors.torch import load_file

    net = build("float8")
    save_checkpoint(tmp_path / "c", net)
    found = load_file(tmp_path / "c" / "model.safetensors")
    plain = build("plain")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in plain.state_dict().items()
    }
    load_checkpoint(tmp_path / "c", plain)
    assert_same(
        {name: {"": w.get("_tensor", w.get(""))} for name, w in weights(net).items()},
        weights(plain),
    )
    for dtype in (None, torch.bfloat16):
        other = build("float8", seed=1)
        load_pretrained(other, tmp_path / "c", dtype=dtype)
        assert_same(weights(other), weights(net.to(dtype) if dtype else net))


# of torchao
@pytest.mark.filterwarnings("ignore:The argument .device. of Tensor.is_pinned:DeprecationWarning")
@pytest.mark.parametrize("way", ["recorded", "load_pretrained"])
def test_float8_weights_from_meta_stay_what_they_are(way, tmp_path):
    expected = build("float8", mesh=False)
    save_checkpoint(tmp_path / "c", expected)
    torch.manual_seed(0)
    with fake_world(2):
        with init_on_meta() if way == "recorded" else torch.device("meta"):
            net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512))
            to_float8(net)
        for module in (net[0], net[2], net):
            fully_shard(module)
        if way == "load_pretrained":
            load_pretrained(net, tmp_path / "c")
        else:
            materialize(net)
        for name, weight in weights(net).items():
            whole = parts(expected.state_dict()[name])
            assert weight.keys() == whole.keys()
            assert weight.get("class") == whole.get("class")
            for key in weight.keys() - {"class"}:
                assert torch.equal(weight[key], whole[key][: len(weight[key])])


# Weights that need their scales.


class Adapted(nn.Module):
    """A quantized base that is frozen, and an adapter that trains."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, nn.Linear(64, 8)


def quantized(kind, seed=0):
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    base = (
        bnb.nn.Linear4bit(64, 64)
        if kind == "4bit"
        else bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    )
    return Adapted(base.requires_grad_(False)).to("cpu")


@on_ranks(2)
def saves_by_shard_model(kind, folder):
    model = quantized(kind)
    plain = model.state_dict()
    shard_model(model, mesh=mesh_of((2,)))
    assert_same(dict(full_state_dict(model, rank0_only=False)), dict(plain))
    save_checkpoint(folder / "c", model)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_with_its_scales_in_the_state_a_weight_is_saved_and_loads(kind, tmp_path):
    saves_by_shard_model(kind, tmp_path)
    saved, fresh = quantized(kind), quantized(kind)
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    load_checkpoint(tmp_path / "c", fresh)
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))

"""Features that were built apart, in whole training programs on two or four ranks, against one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import Decoder
from fused_net import (
    CLOSE,
    FUSED,
    READS,
    Plain,
    assert_close,
    assert_equal,
    batch,
    finish,
    gradients,
    local_adam,
    on_meta,
    plain_start,
    state_of,
    summed_loss,
    train,
)
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardkit import (
    accumulate,
    init_on_meta,
    load_checkpoint,
    load_pretrained,
    materialize,
    reset_after_error,
    save_checkpoint,
    shard_model,
)
from shardkit.grads import set_reduce_precision
from shardkit.testing import distributed


@distributed(world_size=4, backend="gloo")
def test_from_meta_over_an_asynchronous_save_to_another_mesh(tmp_path):
    plain = Plain(flags=FUSED)
    model = on_meta(checkpoint_activations=True)
    materialize(model)
    run = model, *local_adam(model, FUSED)
    norms = train(*run, range(2), keep_unsharded=True)
    handle = save_checkpoint(tmp_path / "step-2", *run, extra={"step": 2}, async_=True)
    norms += train(*run, range(2, 4))
    handle.wait()
    end = state_of(*run[:2])
    torch.testing.assert_close(norms, plain.train(range(4)), **CLOSE)
    assert_close(end, plain)

    again = on_meta(reshard_after_forward=False)
    materialize(again, seed=1)
    resumed = again, *local_adam(again, FUSED)
    assert load_checkpoint(tmp_path / "step-2", *resumed) == {"step": 2}
    train(*resumed, range(2, 4))
    assert_equal(state_of(*resumed[:2]), end)  # whatever is gathered when, the arithmetic is the same

    other = on_meta((2, 2))
    load_pretrained(other, tmp_path / "step-2")
    elsewhere = other, *local_adam(other, FUSED)
    assert load_checkpoint(tmp_path / "step-2", *elsewhere) == {"step": 2}
    train(*elsewhere, range(2, 4), shard_gradients=True)
    assert_close(state_of(*elsewhere[:2]), plain)


@pytest.mark.parametrize("keep", [None, True])
@distributed(world_size=2, backend="gloo")
def test_state_is_read_between_two_micro_batches(tmp_path, keep):
    """It is that of before the step, and the step ends as if nothing had been read."""
    plain = Plain()
    model = on_meta(reshard_after_forward=False if keep is None else None)
    materialize(model)
    run = model, *local_adam(model)
    train(*run, range(1))
    for step, read in enumerate(READS.values(), 1):
        before = state_of(*run[:2])

        def look(micro: int, before: Any = before, read: Any = read) -> None:
            if micro == 1:
                found = read(model, run[1], tmp_path)
                assert_equal(found, {name: before[name] for name in found})

        gradients(model, step, after=look, keep_unsharded=keep)
        finish(*run)
    plain.train(range(1 + len(READS)))
    assert_close(state_of(*run[:2]), plain)


class OutOfMemoryError(RuntimeError):
    pass


def one_backward(model: nn.Module, step: int) -> None:
    summed_loss(model, *batch(step, 0, dist.get_rank())).backward()


@pytest.mark.parametrize("options", [{"keep_unsharded": True}, {"shard_gradients": True}, {}], ids=str)
@distributed(world_size=2, backend="gloo")
def test_an_error_while_accumulating_then_a_step_and_a_checkpoint(tmp_path, options):
    plain = Plain()
    model = on_meta()
    materialize(model)
    run = model, *local_adam(model)
    train(*run, range(1), **options)

    def fails(*_: Any) -> None:
        raise OutOfMemoryError

    def fails_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fails)

    for hook in (fails, fails_in_backward):
        with accumulate(model, last=False, **options):
            one_backward(model, 7)
        handle = model.layers[1].register_forward_hook(hook)
        with pytest.raises(OutOfMemoryError), accumulate(model, last=True, **options):
            one_backward(model, 8)
        handle.remove()
        reset_after_error(model)
    norms = train(*run, range(1, 2), **options)
    save_checkpoint(tmp_path / "c", *run)
    norms += train(*run, range(2, 3), **options)
    torch.testing.assert_close(norms, plain.train(range(3))[1:], **CLOSE)
    assert_close(state_of(*run[:2]), plain)
    load_checkpoint(tmp_path / "c", *run)
    assert torch.equal(train(*run, range(2, 3), **options)[0], norms[1])


@distributed(world_size=4, backend="gloo")
def test_sixteen_bits_on_the_wire_with_accumulation_offload_and_a_checkpoint(tmp_path):
    def start(narrow: bool) -> tuple[Any, ...]:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        offload = CPUOffloadPolicy(pin_memory=False)
        with init_on_meta():
            model = Decoder()
        shard_model(model, mesh=mesh_of((2, 2)), mp_policy=policy, offload_policy=offload)
        if narrow:
            set_reduce_precision(model)
        materialize(model)
        return model, *local_adam(model)

    run, wide = start(True), start(False)
    train(*run, range(2), shard_gradients=True)
    save_checkpoint(tmp_path / "c", *run)
    train(*run, range(2, 3), shard_gradients=True)
    train(*wide, range(3), shard_gradients=True)
    end, expected = state_of(*run[:2]), state_of(*wide[:2])
    for name, value in expected.items():  # sums of 4 float32 terms in another order
        torch.testing.assert_close(end[name], value, rtol=1e-4, atol=1e-6)
    resumed = start(True)
    load_checkpoint(tmp_path / "c", *resumed)
    train(*resumed, range(2, 3), shard_gradients=True)
    assert_equal(state_of(*resumed[:2]), end)
    assert not torch.equal(end["embed.weight"], plain_start()["embed.weight"].float())

"""Every public function on a pretended accelerator: values as on the CPU, everything where it
belongs, no host sync.

Two ranks of their own, for torch gives a process the device for good.
"""

import copy
import itertools
import warnings
from functools import partial
from unittest import mock

import pretend_streams
import pytest
import torch
import torch.distributed as dist
from memory_count import held
from pretend import pretend_accelerator
from pretend_cases import (
    STARTS,
    Block,
    adamw,
    check_same,
    devices,
    loss_of,
    made,
    mesh_on,
    net,
    plain,
    sharded,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardkit
from shardkit.fsdp1 import CPUOffload, FullStateDictConfig, StateDictType
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.memory import estimate
from shardkit.state import asleep, sleep, wake
from shardkit.testing import RankPool

OFFLOADED = {
    "pinned": CPUOffloadPolicy(pin_memory=True),
    "pageable": CPUOffloadPolicy(pin_memory=False),
}
SETTINGS = {
    "plain": {},
    "replicas": {"shape": (2, 1), "sync_module_states": True},
    "pinned": {"offload_policy": OFFLOADED["pinned"]},
    "pageable": {"offload_policy": OFFLOADED["pageable"]},
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "recompute and prefetch": {"checkpoint_activations": True, "prefetch": 1},
    "kept": {"reshard_after_forward": False},
    "scalars and offload": {
        "build": partial(net, scalar=True),
        "offload_policy": OFFLOADED["pinned"],
    },
}


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=180) as pool:
        yield pool


def on_cpu(settings):
    """The same settings where there is no accelerator to pin memory for."""
    pinned = settings.get("offload_policy") is not None
    return {**settings, "offload_policy": OFFLOADED["pageable"]} if pinned else settings


def steps(model, device, optimizer, count=2):
    results = []
    for step in range(count):
        loss = loss_of(model, device, step)
        loss.backward()
        norm = shardkit.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss, norm))
    return results


# ---- shard_model ---------------------------------------------------------------------------------


def check_settings(name):
    settings = SETTINGS[name]
    home = "cpu" if "offload_policy" in settings else "pretend"
    with pretend_accelerator():
        first = None
        for start in STARTS if name in ("plain", "pinned") else ("device",):
            model = sharded(start, "pretend", **settings)
            case = f"{name} from {start}"
            check_places(model, home, case)
            optimizer = adamw(model.parameters())
            results = steps(model, "pretend", optimizer)
            assert devices(each for pair in results for each in pair) == {"pretend"}, case
            check_places(model, home, case)
            end = [
                results,
                *(dict(named) for named in (model.named_parameters(), model.named_buffers())),
            ]
            first = first or plain(end)
            check_same(end, first, case)
        reference = sharded("cpu", "cpu", **on_cpu(settings))
        results = steps(reference, "cpu", adamw(reference.parameters()))
        if "mp_policy" not in settings:  # bfloat16 rounds more than one bound for float32 can say
            end = [
                results,
                *(
                    dict(named)
                    for named in (reference.named_parameters(), reference.named_buffers())
                ),
            ]
            check_same(first, end, name, exactly=False)


def check_places(model, home, case, pinned=True):
    """Shards at home, what is whole and the buffers on the device."""
    shards = [param for param in model.parameters() if isinstance(param, DTensor)]
    assert devices(shards) == {home}, case
    if home == "cpu" and pinned:
        found = {shard.to_local().is_pinned() for shard in shards}
        assert found == {not case.startswith("pageable")}, case
    assert devices(param for param in model.parameters() if not isinstance(param, DTensor)) <= {
        "pretend"
    }, case
    assert devices(model.buffers()) == {"pretend"}, case


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(ranks, name):
    ranks.run(check_settings, name)


# ---- what works on a sharded model ---------------------------------------------------------------

ADAMW = {
    "default": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def trained(options, **settings):
    model = sharded("cpu", "pretend", **settings)
    optimizer = adamw(model.parameters(), **options)
    steps(model, "pretend", optimizer, 1)
    return model, optimizer


def check_optimizers(name, folder):
    """Where state lies after a step, and after each way to load it; and that training goes on as it
    would have.
    """
    options = ADAMW[name]
    for settings in ({}, {"offload_policy": OFFLOADED["pinned"]}):
        if name == "capturable" and settings:
            continue  # torch: "capturable=True" needs parameters on the accelerator
        home = "cpu" if settings else "pretend"
        counts = "cpu" if name == "default" else home
        with pretend_accelerator():
            model, optimizer = trained(options, **settings)
            full = shardkit.full_optimizer_state_dict(model, optimizer)
            assert devices(
                each for state in full.get("state", {}).values() for each in state.values()
            ) <= {"cpu"}
            path = f"{folder}/{home}"
            shardkit.checkpoint.save_checkpoint(path, model=model, optimizer=optimizer)
            weights = copy.deepcopy(dict(model.named_parameters()))
            expected = steps(model, "pretend", optimizer, 1)
            for way in ("full", "checkpoint"):
                other = sharded("cpu", "pretend", **settings)
                fresh = adamw(other.parameters(), **options)
                if way == "checkpoint":
                    shardkit.checkpoint.load_checkpoint(path, model=other, optimizer=fresh)
                else:
                    with torch.no_grad():
                        for fqn, param in other.named_parameters():
                            param.copy_(weights[fqn])
                    shardkit.load_full_optimizer_state_dict(other, fresh, full)
                case = f"{name}, {home}, {way}"
                assert devices(state["step"] for state in fresh.state.values()) == {counts}, case
                assert devices(state["exp_avg"] for state in fresh.state.values()) == {home}, case
                check_same(steps(other, "pretend", fresh, 1), expected, case)


@pytest.mark.parametrize("name", ADAMW)
def test_optimizer_state_lies_where_a_step_needs_it(ranks, name, tmp_path):
    ranks.run(check_optimizers, name, str(tmp_path))


def check_steps():
    for name, options in ADAMW.items():
        with pretend_accelerator():
            model, optimizer = trained(options)
            expected = steps(model, "pretend", optimizer, 2)
            other, local = trained(options)
            shardkit.step_on_local_shards(local)
            check_same(steps(other, "pretend", local, 2), expected, name)
            last = sharded("cpu", "pretend")
            stepper = shardkit.optimizer_in_backward(last, partial(adamw, **options))
            loss_of(last, "pretend").backward()
            stepper.step()
            kept = devices(each for state in stepper.state.values() for each in state.values())
            assert kept == ({"pretend"} if options else {"cpu", "pretend"}), name


def check_steps_in_backward_of_offloaded_gradients():
    """torch 2.11 and 2.12 call a gradient's hook while its copy to pinned memory is under way."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pretend_accelerator():
        after = sharded("cpu", "pretend", offload_policy=OFFLOADED["pinned"])
        within = sharded("cpu", "pretend", offload_policy=OFFLOADED["pinned"])
        start = copy.deepcopy(plain(list(after.parameters())))
        optimizer = sgd(after.parameters())
        stepper = shardkit.optimizer_in_backward(within, sgd)
        loss_of(after, "pretend").backward()
        optimizer.step()
        loss_of(within, "pretend").backward()
        stepper.step()
        end = plain(list(after.parameters()))
        assert not all(map(torch.equal, start, end))
        assert all(map(torch.equal, plain(list(within.parameters())), end))


def check_host_syncs():
    with pretend_accelerator() as accelerator:
        model, optimizer = trained({}, build=partial(net, scalar=True))
        shardkit.step_on_local_shards(optimizer)
        tokens = torch.zeros(4, 5, dtype=torch.long).to("pretend")
        counted = torch.ones((), device="pretend") * 20
        for _ in range(3):
            accelerator.syncs.clear()
            shardkit.scale_loss(model(tokens).sum(), counted, model).backward()
            shardkit.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.syncs == []
        loss_of(model, "pretend").item()
        assert accelerator.syncs[-1] == "item"  # that they are counted
        offloaded, _ = trained({}, offload_policy=OFFLOADED["pinned"])
        accelerator.syncs.clear()
        offloaded(tokens).sum().backward()
        # FSDP2 waits for gradients on their way to the CPU
        assert set(accelerator.syncs) == {"event"}
        accelerator.syncs.clear()
        shardkit.clip_grad_norm_(offloaded, 0.5)
        # one norm, one factor
        assert sorted(accelerator.syncs) == ["copy to the device", "copy to the host"]


def check_states(folder):
    for settings in ({}, {"offload_policy": OFFLOADED["pinned"]}):
        home = "cpu" if settings else "pretend"
        with pretend_accelerator():
            model, optimizer = trained({}, **settings)
            buffers = {name for name, _ in model.named_buffers()}
            full = shardkit.full_state_dict(model)
            assert devices(full.values()) <= {"cpu"}
            pieces = shardkit.state.sharded_state_dict(model)
            assert devices(each for name, each in pieces.items() if name not in buffers) == {home}
            saved = shardkit.checkpoint.save_checkpoint(
                f"{folder}/{home}", model=model, async_=True
            )
            saved.wait()
            for start, way in itertools.product(("cpu", "meta"), ("full", "file")):
                other = made(start, "pretend")
                shardkit.shard_model(other, mesh=mesh_on("pretend"), **settings)
                if way == "full":
                    shardkit.load_full_state_dict(other, full, src="rank0")
                else:
                    shardkit.checkpoint.load_pretrained(other, f"{folder}/{home}")
                check_places(other, home, "loaded", pinned=False)
                check_same(
                    dict(other.named_parameters()),
                    dict(model.named_parameters()),
                    (home, start, way),
                )
                loss_of(other, "pretend").backward()
            with shardkit.full_params(model):
                assert devices(model.parameters()) == {home}
            found = held(model, optimizer)
            on_device = [found[name] for name in ("parameters", "optimizer")]
            # also where parameters are offloaded
            stays = sum(buffer.nbytes for buffer in model.buffers())
            if settings:
                assert (on_device, found["on the CPU"] > 2 * stays) == ([stays, 0], True)
            else:
                # their steps
                assert (min(on_device) > stays, found["on the CPU"]) == (
                    True,
                    4 * len(optimizer.state),
                )


def test_state_in_memory_and_on_disk(ranks, tmp_path):
    ranks.run(check_states, str(tmp_path))


def check_averages():
    with pretend_accelerator() as accelerator:
        model = sharded("cpu", "pretend")
        for decay in (0.9, None):
            average = shardkit.sharded_average(model, decay)
            accelerator.syncs.clear()
            for _ in range(3):
                average.update_parameters(model)
            assert accelerator.syncs == []


def check_first_operation():
    """NCCL's first operation in a group must be made by all of its ranks, on the mesh's device."""
    for place in ("pretend", "cpu"):
        with (
            pretend_accelerator(),
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
        ):
            model = sharded("cpu", place)
            all_reduce.reset_mock()
            shardkit.full_state_dict(model)
            where = {call.args[0].device.type for call in all_reduce.call_args_list}
            assert where == {"cpu", place}


def check_gradients():
    with pretend_accelerator() as accelerator:
        model, optimizer = trained({})
        scaler = shardkit.GradScaler()
        tokens = shardkit.global_token_count(20, model)
        assert devices([tokens]) == {"pretend"}
        scaler.scale(shardkit.scale_loss(loss_of(model, "pretend"), tokens, model)).backward()
        scaler.unscale_(optimizer)
        shardkit.scale_grads_(tokens, model)
        accelerator.syncs.clear()
        assert torch.equal(shardkit.global_token_count(20, model).cpu(), tokens.cpu())
        accelerator.syncs.clear()
        shardkit.global_token_count(20, model)
        shardkit.scale_grads_(20, model)
        assert accelerator.syncs == []
        assert devices([shardkit.clip_grad_norm_(model, 1.0)]) == {"pretend"}
        scaler.step(optimizer)
        scaler.update()
        shardkit.zero_grad(model)
        for last in (False, True):
            with shardkit.accumulate(model, last=last):
                loss_of(model, "pretend").backward()
        assert devices(param.grad for param in model.parameters()) == {"pretend"}
        shardkit.zero_grad(model)
        with torch.inference_mode():
            loss_of(model, "pretend")
        loss_of(model, "pretend").backward()
        assert devices(param.grad for param in model.parameters()) == {"pretend"}


def check_sleep():
    with pretend_accelerator() as accelerator:
        model = sharded("cpu", "pretend")
        optimizer = adamw(model.parameters())
        for _ in range(2):
            loss_of(model, "pretend").backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, "pretend")  # the root stays gathered
        report = held(model, optimizer)
        before = plain(list(model.parameters()))
        for _ in range(2):
            accelerator.syncs.clear()
            sleep(model, optimizer)
            assert accelerator.syncs == ["device"]
            assert sum(held(model, optimizer)[name] for name in ("parameters", "optimizer")) == 0
            assert held(model, optimizer)["unsharded"] == 0
            for sleeper in asleep._sleepers.values():
                for _, copies in sleeper.moved:
                    assert all(block.is_pinned() for block in copies)
            accelerator.syncs.clear()
            wake(model, optimizer)
            assert accelerator.syncs == []
        check_same(list(model.parameters()), before, "awake")
        event = pretend_streams.Event()
        model.set_post_optim_event(event)
        sleep(model)
        wake(model)
        with mock.patch.object(pretend_streams.Stream, "wait_event") as wait_event:
            loss_of(model, "pretend")
        assert wait_event.called
        assert mock.call(event) not in wait_event.call_args_list, "it is older than wake()'s copies"
        offloaded = sharded("cpu", "pretend", offload_policy=OFFLOADED["pinned"])
        sleep(offloaded)
        assert held(offloaded)["on the CPU"] == report["parameters"] - 8, "what is offloaded stays"


def check_tensor_parallel_plans():
    """In a dry run too tensor parallelism moves inputs to its mesh's device, and DTensors draw."""

    def build():
        return nn.Sequential(nn.Embedding(10, 8), nn.Dropout(0.1), nn.Linear(8, 10))

    layers = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1)),
    }
    with pretend_accelerator():
        mesh = init_device_mesh("pretend", (1, 2), mesh_dim_names=("dp", "tp"))
        model, tokens = made("meta", "pretend", build), torch.zeros(2, 4, dtype=torch.long)
        parallelize_module(model, mesh["tp"], layers)
        before = torch.get_device_module("pretend").get_rng_state()
        plan = shardkit.plan_model(model, mesh=mesh["dp"], example_batch=tokens)
        first = estimate(model, plan, batch=tokens)["ZeRO-3"].timeline[0]
        assert first.parameters == plan.held_bytes() == 4 * (80 + 80 + 10) // 2
        assert torch.equal(torch.get_device_module("pretend").get_rng_state(), before)


@pytest.mark.parametrize(
    "check",
    [
        check_steps,
        check_steps_in_backward_of_offloaded_gradients,
        check_host_syncs,
        check_averages,
        check_first_operation,
        check_gradients,
        check_sleep,
        check_tensor_parallel_plans,
    ],
)
def test_what_needs_no_files(ranks, check):
    ranks.run(check)


def check_drop_in(given):
    with pretend_accelerator(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device_id = torch.device(given) if isinstance(given, str) else given
        model = FSDP(made("cpu", "pretend"), device_id=device_id, sync_module_states=True)
        home = "cpu" if given == "cpu" else "pretend"
        loss_of(model, home).backward()
        assert devices(model.parameters()) == devices(model.buffers()) == {home}
        assert devices([model.clip_grad_norm_(1.0)]) == {home}
        adamw(model.parameters()).step()
        with FSDP.summon_full_params(model):
            assert devices(model.parameters()) == {home}
        with FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
            assert devices(model.parameters()) == {"cpu"}
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
        ):
            assert devices(model.state_dict().values()) == {"cpu"}


def check_penalty(offloads):
    """What autograd adds to a reduced gradient waits for the reduction's stream, and for a gradient
    on its way to the CPU.
    """
    with pretend_accelerator(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(
            made("cpu", "pretend"),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            cpu_offload=CPUOffload(offload_params=offloads),
            device_id=0,
        )
        loss_of(model, "pretend").backward()
        once = plain([param.grad.clone() for param in model.parameters()])
        seen = []

        def note(what, param, grad=None):
            seen.append((what, id(param)))

        penalty = torch.zeros((), device="pretend")
        for param in model.parameters():
            penalty = penalty + 0.5 * param.square().sum().to("pretend")
            param.register_post_accumulate_grad_hook(partial(note, "reduced"))
            param.register_hook(partial(note, "added", param))
        with mock.patch.object(pretend_streams.Stream, "wait_event") as wait_event:
            wait_event.side_effect = lambda event: seen.append("waited")
            (loss_of(model, "pretend") + penalty).backward()
        for name, param in model.named_parameters():
            if ".1." in f".{name}":  # the first block, which is reduced last
                after = seen[seen.index(("reduced", id(param))) :]
                assert "waited" in after[: after.index(("added", id(param)))], name
        twice = plain([param.grad for param in model.parameters()])
        for param, first, both in zip(plain(list(model.parameters())), once, twice, strict=True):
            torch.testing.assert_close(both, 2 * first + param)


@pytest.mark.parametrize("offloads", [False, True])
def test_drop_in_with_a_penalty(ranks, offloads):
    ranks.run(check_penalty, offloads)


@pytest.mark.parametrize("given", [0, None, "cpu"])
def test_drop_in(ranks, given):
    ranks.run(check_drop_in, given)

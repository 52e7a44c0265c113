"""From nothing to the first step: seconds and peak memory of a rank, by shardkit, torch's own ways,
and accelerate.

Run: ``python -m benchmarks.start [--model 1B] [--rounds 3] [--only NAME]``; ``--write`` puts the
tables into ``benchmarks/results/`` after each round. Needs transformers, safetensors, accelerate,
and for the 1B 12 GB of memory and 6 GB of disk; ``0.5B`` is a 1B of 4 layers.

Each side runs in new processes: 2 gloo ranks of one thread, with all imports done. Sides take turns
in rounds; a number is the fastest round's. Seconds are those of the slowest rank, CPU seconds of
both ranks together. Memory is anonymous (not mapped files), the most of either rank beyond what it
had after its imports, sampled by the parent each 5 ms. The model is transformers' Llama in
bfloat16, with the embedding tied; the step is forward, backward and SGD on 4 tokens. Files were
just written, so they come from the page cache. The first losses of all sides that load must be
equal, which is checked.

accelerate shards on accelerators only: its ``Accelerator`` is told that this is FSDP, and the rest
is its own code.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import apply_plan, init_on_meta, materialize, plan_model
from shardkit.checkpoint import load_pretrained
from shardkit.testing import RankPool

RANKS, TOKENS = 2, 4
STAGES = ("build", "plan", "shard", "values", "first step")
SHAPES = {
    "0.2B": (2048, 8192, 2, 32, 8, 32000),
    "0.5B": (2048, 8192, 4, 32, 8, 128256),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 100),
}
RESULTS = Path(__file__).parent / "results" / "start_cpu_202611.md"
MIB = 2**20


@dataclass
class Clock:
    """What each stage of a side took on this rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the body; all ranks begin together."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu[stage] = time.process_time() - cpu
        self.seconds[stage] = time.perf_counter() - start


def config_of(model: str) -> Any:
    """The config of a Llama of that size."""
    from benchmarks.scale.published import llama

    config = llama(*SHAPES[model], tied=True)
    config.dtype = torch.bfloat16
    return config


def built(model: str) -> Any:
    """The model, by its ordinary construction."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config_of(model), dtype=torch.bfloat16)


def pretrained(folder: Path) -> Any:
    """The model, from its files."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "hub", dtype=torch.bfloat16)


# The sides: each builds, shards and fills a model, and tells the clock.


def shardkit_init(model: str, folder: Path, clock: Clock) -> nn.Module:
    """The values of ordinary construction, bit for bit."""
    module = _shardkit(model, clock)
    with clock("values"):
        return materialize(module)


def shardkit_load(model: str, folder: Path, clock: Clock) -> nn.Module:
    """The same files."""
    module = _shardkit(model, clock)
    with clock("values"):
        load_pretrained(module, folder / "hub")
    return module


def _shardkit(model: str, clock: Clock) -> nn.Module:
    with clock("build"), init_on_meta():
        module: nn.Module = built(model)
    with clock("plan"):
        plan = plan_model(module)
    with clock("shard"):
        return apply_plan(module, plan)


def torch_plain_init(model: str, folder: Path, clock: Clock) -> nn.Module:
    """Each rank builds the whole model."""
    with clock("build"):
        module = built(model)
    return _by_hand(module, clock)


def torch_plain_load(model: str, folder: Path, clock: Clock) -> nn.Module:
    """Each rank loads the whole model."""
    with clock("values"):
        module = pretrained(folder)
    return _by_hand(module, clock)


def torch_meta_init(model: str, folder: Path, clock: Clock) -> nn.Module:
    """torch's guide: meta, ``to_empty``, and the model's own initializers on shards, whose values
    are others.
    """
    module = _on_meta(model, clock)
    with clock("values"):
        _emptied(module, model)
        module.apply(module._init_weights)
    return module


def torch_broadcast(model: str, folder: Path, clock: Clock) -> nn.Module:
    """Rank 0 loads the whole model and broadcasts it, one tensor after the other."""
    module = _on_meta(model, clock)
    with clock("values"):
        state = pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
        _emptied(module, model)
        set_model_state_dict(
            module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
    return module


def torch_dcp(model: str, folder: Path, clock: Clock) -> nn.Module:
    """From torch's distributed checkpoint, of which each rank reads its parts."""
    module = _on_meta(model, clock)
    with clock("values"):
        _emptied(module, model)
        dcp.load(dict(module.named_parameters()), checkpoint_id=folder / "dcp")
    return module


def accelerate_load(model: str, folder: Path, clock: Clock) -> nn.Module:
    """``cpu_ram_efficient_loading``: rank 0 loads the whole model, and
    ``prepare`` broadcasts it.
    """
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2"
    )
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    wrap = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    }
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True, **wrap)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    with clock("values"):
        module = pretrained(folder)
    with clock("shard"):
        module, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-4))
    return module  # type: ignore[no-any-return]


def _by_hand(module: Any, clock: Clock) -> nn.Module:
    with clock("shard"):
        for block in module.model.layers:
            fully_shard(block)
        return fully_shard(module)


def _on_meta(model: str, clock: Clock) -> Any:
    with clock("build"), torch.device("meta"):
        module = built(model)
    return _by_hand(module, clock)


def _emptied(module: Any, model: str) -> None:
    """Memory without values, and the rotary embedding's buffer, which is in no checkpoint."""
    module.to_empty(device="cpu")
    module.model.rotary_emb = type(module.model.rotary_emb)(config_of(model))


Side = Callable[[str, Path, Clock], nn.Module]
INITIALIZE: dict[str, Side] = {
    "shardkit: init_on_meta, materialize": shardkit_init,
    "torch: build whole, fully_shard": torch_plain_init,
    "torch: meta, to_empty, initializers": torch_meta_init,
}
LOAD: dict[str, Side] = {
    "shardkit: init_on_meta, load_pretrained": shardkit_load,
    "torch: from_pretrained whole, fully_shard": torch_plain_load,
    "torch: meta, rank 0 loads and broadcasts": torch_broadcast,
    "torch: meta, to_empty, DCP": torch_dcp,
    "accelerate: cpu_ram_efficient_loading": accelerate_load,
}
SIDES = INITIALIZE | LOAD
TABLES = {"initialize": INITIALIZE, "load": LOAD}


# In the ranks.


def prepared(name: str) -> int:
    """Import all that a side needs; return the process."""
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401

    if name.startswith("accelerate"):
        import accelerate  # noqa: F401
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return os.getpid()


_started: list[tuple[Clock, nn.Module]] = []  # between the two calls of a rank


def started(name: str, model: str, folder: Path) -> None:
    """Run a side until its first step could begin."""
    clock = Clock()
    module = SIDES[name](model, folder, clock)
    assert all(isinstance(param, DTensor) and not param.is_meta for param in module.parameters())
    _started.append((clock, module))


def stepped() -> tuple[Clock, float]:
    """Run the first step; what all of it took, and the loss."""
    clock, module = _started.pop()
    module.train()
    ids = torch.arange(TOKENS)[None] % 97
    with clock("first step"):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=1e-4, foreach=False).step()
    return clock, loss.item()


def saved(model: str, folder: Path) -> None:
    """Write the checkpoints that sides load: rank 0 the hub's layout, all ranks torch's."""
    torch.manual_seed(0)
    module = built(model)
    if dist.get_rank() == 0:
        module.save_pretrained(folder / "hub")
    dcp.save(dict(module.named_parameters()), checkpoint_id=folder / "dcp")


# In the parent.


def anonymous(process: int) -> int:
    """Bytes of a process's memory that no file backs."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def sampled(processes: list[int]) -> Iterator[list[int]]:
    """Fill a list with the peak of each process beyond what it has now."""
    before, peaks, done = (
        [anonymous(each) for each in processes],
        [0] * len(processes),
        threading.Event(),
    )

    def sample() -> None:
        while not done.wait(0.005):
            for number, process in enumerate(processes):
                peaks[number] = max(peaks[number], anonymous(process) - before[number])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True)
class Measured:
    """One run of a side."""

    seconds: dict[str, float]  # by stage, of the slowest rank
    cpu: float  # of all ranks
    ready: int  # bytes, of the fullest rank, at most until the step
    peak: int  # the same, with the step
    loss: float


def measure(name: str, model: str, folder: Path) -> Measured:
    """Run a side in new processes."""
    with RankPool(RANKS, timeout=900) as pool, redirect_stdout(StringIO()):
        processes = pool.run(prepared, name)
        with sampled(processes) as peaks:
            pool.run(started, name, model, folder)
            ready = max(peaks)
            found = pool.run(stepped)
    clocks = [clock for clock, _ in found]
    seconds = {stage: max(clock.seconds.get(stage, 0) for clock in clocks) for stage in STAGES}
    return Measured(
        seconds, sum(sum(clock.cpu.values()) for clock in clocks), ready, max(peaks), found[0][1]
    )


def check(found: dict[str, list[Measured]]) -> None:
    """Sides that load have the same first loss, and those that build whole that of shardkit."""
    for names in (LOAD, list(INITIALIZE)[:2]):
        losses = {run.loss for name in names for run in found.get(name, [])}
        if len(losses) > 1:
            raise AssertionError(
                f"the first losses differ: { {name: found.get(name) for name in names} }"
            )


def table(title: str, found: dict[str, list[Measured]]) -> str:
    """Fastest rounds in Markdown; ``values`` are initialized or loaded."""
    heads = [
        title,
        *STAGES,
        "seconds",
        "CPU seconds",
        "ratio",
        "peak of a rank until the step, MiB",
        "ratio",
        "with it",
    ]
    lines, ours = [heads, ["---"] * len(heads)], next(iter(found.values()))
    cpu, ready = min(run.cpu for run in ours), min(run.ready for run in ours)
    for name, runs in found.items():
        fastest = min(runs, key=lambda run: sum(run.seconds.values()))
        cells = [
            f"{fastest.seconds[stage]:.2f}" if fastest.seconds[stage] else "-" for stage in STAGES
        ]
        least, memory = min(run.cpu for run in runs), min(run.ready for run in runs)
        cells += [f"{sum(fastest.seconds.values()):.2f}", f"{least:.1f}", f"{least / cpu:.2f}"]
        cells += [
            f"{memory / MIB:,.0f}",
            f"{memory / ready:.2f}",
            f"{min(run.peak for run in runs) / MIB:,.0f}",
        ]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure all sides in rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="sides whose name has this")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    installed = {name for name in SIDES if find_spec(name.partition(":")[0])}
    names = [name for name in SIDES if name in installed and (options.only or "") in name]
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        with RankPool(RANKS, timeout=900) as pool:
            pool.run(saved, options.model, Path(folder))
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(measure(name, options.model, Path(folder)))
                print(
                    f"round {number + 1}, {name}: {sum(found[name][-1].seconds.values()):.1f} s",
                    flush=True,
                )
            text = page(options.model, number + 1, found)
            if options.write:
                RESULTS.write_text(f"{text}\n")
    print(text)


def page(model: str, rounds: int, found: dict[str, list[Measured]]) -> str:
    """The tables in Markdown, after the losses are checked."""
    check(found)
    kinds = [
        (title, {name: found[name] for name in sides if name in found})
        for title, sides in TABLES.items()
    ]
    return "\n\n".join(
        [heading(model, rounds), *(table(title, sides) for title, sides in kinds if sides)]
    )


def heading(model: str, rounds: int) -> str:
    """What was measured where."""
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "accelerate")
        if find_spec(name)
    )
    return (
        f"# Start to first step, CPU, November 2026\n\n`python -m benchmarks.start --model {model} "
        f"--rounds {rounds}`: {versions}, Python {platform.python_version()}, {os.cpu_count()} "
        f"shared cores, {RANKS} gloo ranks. The fastest of all rounds; seconds of the slowest "
        "rank, CPU seconds of both."
    )


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()

"""Simulated scale: models of 1B to 671B on 8 to 16,384 ranks, by the library's own plans and a
model of seconds.

Run: ``python -m benchmarks.scale``, 90 s; needs transformers and matplotlib. ``--write`` puts all
tables into ``benchmarks/results/`` and draws ``docs/pictures/scale.png``; ``--model "Llama 8B"``
prints one model alone. Nothing is measured. Plans are those of ``plan_model`` on meta, bytes and
messages are counted from them, and times are by the model that ``benchmarks/scale/speed.py``
states, with the bandwidths of ``HARDWARE["h100"]``. Only the rate of matrix products is another
one: ``REACHED``, which published runs of FSDP reached, other kernels included. Each rank has one
sequence of 8,192 tokens; blocks are checkpointed, except in the 1B.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import DeepseekV3Config, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.scale.published import (
    FAR_SOURCE,
    LOST,
    SERIES,
    Compared,
    compare,
    far,
    llama,
    llama_8b,
    llama_70b,
    on_meta,
    plan_of,
    token_batch,
)
from benchmarks.scale.speed import (
    HARDWARE,
    STRATEGIES,
    Hardware,
    ScalingRow,
    ScalingTable,
    scaling_table,
)
from shardkit.plan.types import nbytes

ROOT = Path(__file__).parents[2]
RESULTS, PICTURE = (
    ROOT / "benchmarks" / "results" / "scale_202611.md",
    ROOT / "docs" / "pictures" / "scale.png",
)
# FLOP/s: 0.51 of what matrix products alone reach, as in the first row of published.py
REACHED = 405e12
HARDWARE_REACHED = replace(HARDWARE["h100"], matmul_flops=REACHED)
BUDGET = 72 * 2**30  # of 80 GiB
TOKENS = 8192
SHOWN = (8, 64, 512, 4096, 16384)  # in the summary
GAIN = 0.98  # of FSDP's step: what takes more than that is not called faster


def mixtral() -> MixtralConfig:
    """Mixtral 8x7B."""
    return MixtralConfig(num_key_value_heads=8)


def qwen3_moe() -> Qwen3MoeConfig:
    """Qwen3-30B-A3B."""
    shape: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    }
    shape |= {"num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeConfig(
        **shape, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama 1B": lambda: llama(2048, 8192, 16, 32, 8, 128256, tied=True),
    "Llama 8B": llama_8b,
    "Llama 70B": llama_70b,
    "Llama 405B": lambda: llama(16384, 53248, 126, 128, 8, 128256),
    "Mixtral 8x7B": mixtral,
    "Qwen3 30B-A3B": qwen3_moe,
    "DeepSeek-V3": DeepseekV3Config,
}


@dataclass(frozen=True)
class Scaled:
    """A model's scaling table, and what it took to make it."""

    name: str
    parameters: int
    table: ScalingTable
    seconds: float  # of this process's CPU time

    def at(self, strategy: str, ranks: int) -> ScalingRow | None:
        """The row of a strategy on that many ranks; None on one node, where there is FSDP alone."""
        return next((row for row in self.table.of(strategy) if row.ranks == ranks), None)


def scaled(name: str, hardware: Hardware = HARDWARE_REACHED) -> Scaled:
    """Plan, trace and scale one model."""
    start = time.process_time()
    model = on_meta(MODELS[name]())
    plan = plan_of(model, checkpointed=name != "Llama 1B")
    table = scaling_table(model, plan, token_batch(1, TOKENS), hardware)
    return Scaled(
        name, sum(param.numel() for param in model.parameters()), table, time.process_time() - start
    )


def imbalance(row: ScalingRow) -> float:
    """The bytes of the fullest rank over an equal part."""
    return (
        row.plan.held_bytes() * row.mesh.shard_size / sum(spec.nbytes for spec in row.plan.params)
    )


def fits(row: ScalingRow) -> bool:
    """Whether the peak is within the budget."""
    return row.peak <= BUDGET


# What is said of a model in one line.


def first(rows: list[ScalingRow], holds: Callable[[ScalingRow], bool]) -> str:
    """The fewest ranks for which it holds."""
    return next((f"{row.ranks:,}" for row in rows if holds(row)), "none")


def faster(model: Scaled, strategy: str) -> str:
    """The ranks on which a strategy fits and takes clearly less than FSDP."""

    def gains(row: ScalingRow) -> bool:
        fsdp = model.at("FSDP", row.ranks)
        return fits(row) and fsdp is not None and row.time.total < GAIN * fsdp.time.total

    found = [row.ranks for row in model.table.of(strategy) if gains(row)]
    return (
        f"{found[0]:,} to {found[-1]:,}" if len(found) > 1 else f"{found[0]:,}" if found else "none"
    )


def summary(models: list[Scaled]) -> str:
    """Where each strategy fits, hides its communication, and pays."""
    titles = ["model", "parameters", "fits from: FSDP", "HSDP", "hpZ"]
    titles += ["stops hiding at: FSDP", "HSDP", "hpZ", "faster than FSDP: HSDP", "hpZ"]
    lines = []
    for model in models:
        tables = [model.table.of(strategy) for strategy in STRATEGIES]
        line = [
            model.name,
            f"{model.parameters / 1e9:.3g} B",
            *(first(rows, fits) for rows in tables),
        ]
        line += [first(rows, lambda row: not row.hides) for rows in tables]
        lines.append([*line, faster(model, "HSDP"), faster(model, "hpZ")])
    return markdown(titles, lines)


def steps(models: list[Scaled]) -> str:
    """The step time of FSDP / HSDP / hpZ on some numbers of ranks."""
    lines = []
    for model in models:
        cells = []
        for ranks in SHOWN:
            rows = [model.at(strategy, ranks) for strategy in STRATEGIES]
            cells.append(" / ".join(f"{row.time.total:.3g}" for row in rows if row))
        lines.append([model.name, *cells])
    return markdown(["seconds of a step", *(f"{ranks:,} ranks" for ranks in SHOWN)], lines)


def every_row(model: Scaled) -> str:
    """All rows of one model."""
    titles = [
        "ranks",
        "strategy",
        "parameters on the fullest rank",
        "over an equal part",
        "peak",
        "fits",
    ]
    titles += [
        "messages in node",
        "between",
        "bytes in node",
        "between",
        "step, s",
        "exposed, s",
        "tokens/s a rank",
    ]
    lines = []
    for row in model.table.rows:
        sent = row.time.traffic
        line = [
            f"{row.ranks:,}",
            row.strategy,
            nbytes(row.plan.held_bytes()),
            f"{imbalance(row):.3f}",
            nbytes(row.peak),
        ]
        line += [
            "yes" if fits(row) else "no",
            f"{sent.messages_in_node:,}",
            f"{sent.messages_between_nodes:,}",
        ]
        line += [nbytes(round(sent.bytes_in_node)), nbytes(round(sent.bytes_between_nodes))]
        lines.append(
            [
                *line,
                f"{row.time.total:.3g}",
                f"{row.time.exposed:.3g}",
                f"{TOKENS / row.time.total:,.0f}",
            ]
        )
    return markdown(titles, lines)


# Beside what others measured.


def beside_published(found: list[Compared]) -> str:
    """A line for each published number, and the sources."""
    titles = [
        "system",
        "model",
        "GPUs",
        "ranks",
        "published tokens/s",
        "MFU",
        "model",
        "error",
        "rate fitted",
        "error",
    ]
    lines = []
    for each in found:
        series, run = each.series, each.run
        kind = f"{'HSDP' if series.hybrid else 'FSDP'}{_checkpoints(series.checkpointed)}"
        line = [
            f"{series.system}, {kind}",
            series.name,
            series.hardware.name.upper(),
            str(run.ranks),
        ]
        line += [
            f"{run.published:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.modeled:,.0f}",
            f"{each.error:+.0%}",
        ]
        fitted = f"x {each.share:.2f}" if len(series.runs) > 1 else ""
        fitted = fitted if each.fitted is None else f"{each.fitted:,.0f}"
        lines.append(
            [*line, fitted, "" if each.fitted_error is None else f"{each.fitted_error:+.1%}"]
        )
    sources = dict.fromkeys((each.series.system, each.series.source) for each in found)
    return "\n".join(
        [markdown(titles, lines), "", *(f"- {system}: {source}" for system, source in sources)]
    )


def _checkpoints(checkpointed: float | str) -> str:
    if isinstance(checkpointed, str):
        return f", checkpointed: {checkpointed}"
    if checkpointed in (0, 1):
        return ", checkpointed" if checkpointed else ""
    return f", {checkpointed:.0%} of blocks checkpointed"


def beyond(models: list[Scaled], lost: float, latency: float) -> str:
    """The one published number for thousands of ranks that was found, and the summary that follows
    from it.
    """
    return (
        f"From 128 to 2,048 H100s a Llama 2 7B under FSDP lost {LOST:.0%} of its throughput "
        f"({FAR_SOURCE}). The model says {lost:.0%}, for an assumed micro-batch of 2 x 4,096 "
        f"tokens: it knows no congestion and no stragglers. With {latency * 1e6:.0f} us a hop "
        f"between nodes it says {LOST:.0%}, and the summary becomes:\n\n"
        f"{summary(models)}"
    )


# The picture and the page.


def draw(models: list[Scaled], found: list[Compared], path: Path) -> None:
    """Tokens per second of a rank over ranks, with the slower network, and the model beside
    published numbers.
    """
    figure = Figure(figsize=(12, 6), dpi=120, layout="constrained")
    panels = figure.subplots(2, 4)
    for axes, model in zip(panels.flat, models, strict=False):
        _draw_model(axes, model)
    panels[0][0].legend(frameon=False, fontsize=8)
    _draw_published(panels.flat[-1], found)
    for axes in panels[:, 0]:
        axes.set_ylabel("tokens/s of a rank")
    for axes in panels.flat[3:-1]:
        axes.set_xlabel("ranks")
    latency = models[0].table.hardware.network_latency * 1e6
    figure.suptitle(f"modeled, not measured; {latency:.0f} us a hop between nodes", fontsize=10)
    figure.savefig(path, metadata={"Software": None})


def _draw_model(axes: Axes, model: Scaled) -> None:
    styles = {"FSDP": ("#0072B2", "-"), "HSDP": ("#E69F00", "--"), "hpZ": ("#009E73", ":")}
    for strategy, (color, style) in styles.items():
        rows = model.table.of(strategy)
        speeds = [TOKENS / row.time.total for row in rows]
        ranks = [row.ranks for row in rows]
        axes.plot(ranks, speeds, style, color=color, alpha=0.35, lw=1)
        within = [
            speed if fits(row) else float("nan") for row, speed in zip(rows, speeds, strict=True)
        ]
        axes.plot(ranks, within, style, color=color, lw=2, label=strategy)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.08 * max(TOKENS / row.time.total for row in model.table.rows))
    axes.set_title(f"{model.name}; pale: over 72 GiB", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_published(axes: Axes, found: list[Compared]) -> None:
    published = [each.run.published for each in found]
    axes.plot(published, published, color="#BBBBBB", lw=1)
    axes.plot(
        published,
        [each.modeled for each in found],
        "o",
        ms=4,
        color="#D55E00",
        label="model, data sheets",
    )
    fitted = [(each.run.published, each.fitted) for each in found if each.fitted]
    axes.plot(
        *zip(*fitted, strict=True), "s", ms=4, color="#0072B2", label="model, one rate fitted"
    )
    axes.set(xscale="log", yscale="log", xlabel="published tokens/s")
    axes.set_title("beside published runs", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def page(models: list[Scaled], found: list[Compared], last: str) -> str:
    """All of it in Markdown."""
    rates = HARDWARE_REACHED
    took = ", ".join(f"{model.name} {model.seconds:.1f}" for model in models)
    return "\n\n".join(
        [
            "# Simulated scale",
            f"`python -m benchmarks.scale --write`, torch {torch.__version__}. Nothing is "
            "measured; times are by the model of `benchmarks/scale/speed.py`: "
            f"{rates.matmul_flops / 1e12:.0f} TFLOP/s, {rates.node_bandwidth / 1e9:.0f} GB/s in a "
            f"node of {rates.ranks_per_node}, {rates.network_bandwidth / 1e9:.0f} GB/s a rank "
            f"between nodes, {rates.latency * 1e6:.1f} and {rates.network_latency * 1e6:.0f} us a "
            f"hop. One sequence of {TOKENS:,} tokens a rank; AdamW, float32 parameters, bfloat16 "
            "compute, float32 reductions; blocks checkpointed, except in the 1B.",
            f"CPU seconds to build, plan, trace and scale: {took}.",
            summary(models),
            steps(models),
            "## Beside published runs",
            beside_published(found),
            last,
            *(part for model in models for part in (f"## {model.name}", every_row(model))),
        ]
    )


def markdown(titles: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *lines])


def published() -> Iterator[Compared]:
    """All published numbers beside the model's."""
    return (each for series in SERIES for each in compare(series))


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, help="this one alone, every row")
    parser.add_argument(
        "--write", action="store_true", help=f"write {RESULTS.name} and {PICTURE.name}"
    )
    options = parser.parse_args()
    if options.model:
        print(every_row(scaled(options.model)))
        return
    models, found = [scaled(name) for name in MODELS], list(published())
    lost, latency = far(HARDWARE_REACHED)
    slower = [scaled(name, replace(HARDWARE_REACHED, network_latency=latency)) for name in MODELS]
    text = page(models, found, beyond(slower, lost, latency))
    print(text.partition("\n\n## Llama 1B")[0])
    if options.write:
        RESULTS.write_text(f"{text}\n")
        draw(slower, found, PICTURE)


if __name__ == "__main__":
    main()

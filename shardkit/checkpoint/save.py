"""save_checkpoint: write the full training state into one directory, from all ranks in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import with_local
from shardkit.checkpoint import directory
from shardkit.checkpoint.asynchronous import (
    SaveHandle,
    background_groups,
    host_copies,
    own_rank,
    pending,
    ranks_of,
    start_pending,
    sums_on_each,
    world,
)
from shardkit.checkpoint.chunks import flush_files, refuse_subclasses
from shardkit.checkpoint.directory import FORMATS, FileEntry, Manifest, entries_of
from shardkit.checkpoint.format import Spec, lay_out
from shardkit.checkpoint.native import RANDOM_BYTES, own_random_states, random_row, write_dcp
from shardkit.checkpoint.source import decode, encode
from shardkit.checkpoint.write import MAX_SHARD_SIZE, Layout, check_written, described, laid_out, write_own
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, each_equal, together
from shardkit.shards import local_value
from shardkit.state.model import check_scales, first_names, model_state, trainable_state
from shardkit.state.optimizer import CLASS, is_quantized, optimizers_of, sharded_optimizer_state_dict, values_of


@dataclass(frozen=True)
class Content:
    """What one save writes."""

    model: dict[str, Tensor]  # by FQN, live or copied; tied ones are one object
    optimizer: dict[str, Tensor]  # by path in the state
    rest: dict[str, Tensor]  # of the scheduler and of extra; the first rank writes them
    plain: dict[str, Any]  # everything else, encoded
    random: dict[str, bytes] = field(default_factory=dict)  # this rank's generators
    quantized: bool = False  # whether optimizer state is quantized on this rank
    trainable_only: bool = False  # whether frozen parameters are left out

    def compared(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, by argument."""
        plain = self.plain["optimizer"] or {"param_groups": []}
        optimizer = {name: described(tensor) for name, tensor in self.optimizer.items()}
        model = {name: described(tensor) for name, tensor in self.model.items()}
        return {
            "model": model | {f"{name} (tied)": first for name, first in self.plain["ties"].items()},
            "optimizer": optimizer | plain | {"param_groups": dict(enumerate(plain["param_groups"]))},
            "scheduler": self.plain["scheduler"],
        }


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scheduler: Any = None,
    *,
    extra: Any = None,
    format: str = "safetensors",
    async_: bool = False,
    overwrite: bool = False,
    keep: int | None = None,
    trainable_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Save a model, its optimizer and the rest of the training state into the directory ``path``, atomically.

    **Collective**: every rank of the world, or of ``group``, calls it with its shards of the same model, and sees the
    same file system. Each rank writes its own bytes; nothing is gathered, and nothing is pickled. An earlier checkpoint
    at ``path`` stays until the new one is complete and on the disk, whenever processes are killed. The random
    generators of every rank are saved too. ``docs/saving-and-loading.md`` has the files.

    Args:
        path: the directory of this one checkpoint, such as ``runs/step-100``.
        model: plain, or sharded by any ``fully_shard`` calls.
        optimizer: one, or several of different parameters; quantized state is saved as its values.
        scheduler: anything with a ``state_dict()`` of plain data, such as torch's schedulers.
        extra: plain data and plain tensors of rank 0, such as ``{"step": 100}``, which ``load_checkpoint`` returns.
        format: ``"safetensors"``, or ``"dcp"`` for ``torch.distributed.checkpoint.load``.
        async_: return when the state is copied to CPU memory, kept for the next save, and write it in a thread.
        overwrite: replace a checkpoint at ``path``. Files of yours in it are carried over.
        keep: then delete, in a thread, all but the newest ``keep`` checkpoints beside it whose names differ only in
            numbers; never one with files of yours.
        trainable_only: leave out frozen parameters, and buffers and extra state of modules without trainable ones.
        group: the ranks that hold the model; None: all. Pipeline stages pass one group and one ``path`` each.

    Returns:
        a handle; :meth:`SaveHandle.wait` returns when the checkpoint is complete, at once without ``async_``.

    Raises:
        CheckpointError: on every rank, with any earlier checkpoint unchanged: something cannot be saved, ranks pass
            different arguments or models, or writing failed on some rank, now or in the previous background save.
    """
    pending().error()
    place, groups, ranks = Path(path).absolute(), world(group), ranks_of(world(group))
    with together(groups, CheckpointError, call="save_checkpoint") as poll:
        pending().wait()  # here, since a rank whose program has waited does not raise
        replaces = check_destination(place, format, overwrite, keep)
        content = _collected(model, optimizer, scheduler, extra, trainable_only)
        layouts = layouts_of(content, format, ranks)  # all of it is checked now
        same = {"path": str(place), "format": format, "async_": async_, "overwrite": overwrite, "keep": keep}
        poll.same = same | {"trainable_only": trainable_only} | content.compared()
        poll.fix = "Pass the same; ranks that hold different models, such as pipeline stages, save with group="
        poll.own = directory.draw_token()  # the highest is of all
        if async_:
            content, layouts = _staged(content, layouts, model)
    groups = background_groups(groups) if async_ else groups
    options: Any = {"ranks": ranks, "format": format, "token": poll.any, "replaces": replaces, "keep": keep}
    write = partial(commit_checkpoint, place, content, layouts, groups, **options)
    if async_:
        return start_pending(write)
    write()
    return SaveHandle()


# ---- what is saved ----------------------------------------------------------------------------------------------


def check_destination(path: Path, format: str, overwrite: bool, keep: int | None) -> bool:
    """Raise unless a checkpoint may be written to ``path``; return whether it may replace what is there. Local."""
    if format not in FORMATS:
        raise CheckpointError(message("format", f"must be one of {FORMATS}, got {format!r}", "", "Use 'safetensors'"))
    if keep is not None and (type(keep) is not int or keep < 1):
        problem = f"must be the number of checkpoints to keep, including this one, got {keep!r}"
        raise CheckpointError(message("keep", problem, "", "Pass keep=3, for example, or None for all"))
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return overwrite
    if not (path / directory.NAME).is_file():
        rule = "Only a checkpoint of shardkit is ever replaced"
        raise CheckpointError(message("path", f"{path} is not a checkpoint", rule, "Use another path"))
    if not overwrite:
        raise CheckpointError(message("path", f"{path} exists", "", "Use another path, or pass overwrite=True"))
    return True


def _collected(model: nn.Module, optimizer: Any, scheduler: Any, extra: Any, trainable_only: bool) -> Content:
    """Collect the current state, as live tensors. Local."""
    state = model_state(model)
    named = None
    if optimizer is not None:
        optimizers = optimizers_of(optimizer)
        named = sharded_optimizer_state_dict(model, optimizers)
        classes = [type(each).__name__ for each in optimizers for _ in each.param_groups]
        named["param_groups"] = [g | {CLASS: name} for g, name in zip(named["param_groups"], classes, strict=True)]
    if trainable_only:
        frozen = {name for name, tensor in state.tensors.items() if not tensor.requires_grad}
        state = trainable_state(state)
        if named is not None:
            named["state"] = {name: entry for name, entry in named["state"].items() if name not in frozen}
    check_scales(model, state)
    others, rest = encode(state.others, "model")
    encoded, tensors = encode(named, "", sharded=True)
    given = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": extra}
    beside, beside_tensors = encode(given, "")
    quantized = {name: values_of(each, each.dtype, "cpu") for name, each in tensors.items() if is_quantized(each)}
    # Detached one by one, so that each is written under its own name; in the model, one object is a tie.
    moments = {name: each.detach() for name, each in (tensors | quantized).items()}
    refuse_subclasses(state.tensors | moments)
    ties = {name: first for name, first in first_names(state.tensors).items() if name != first}
    return Content(
        model=dict(state.tensors),
        optimizer=moments,
        rest={name: tensor.detach() for name, tensor in (rest | beside_tensors).items()},
        plain={"model": others, "optimizer": encoded, **beside, "ties": ties},
        quantized=bool(quantized),
        random=own_random_states(),
        trainable_only=trainable_only,
    )


def layouts_of(content: Content, format: str, ranks: Sequence[int]) -> dict[str, Layout]:
    """Return what is written as safetensors, by the names of files; for DCP also what is only summed. Local, pure."""
    sections = {"model": content.model, "optimizer": content.optimizer, "state": content.rest}
    layouts = dict[str, Layout]()
    if format == "dcp":
        tensors = [*sections.pop("model").items(), *sections.pop("optimizer").items()]
        on_slices = [(n, t) for n, t in tensors if isinstance(t, DTensor) and t.device_mesh.size() < len(ranks)]
        layouts[""] = Layout(dict(on_slices), [])
    return layouts | {key: laid_out(part, key) for key, part in sections.items() if part or key == "model"}


def _staged(content: Content, layouts: dict[str, Layout], model: nn.Module) -> tuple[Content, dict[str, Layout]]:
    """Return both with copies in CPU memory. Local."""
    made = host_copies(chain(content.model.values(), content.optimizer.values(), content.rest.values()), model)

    def copied(part: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: made[id(tensor)] for name, tensor in part.items()}

    sections: Any = {key: copied(vars(content)[key]) for key in ("model", "optimizer", "rest")}
    placed = {key: each._replace(tensors=copied(each.tensors)) for key, each in layouts.items()}
    return replace(content, **sections), placed


# ---- how it is written ------------------------------------------------------------------------------------------


def commit_checkpoint(
    path: Path,
    content: Content,
    layouts: dict[str, Layout],
    groups: Groups,
    *,
    ranks: Sequence[int],
    format: str,
    token: int,
    replaces: bool,
    keep: int | None = None,
) -> None:
    """Write everything into a temporary directory, and rename it when all ranks have. Collective over ``groups``."""
    is_first, of_first = own_rank() == ranks[0], layouts.pop("state", Layout({}, []))
    files, beside = dict[str, FileEntry](), list[int]()

    def write() -> list[int]:
        if is_first:
            directory.clear_stale(path, token)
        draft.mkdir(parents=True, exist_ok=True)
        beside.extend(write_own(draft, of_first, ranks) if is_first else ())
        numbers = [write_own(draft, layout, ranks) for layout in layouts.values()]
        return [int(content.quantized), *chain.from_iterable(numbers)]

    with directory.temporary_directory(path, token, is_first=is_first) as draft:
        directory.finish_deletions()
        equal = each_equal(map(repr, content.random.values()), groups)
        random = {kind: state for (kind, state), same in zip(content.random.items(), equal, strict=True) if same}
        layouts["random"] = _rows_of({k: state for k, state in content.random.items() if k not in random}, ranks)
        if format == "dcp":
            files = write_dcp(draft, _dcp_tree(content), groups)
        quantized, *sums = sums_on_each(write, 1 + sum(each.numbers for each in layouts.values()), groups)
        with together(groups, CheckpointError):
            if not is_first:
                return
            sums += beside
            for layout in (*layouts.values(), of_first):
                files |= entries_of(layout.files, check_written(layout, sums[: layout.numbers]))
                sums = sums[layout.numbers :]
            alike = {kind: [state.hex()] for kind, state in random.items() if state}
            state = {"random": alike, "quantized": bool(quantized)} | content.plain
            old = directory.written_files(path)
            directory.carry_over(path, draft, lambda name: name in old)
            manifest = Manifest(format, len(ranks), files, trainable_only=content.trainable_only, state=state)
            (draft / directory.NAME).write_bytes(manifest.to_bytes())
            flush_files([draft / directory.NAME])
            directory.commit(path, token, replace=replaces, keep=keep)


def _rows_of(random: dict[str, bytes], ranks: Sequence[int]) -> Layout:
    """Return the file with the states of generators that differ between ranks: a row for each rank. Local."""
    specs = dict.fromkeys(random, Spec(torch.uint8, torch.Size((len(ranks), RANDOM_BYTES))))
    box = ((ranks.index(own_rank()), 1), (0, RANDOM_BYTES))
    rows = {kind: (random_row(state), box) for kind, state in random.items()}
    return Layout({}, lay_out(specs, "random", MAX_SHARD_SIZE) if specs else [], rows)


def _dcp_tree(content: Content) -> dict[str, Any]:
    """Return what ``dcp.save`` is given: tensors without subclasses, in nested dicts."""

    def bare(tensor: Tensor) -> Tensor:
        local = local_value(tensor)
        return with_local(tensor, local) if isinstance(tensor, DTensor) else local

    tree: dict[str, Any] = {"model": {name: bare(tensor) for name, tensor in content.model.items()}}
    if content.plain["optimizer"] is not None:
        tree["optimizer"] = decode(content.plain["optimizer"], content.optimizer)
    return tree

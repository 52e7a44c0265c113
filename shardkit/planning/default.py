"""The default rule: blocks, the input embedding, ``[norm, head]`` and the root; ``docs/design.md`` says why."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import torch.nn as nn

from shardkit.errors import listing
from shardkit.plan import ancestors
from shardkit.planning.blocks import Blocks
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Selection
from shardkit.planning.tree import ModelTree, is_called, unit_of_entries

SMALL_NUMEL, SMALL_SHARE = 2_000_000, 0.01  # elements, and of the model: smaller units join their neighbors
FEW_SHARE = 0.02  # of the model: what is small even so goes to the unit around, if together it is at most this
LARGE_NUMEL, LARGE_SHARE = 1_000_000, 0.05  # a module outside of all blocks is a unit if it has both
_MLP = re.compile(r"(MLP|Mlp|FeedForward)$")  # of a class


def default_units(tree: ModelTree, ignored: frozenset[str]) -> tuple[list[Selection], list[str]]:
    """Return the selections of the default rule, the root included, and a note for each repair."""
    blocks = Blocks(tree)
    inside = {path for block in blocks.outermost for below in tree.subtree(block) for path in tree.paths(below)}
    # What is in no block, and in no other item of a list, since some of those may not be called.
    lists = [entry for entry, module in enumerate(tree.modules) if isinstance(module, nn.ModuleList)]
    inside.update(below for entry in lists for below in tree.subtree(entry) if below != entry)
    outside = [entry for entry in range(len(tree.modules)) if entry not in inside]

    head = _find_head(tree, blocks, outside)
    embedding = _find_input_embedding(tree, blocks, outside, head)
    tail = _find_tail(tree, blocks, outside, head)
    units = _join_small(tree, blocks)
    taken = {*inside, *tail} | {each for each in (embedding, _declared(tree, "get_output_embeddings", outside)) if each}
    units += [(entry,) for entry in _find_large(tree, blocks, 0, taken)]
    selections = [Selection(unit) for unit in units]
    selections += [Selection((embedding,))] if embedding is not None else []
    selections += [Selection(tail, reshard=False)] if tail else []
    selections.append(Selection((0,), reshard=False))
    selections, notes = join_ties(tree, selections, ignored)
    selections, more_notes = split_dtypes(tree, selections, ignored)
    return _with_blocks(tree, selections, blocks), notes + more_notes + _notes_of_tables(tree, blocks, embedding)


def find_mlps(tree: ModelTree) -> list[str]:
    """Return the FQNs of the modules that are MLPs by the name of their class, and so may compute in tiles.

    Not those with convolutions or experts, nor experts themselves, which get few of the tokens.
    """
    found: dict[str, None] = {}
    for entry in tree.first_entries:
        fqn, names = tree.fqns[entry], [tree.fqns[below].lower() for below in tree.subtree(entry)]
        is_mlp = _MLP.search(type(tree.modules[entry]).__name__) and found.keys().isdisjoint(ancestors(fqn))
        dims = [tree.params[param].dim() for below in tree.subtree(entry) for param in tree.owned[below]]
        if is_mlp and dims and max(dims) < 3 and not any("expert" in name for name in names):
            found[fqn] = None
    return list(found)


def _with_blocks(tree: ModelTree, selections: list[Selection], blocks: Blocks) -> list[Selection]:
    """Return the units with the blocks that are directly in each: what checkpointing and compiling apply to."""
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    inside: dict[int, list[int]] = {}
    for block in blocks.smallest:
        inside.setdefault(around[block], []).append(block)
    return [replace(unit, blocks=tuple(inside.get(index, ()))) for index, unit in enumerate(selections)]


def _join_small(tree: ModelTree, blocks: Blocks) -> list[tuple[int, ...]]:
    """Return the blocks as units, where small neighbors are joined and a few that stay small are left out."""
    small = min(SMALL_NUMEL, SMALL_SHARE * blocks.numel[0])
    units: list[tuple[int, ...]] = []
    for block in sorted(blocks.units()):
        before = units[-1] if units else ()
        if before and blocks.size(before) < small and _follows(tree, before[-1], block):
            units[-1] = (*before, block)
        else:
            units.append((block,))
    tiny = [unit for unit in units if blocks.size(unit) < small and not blocks.is_declared(unit[0])]
    few = sum(map(blocks.size, tiny)) <= FEW_SHARE * blocks.numel[0]
    return [unit for unit in units if not (few and unit in tiny)]


def _follows(tree: ModelTree, one: int, two: int) -> bool:
    """Return whether one Sequential calls both, one after the other: a unit reshards when all its modules have run."""
    container = tree.parents[two]
    is_sequential = type(tree.modules[container]).forward is nn.Sequential.forward
    return is_sequential and tree.ends[one] == two and tree.parents[one] == container


def _find_large(tree: ModelTree, blocks: Blocks, outer: int, taken: Collection[int]) -> list[int]:
    """Return the modules below an entry that are much of the model, in no unit and around none."""
    found: list[int] = []
    for entry in tree.children(outer):
        if entry not in taken and _is_large(blocks, entry):
            below = _find_large(tree, blocks, entry, taken)
            around = any(each in taken for each in tree.subtree(entry)) or not is_called(tree, entry)
            cut = around or (len(below) > 1 and blocks.numel[entry] > blocks.limit)
            found += below if cut else [entry] if entry in tree.first_entries else []
    return found


def _find_head(tree: ModelTree, blocks: Blocks, outside: list[int]) -> int | None:
    """Return the output layer: the one that the model names, else the model's last layer if it is a Linear."""
    declared = _declared(tree, "get_output_embeddings", outside)
    if declared is not None:
        return declared
    last = max(entry for entry, owned in enumerate(tree.owned) if owned or not entry)
    is_linear = isinstance(tree.modules[last], nn.Linear) and last in outside
    return last if is_linear and is_called(tree, last) else None


def _find_tail(tree: ModelTree, blocks: Blocks, outside: list[int], head: int | None) -> tuple[int, ...]:
    """Return ``[norm, head]``, with the first norm behind the blocks; the head alone where it is tied or large."""
    if head is None:
        return ()
    for entry in (entry for entry in outside if (blocks.outermost or [0])[-1] < entry < head):
        name = type(tree.modules[entry]).__name__.lower()
        is_norm = "norm" in name and "batchnorm" not in name and tree.owned[entry] and tree.ends[entry] == entry + 1
        if is_norm and is_called(tree, entry) and len(tree.trained_dtypes(entry, *tree.subtree(head))) < 2:
            if head != _declared(tree, "get_output_embeddings", outside) and any(tree.owned[entry + 1 : head]):
                break  # the norm of another part of the model
            return (entry, head)
    tied = any(fqn in tree.ties for fqn in tree.owned[head])
    return (head,) if tied or _is_large(blocks, head) else ()


def _notes_of_tables(tree: ModelTree, blocks: Blocks, embedding: int | None) -> list[str]:
    """Return a note for embedding tables that are most of the model, as in recommendation."""
    tables = [entry for entry in tree.first_entries if isinstance(tree.modules[entry], (nn.Embedding, nn.EmbeddingBag))]
    tables = [each for each in tables if each != embedding and not any(fqn in tree.ties for fqn in tree.owned[each])]
    if 2 * blocks.size(tables) < blocks.numel[0]:
        return []
    names = listing((tree.fqns[entry] for entry in tables), 4)
    return [
        f"{names}: embedding tables with most of the parameters, gathered whole in each step; where a batch reads few "
        "rows, shard them by rows with another library, such as torchrec, and pass them in ignored_params"
    ]


def _is_large(blocks: Blocks, entry: int) -> bool:
    return blocks.numel[entry] >= max(LARGE_NUMEL, LARGE_SHARE * blocks.numel[0])


def _find_input_embedding(tree: ModelTree, blocks: Blocks, outside: list[int], head: int | None) -> int | None:
    """Return the embedding that the model names, else the one before all blocks whose shape is the head's.

    Other embeddings may be tables whose weight is read without calling them, such as SAM's mask tokens. Without a head
    of its shape, an embedding's weight may serve as the head. The root must own both.
    """
    declared = _declared(tree, "get_input_embeddings", outside)
    if declared is not None and isinstance(tree.modules[declared], nn.Embedding):
        return declared
    shape = getattr(tree.modules[head], "weight").shape if head is not None else None  # noqa: B009
    for entry in outside:
        module = tree.modules[entry]
        is_before = isinstance(module, nn.Embedding) and (not blocks.outermost or entry < blocks.outermost[0])
        if is_before and module.weight.shape == shape and is_called(tree, entry):
            return entry
    return None


def _declared(tree: ModelTree, getter: str, outside: list[int]) -> int | None:
    """Return the entry of what transformers' ``get_input_embeddings`` or ``get_output_embeddings`` returns."""
    method = getattr(tree.modules[0], getter, None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # the model inherits the method and has no such layer
    return next((entry for entry in outside if tree.modules[entry] is module and is_called(tree, entry)), None)

"""The default rule: blocks, the input embedding, ``[norm, head]`` and the root. ``docs/the-plan.md`` describes it.

``Blocks`` finds what repeats, at every depth, and where a block is cut since it is too large for one unit.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import islice, takewhile

import torch.nn as nn

from shardkit.errors import listing
from shardkit.plan.types import nbytes
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Selection
from shardkit.planning.tree import ModelTree, is_called, owners

SMALL_NUMEL, SMALL_SHARE = 2_000_000, 0.01  # elements, of the model: smaller units join neighbors
FEW_SHARE = 0.02  # of the model: what is small even so goes to the unit around, if together it is at most this
LARGE_NUMEL, LARGE_SHARE = 1_000_000, 0.05  # a module outside of all blocks is a unit if it has both
TABLE_SHARE = 0.01  # the same for an embedding that a dry run saw read once, so that no other module needs it
CUT_NUMEL = 10_000_000  # elements: no smaller block is cut, since more all-gathers would save no memory worth having
CUT_REST = 0.01  # of the model: what a cut block keeps for itself is a unit from here on, else the unit around has it
CUT_COVER = 0.7  # of a block: the blocks inside must be as much of it; otherwise they are its branches
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def default_units(tree: ModelTree, ignored: frozenset[str]) -> tuple[list[Selection], list[int], list[str], list[str]]:
    """Return the units, the blocks to checkpoint and compile, the parameters to replicate, and a note for each repair.

    Replicated are those that train in another dtype than their unit and cannot be in one of their own.
    """
    blocks = Blocks(tree)
    inside = set[int]().union(*map(tree.subtree, blocks.outermost))
    firsts = {tree.firsts[below] for below in inside} if tree.shared else ()
    inside.update(entry for entry in tree.shared if tree.firsts[entry] in firsts)
    # What is in no block, and in no other item of a list, since some of those may not be called.
    inside.update(*(range(entry + 1, tree.ends[entry]) for entry in tree.instances(nn.ModuleList)))
    outside = [entry for entry in range(len(tree.modules)) if entry not in inside]

    declared = _declared(tree, "get_output_embeddings", outside)
    head = _find_head(tree, outside) if declared is None else declared
    embedding = _find_input_embedding(tree, blocks, outside, head)
    tail = _find_tail(tree, blocks, outside, head, is_declared=declared is not None)
    large = _find_large(tree, blocks, 0, {*inside, *tail, embedding, declared})
    units = [*_join_small(tree, blocks), *((entry,) for entry in large)]
    selections = [Selection(unit) for unit in units]
    selections += [Selection((embedding,))] if embedding is not None else []
    selections += [Selection(tail, reshard=False)] if tail else []
    selections.append(Selection((0,), reshard=False))
    selections, notes = join_ties(tree, selections, ignored)
    selections, odd, more_notes = split_dtypes(tree, selections, ignored)
    notes += [*more_notes, *_notes_of_tables(tree, blocks, embedding)]
    if odd:
        reason = "train in another dtype than the rest of their unit and cannot be a unit of their own"
        size = nbytes(sum(tree.specs[fqn].nbytes for fqn in odd))
        notes.append(f"{listing(odd, 4)}: {reason}, so are replicated, {size} on every rank")
    to_recompute = [*blocks.smallest, *(entry for entry in large if tree.ends[entry] > entry + 1)]
    return selections, to_recompute, odd, notes


def _join_small(tree: ModelTree, blocks: Blocks) -> list[tuple[int, ...]]:
    """Return the blocks as units, where small neighbors are joined and a few that stay small are left out."""
    units: list[tuple[int, ...]] = []
    for block in sorted(each for outermost in blocks.outermost for each in blocks.cut(outermost)):
        before, parent = units[-1] if units else (0,), tree.parents[block]
        # Only in a Sequential, which calls one after the other: a unit reshards when all its modules have run.
        follows = tree.ends[before[-1]] == block and tree.parents[before[-1]] == parent
        in_sequence = type(tree.modules[parent]).forward is nn.Sequential.forward
        if follows and in_sequence and blocks.size(before) < blocks.small:
            units[-1] = (*before, block)
        else:
            units.append((block,))
    tiny = {unit for unit in units if blocks.size(unit) < blocks.small and not blocks.is_declared(unit[0])}
    few = sum(map(blocks.size, tiny)) <= FEW_SHARE * tree.numel[0]
    return [unit for unit in units if not (few and unit in tiny)]


def _find_large(tree: ModelTree, blocks: Blocks, outer: int, taken: Collection[int | None]) -> list[int]:
    """Return the modules below an entry that are much of the model, in no unit and around none."""
    found: list[int] = []
    for entry in tree.children(outer):
        if entry not in taken and _is_large(tree, entry):
            below = _find_large(tree, blocks, entry, taken)
            around = any(each in taken for each in tree.subtree(entry)) or not is_called(tree, entry)
            cut = around or (len(below) > 1 and tree.numel[entry] > blocks.limit)
            found += below if cut else [entry] * (tree.firsts[entry] == entry)
    return found


def _find_head(tree: ModelTree, outside: list[int]) -> int | None:
    """Return the output layer of a model that names none: what runs last, or is last, if it is a Linear."""
    if tree.reads:
        last = max(owners(tree, next(reversed(tree.reads))))
    else:
        last = max(entry for entry, owned in enumerate(tree.owned) if owned or not entry)
    is_linear = isinstance(tree.modules[last], nn.Linear) and last in outside
    return last if is_linear and is_called(tree, last) else None


def _find_tail(
    tree: ModelTree, blocks: Blocks, outside: list[int], head: int | None, is_declared: bool
) -> tuple[int, ...]:
    """Return ``[norm, head]``, with the norm that runs right before; the head alone where it is tied or large.

    Without a dry run that is the first norm behind the blocks. Nothing where the head is small, and the model does not
    name it.
    """
    if head is None or (tree.numel[head] < blocks.small and not is_declared):
        return ()
    behind = [entry for entry in outside if (blocks.outermost or [0])[-1] < entry < head]
    if tree.reads:
        before = list(takewhile(lambda fqn: fqn not in tree.owned[head], tree.reads))
        behind = [entry for fqn in before[-1:] for entry in owners(tree, fqn) if entry in outside]
    for entry in behind:
        name = type(tree.modules[entry]).__name__.lower()
        is_norm = "norm" in name and "batchnorm" not in name and tree.owned[entry] and tree.ends[entry] == entry + 1
        if is_norm and is_called(tree, entry) and len(tree.trained_dtypes(entry, *tree.subtree(head))) < 2:
            if not tree.reads and not is_declared and any(tree.owned[entry + 1 : head]):
                break  # the norm of another part of the model
            return tuple(sorted((entry, head)))
    tied = any(fqn in tree.ties for fqn in tree.owned[head])
    return (head,) if tied or _is_large(tree, head) else ()


def _notes_of_tables(tree: ModelTree, blocks: Blocks, embedding: int | None) -> list[str]:
    """Return a note for embedding tables that are most of the model, as in recommendation."""
    tables = [each for each in tree.instances(nn.Embedding, nn.EmbeddingBag) if tree.firsts[each] == each != embedding]
    tables = [each for each in tables if not any(fqn in tree.ties for fqn in tree.owned[each])]
    if 2 * blocks.size(tables) < tree.numel[0]:
        return []
    names = listing((tree.fqns[entry] for entry in tables), 4)
    return [
        f"{names}: embedding tables with most of the parameters, gathered whole in each step; where a batch reads few "
        "rows, shard them by rows with another library, such as torchrec, and pass them in ignored_params"
    ]


def _is_large(tree: ModelTree, entry: int) -> bool:
    is_table = isinstance(tree.modules[entry], (nn.Embedding, nn.EmbeddingBag))
    once = is_table and all(tree.reads.get(fqn) == 1 for fqn in tree.owned[entry])
    return tree.numel[entry] >= max(LARGE_NUMEL, (TABLE_SHARE if once else LARGE_SHARE) * tree.numel[0])


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


class Blocks:
    """The blocks of a model, as entries of its tree.

    Attributes:
        outermost: those that are in no other block, in the model's order.
        smallest: those into which the outermost can be cut, at most; what ``checkpoint_activations`` recomputes.
        limit: elements of the largest of these, at least ``CUT_NUMEL``: a larger block is cut.
        small: elements; what has fewer is worth no all-gather of its own.
    """

    def __init__(self, tree: ModelTree) -> None:
        self._tree = tree
        self._declared = frozenset(getattr(tree.modules[0], "_no_split_modules", None) or ())
        self.small = min(SMALL_NUMEL, SMALL_SHARE * tree.numel[0])
        self._items = self._find_items()
        # Each module once, also where a list repeats one: ModuleList([block] * 3)
        self._listed = Counter(type(tree.modules[item]) for item in self._items if tree.firsts[item] == item)
        same = {cls: [each for each in tree.by_class[cls] if tree.firsts[each] == each] for cls in self._listed}
        self._counts = {cls: len(entries) for cls, entries in same.items()}
        listed = sorted(entry for entries in same.values() for entry in entries)
        self._found = [entry for entry in listed if entry and self._is_block(entry)]
        self.outermost = self._outermost(0)
        self.smallest = [smallest for block in self.outermost for smallest in self._smallest(block)]
        self.limit = max(CUT_NUMEL, *(tree.numel[block] for block in self.smallest), 0)

    def size(self, entries: Collection[int]) -> int:
        """Return the elements at or below these entries."""
        return sum(self._tree.numel[entry] for entry in entries)

    def is_declared(self, entry: int) -> bool:
        """Return whether the model names the class of this entry in ``_no_split_modules``."""
        return type(self._tree.modules[entry]).__name__ in self._declared

    def cut(self, block: int) -> list[int]:
        """Return the block, or the blocks inside it where it is above the limit."""
        numel = self._tree.numel
        inside = self._inside(block) if numel[block] > self.limit else []
        rest = numel[block] - self.size(inside)  # what is not in the inner ones, such as a stage's downsampling
        around = [block] * (not inside or rest >= CUT_REST * numel[0])
        return [unit for inner in inside for unit in self.cut(inner)] + around

    def _smallest(self, block: int) -> list[int]:
        return [smallest for inner in self._inside(block) for smallest in self._smallest(inner)] or [block]

    def _inside(self, block: int) -> list[int]:
        """Return the blocks that a block can be cut into: siblings of one class that are most of it; else none."""
        tree, module = self._tree, self._tree.modules[block]
        # Where the model declares blocks, such a block is cut only into others that the model declares.
        among = self._outermost(block, declared=self.is_declared(block))
        inside = [inner for inner in among if self._has_matrices(inner, 2)]
        if len(inside) < 2:
            return inside if inside and self._inside(inside[0]) else []
        siblings = Counter((tree.parents[inner], type(tree.modules[inner])) for inner in inside)
        repeat = max(siblings.values()) > 1 or isinstance(module, _CONTAINERS)
        return inside if repeat and self.size(inside) >= CUT_COVER * tree.numel[block] else []

    def _outermost(self, entry: int, declared: bool = False) -> list[int]:
        """Return the outermost blocks below an entry, or of those that the model declares."""
        below = self._found[bisect_right(self._found, entry) : bisect_left(self._found, self._tree.ends[entry])]
        return self._tree.outermost(each for each in below if not declared or self.is_declared(each))

    def _is_block(self, entry: int) -> bool:
        tree, module = self._tree, self._tree.modules[entry]
        if entry not in self._items:  # an attribute, such as mid_block, of a class that is in a list too
            repeats = self._counts[type(module)] > 1 and self._has_matrices(entry, 2)
            return repeats and not isinstance(module, _CONTAINERS) and is_called(tree, entry)
        if not self.is_declared(entry):
            container = tree.parents[entry]
            is_alone = container + 1 == entry and tree.ends[entry] == tree.ends[container]
            if self._listed[type(module)] < 2 and not (is_alone and isinstance(tree.modules[container], nn.ModuleList)):
                return False
            # A stack of plain layers, such as an MLP in a Sequential: blocks only where the stack is most of the model.
            is_large = 2 * tree.numel[container] > tree.numel[0] and self._has_matrices(entry, 1)
            if not is_large and not any(tree.numel[child] for child in tree.children(entry)):
                return False
        return is_called(tree, entry)

    def _has_matrices(self, entry: int, number: int) -> bool:
        """Return whether ``number`` parameters or more at or below an entry have more than one long dim."""
        tree = self._tree
        specs = (tree.specs[fqn] for below in tree.subtree(entry) for fqn in tree.owned[below])
        matrices = (spec for spec in specs if spec.numel > max(spec.shape, default=1))
        return len(list(islice(matrices, number))) == number

    def _find_items(self) -> set[int]:
        """Return what is in lists: items of containers, and attributes that only a number tells apart: ``encoder1``.

        Not experts: a rank may have no token for one, and not call it.
        """
        tree = self._tree
        names = [fqn.rpartition(".")[2] for fqn in tree.fqns]
        containers = tree.instances(*_CONTAINERS)
        experts = {below for each in containers if "expert" in names[each].lower() for below in tree.subtree(each)}
        items = {item for entry in containers if entry not in experts for item in tree.children(entry)}
        counted = {name: re.sub(r"\d+", "#", name) for name in set(names) if any(map(str.isdigit, name))}
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)
        others = experts.union(containers)
        for entry, name in enumerate(names):
            if name in counted and tree.parents[entry] not in others and self._has_matrices(entry, 1):
                alike[tree.parents[entry], counted[name]].append(entry)
        for entries in alike.values():
            # Where one is a single layer, as of Inception, they are branches or plain layers.
            if len(entries) > 1 and all(self._has_matrices(entry, 2) for entry in entries):
                items.update(entries)
        return items

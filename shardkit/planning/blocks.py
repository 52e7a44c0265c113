"""The blocks of a model: what repeats, at every depth, and where a block is cut since it is too large for one unit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

from shardkit.planning.tree import ModelTree, is_called

CUT_NUMEL = 10_000_000  # elements: no smaller block is cut, since more all-gathers would save no memory worth having
CUT_REST = 0.01  # of the model: what a cut block keeps for itself is a unit from here on, else the unit around has it
CUT_COVER = 0.7  # of a block: the blocks inside must be as much of it; otherwise they are its branches
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Blocks:
    """The blocks of a model, as entries of its tree.

    Attributes:
        outermost: those that are in no other block, in the model's order.
        smallest: those into which the outermost can be cut, at most; what ``checkpoint_activations`` recomputes.
        limit: elements of the largest of these, at least ``CUT_NUMEL``: a larger block is cut.
        numel: elements at or below each entry of the tree; a tied parameter counts at each of its places.
    """

    def __init__(self, tree: ModelTree) -> None:
        self._tree = tree
        self._declared = frozenset(getattr(tree.modules[0], "_no_split_modules", None) or ())
        self.numel, self._matrices = _totals(tree)
        self._items = set(_items(tree, self._matrices))
        firsts = set(tree.first_entries)  # each module once, also where a list repeats one: ModuleList([block] * 3)
        self._counts = Counter(type(tree.modules[entry]) for entry in firsts)
        self._listed = Counter(type(tree.modules[entry]) for entry in self._items & firsts)
        self._found = {entry for entry in sorted(firsts) if entry and self._is_block(entry)}
        self.outermost = self._outermost(0)
        self.smallest = [smallest for block in self.outermost for smallest in self._smallest(block)]
        self.limit = max(CUT_NUMEL, *(self.numel[block] for block in self.smallest), 0)

    def size(self, entries: Collection[int]) -> int:
        """Return the elements at or below these entries."""
        return sum(self.numel[entry] for entry in entries)

    def is_declared(self, entry: int) -> bool:
        """Return whether the model names the class of this entry in ``_no_split_modules``."""
        return type(self._tree.modules[entry]).__name__ in self._declared

    def units(self) -> list[int]:
        """Return the outermost blocks; one above the limit is cut into blocks inside it."""
        return [unit for block in self.outermost for unit in self._cut(block)]

    def _cut(self, block: int) -> Iterator[int]:
        inside = self._inside(block) if self.numel[block] > self.limit else []
        for inner in inside:
            yield from self._cut(inner)
        rest = self.numel[block] - self.size(inside)
        if rest >= CUT_REST * self.numel[0] or not inside:
            yield block  # around the inner ones, for what is not in them, such as a stage's downsampling

    def _smallest(self, block: int) -> Iterator[int]:
        inside = self._inside(block)
        for inner in inside:
            yield from self._smallest(inner)
        if not inside:
            yield block

    def _inside(self, block: int) -> list[int]:
        """Return the blocks that a block can be cut into: siblings of one class that are most of it; else none."""
        tree, module = self._tree, self._tree.modules[block]
        # Where the model declares blocks, such a block is cut only into others that the model declares.
        among = self._declared if self.is_declared(block) else ()
        inside = [inner for inner in self._outermost(block, among) if self._matrices[inner] > 1]
        if len(inside) == 1:
            return inside if self._inside(inside[0]) else []
        siblings = Counter((tree.parents[inner], type(tree.modules[inner])) for inner in inside)
        repeat = max(siblings.values(), default=0) > 1 or (len(inside) > 1 and isinstance(module, _CONTAINERS))
        return inside if repeat and self.size(inside) >= CUT_COVER * self.numel[block] else []

    def _outermost(self, entry: int, among: Collection[str] = ()) -> list[int]:
        """Return the outermost blocks below an entry, of classes with these names if any are given."""
        found: list[int] = []
        below = entry + 1
        while below < self._tree.ends[entry]:
            is_one = below in self._found and (not among or type(self._tree.modules[below]).__name__ in among)
            found += [below] * is_one
            below = self._tree.ends[below] if is_one else below + 1
        return found

    def _is_block(self, entry: int) -> bool:
        tree, module = self._tree, self._tree.modules[entry]
        if entry not in self._items:  # an attribute, such as mid_block, of a class that is in a list too
            repeats = self._counts[type(module)] > 1 and self._listed[type(module)] and self._matrices[entry] > 1
            return bool(repeats) and not isinstance(module, _CONTAINERS) and is_called(tree, entry)
        if not self.is_declared(entry):
            if self._listed[type(module)] < 2 and not self._is_alone(entry):
                return False
            # A stack of plain layers, such as an MLP in a Sequential: blocks only where the stack is most of the model.
            is_large = self._matrices[entry] and 2 * self.numel[tree.parents[entry]] > self.numel[0]
            if not is_large and not any(self.numel[child] for child in tree.children(entry)):
                return False
        return is_called(tree, entry)

    def _is_alone(self, item: int) -> bool:
        container = self._tree.parents[item]
        is_only = item == container + 1 and self._tree.ends[item] == self._tree.ends[container]
        return is_only and isinstance(self._tree.modules[container], nn.ModuleList)


def _totals(tree: ModelTree) -> tuple[list[int], list[int]]:
    """Return the elements at or below each entry, and the number of parameters with more than one long dim."""
    numel, matrices = [0] * len(tree.modules), [0] * len(tree.modules)
    for entry in tree.post_order:
        params = [tree.params[fqn] for fqn in tree.owned[entry]]
        numel[entry] += sum(param.numel() for param in params)
        matrices[entry] += sum(sum(size > 1 for size in param.shape) > 1 for param in params)
        if entry:
            numel[tree.parents[entry]] += numel[entry]
            matrices[tree.parents[entry]] += matrices[entry]
    return numel, matrices


def _items(tree: ModelTree, matrices: list[int]) -> Iterator[int]:
    """Yield what is in lists: the items of containers, and attributes that only a number tells apart: ``encoder1``.

    Not experts: a rank may have no token for one, and not call it.
    """
    end_of_experts = 0
    for entry, module in enumerate(tree.modules):
        is_container = isinstance(module, _CONTAINERS)
        if is_container and "expert" in tree.fqns[entry].rpartition(".")[2].lower():
            end_of_experts = max(end_of_experts, tree.ends[entry])
        if entry < end_of_experts:
            continue
        if is_container:
            yield from tree.children(entry)
            continue
        numbered: dict[str, list[int]] = {}
        for child in tree.children(entry):
            name = tree.fqns[child].rpartition(".")[2]
            if matrices[child] > 1 and (stem := re.sub(r"\d+", "#", name)) != name:
                numbered.setdefault(stem, []).append(child)
        for alike in numbered.values():
            yield from alike if len(alike) > 1 else ()

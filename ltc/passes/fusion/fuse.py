"""Groups nodes into loop nests: each value is computed where it is used, or kept in memory.

Nodes are visited from the outputs back, so that a node's readers have their places already. A node
that is read at one index map by one kernel is computed inside it; one that must be in memory is
stored by the kernel that computes it anyway, where there is one; any other begins a kernel. Views
are index maps and cost nothing; a barrier's operand is always in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from math import prod
from typing import Any

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.loop_nest import ZERO, Access, Affine, Unit, flattened, identity
from ltc.ir.node import Node
from ltc.passes.fusion.column_sums import Joint, agrees, are_rows, are_sums, join, joint_of
from ltc.passes.fusion.draft import Draft, ReadPlace, reaches
from ltc.passes.fusion.index_maps import (
    LOOKUPS,
    VIEWS,
    behind_barrier,
    looked_up,
    offset_of,
    operand_places,
    through_views,
)  # fmt: skip
from ltc.passes.fusion.units import (
    COSTLY,
    LEAVES,
    MOST_MEMBERS,
    MOST_PASSES,
    FusedUnits,
    base_of,
    computes_with_size,
    covers,
    fits,
    has_many_rows,
    is_cheap,
    is_light,
    may_reduce_in,
    open_rows,
    reduced_for,
    times_computed,
)  # fmt: skip
from ltc.support.sizes.choices import by_sample

# Views that the reference takes as they are, without a copy.
FREE_FOR_REFERENCE = frozenset({ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.BARRIER})

MOST_READS = 48  # buffers of one kernel
# Buffers that an epilogue fills. A product stores its results in tiles, a few vectors of each row:
# an update that reads and writes more in such bits takes longer than one that streams by itself.
MOST_STORES_BEHIND = 2


def fuse(
    graph: Graph,
    is_native: Callable[[Node], bool],
    is_product: Callable[[Node], bool] = lambda node: False,
    takes_strides: Callable[[Node], bool] = lambda node: False,
) -> list[Unit]:
    """Return the units that run, in order: kernels, products, and nodes that the reference
    computes.

    Args:
        is_native: True if kernels can compute a node, as far as its op and dtypes go.
        is_product: True if a node is a product that can hold an epilogue.
        takes_strides: True if a product is one of matrices, whose operands may be views of values
            in memory, and whose epilogue may count its rows by several variables.
    """
    return _Fuser(graph, is_native, is_product, takes_strides).run()


class _Fuser:
    def __init__(
        self,
        graph: Graph,
        is_native: Callable[[Node], bool],
        is_product: Callable[[Node], bool],
        takes_strides: Callable[[Node], bool],
    ) -> None:
        self.outputs = graph.outputs
        self.order = schedule(*graph.outputs)
        self.position = {node: i for i, node in enumerate(self.order)}
        self.native = {n for n in self.order if n.op not in LEAVES and is_native(n)}
        self.products = {n for n in self.order if n.op not in LEAVES and is_product(n)}
        self.takes_strides = takes_strides
        self.accesses: dict[Node, tuple[Access, ...]] = {}
        self.parts: dict[Node, dict[int, Node]] = defaultdict(dict)
        self.places: dict[Node, list[ReadPlace]] = defaultdict(list)
        self.in_memory: set[Node] = set()
        self.home: dict[Node, Draft | Node] = {}
        self.needs: dict[Draft | Node, set[Draft | Node]] = defaultdict(set)
        self.readers: dict[Node, set[Draft | Node]] = defaultdict(set)
        self.drafts: list[Draft] = []
        self.by_space: dict[tuple[Any, ...], list[Draft]] = defaultdict(list)
        self.reducing: dict[tuple[Any, ...], list[Draft]] = defaultdict(list)
        self.reference: list[Node] = []

    def run(self) -> list[Unit]:
        self.in_memory.update(self.outputs)
        for node in reversed(self.order):
            if node.op in LEAVES:
                continue
            if node in self.products:
                self._multiply(node)
            elif node.op is ops.GET and node.inputs[0] in self.products:
                self._take_part(node)
            elif node not in self.native:
                self._leave(node)
            elif node in self.in_memory or self.places[node]:
                self._place(node)
        self._join_sums()
        units = FusedUnits(self.position, self.products, self.accesses, self.parts)
        return units.ordered([*self.drafts, *self.reference], self.needs)

    # --- placing ---------------------------------------------------------------------------------

    def _leave(self, node: Node) -> None:
        """The reference computes the node; its operands must be in memory, or free views of it."""
        self.reference.append(node)
        self.home[node] = node
        self._join_readers(node, node)
        for operand in node.inputs:
            self._demand(operand, node)

    def _demand(self, node: Node, reader: Node) -> None:
        while node.op in FREE_FOR_REFERENCE and node not in self.in_memory:
            if self.home.get(node) is not node:
                self.home[node] = node
                self.reference.append(node)
            self.needs[reader].add(node)
            reader, node = node, node.inputs[0]
        self.readers[node].add(reader)
        if node.op not in LEAVES:
            self.in_memory.add(node)

    def _take_part(self, node: Node) -> None:
        """One of several results of a product, which makes its buffer."""
        whole = node.inputs[0]
        self.parts[whole][node.attr("index")] = node
        self.home[node] = whole
        self._join_readers(node, whole)

    def _multiply(self, node: Node) -> None:
        """A product of its own, or in a kernel that reads it, as its epilogue.

        The kernel stores the product too where others want it: a gradient beside its update.
        """
        places = {place.key(): place for place in self.places[node]}
        alone = len(places) == 1 and node not in self.in_memory
        # The last place is that of the reader recorded first, which need not wait for the others.
        followed = (p for p in reversed(places.values()) if self._may_follow(node, p, alone))
        place = next(followed, None)
        unit: Draft | Node = node
        if place is not None:
            unit = place.draft
            unit.product = node
            if not alone:
                self._store(node, unit, offset_of(node, place.index))
        else:
            self.reference.append(node)
            self.home[node] = node
            self._join_readers(node, node)
        self.accesses[node] = tuple(self._access(node, k, unit) for k in range(len(node.inputs)))

    def _may_follow(self, node: Node, place: ReadPlace, alone: bool) -> bool:
        draft = place.draft
        if len(draft.stores) > MOST_STORES_BEHIND or any(map(computes_with_size, draft.members)):
            return False
        is_free = draft.product is None and draft.depth is None and not place.guards
        if not is_free or not any(n.dtype == node.dtype for n in draft.stores):
            return False
        if not alone:
            # A product can not write over what it reads, as an update beside it can.
            updates_operand = any(base_of(n) in draft.reads for n in node.inputs)
            if updates_operand or self._closes_cycle(node, draft, place):
                return False
        if self.takes_strides(node):  # its rows may be counted by several variables
            return draft.space[-1:] == node.shape[-1:] and covers(node, place)
        return draft.space == node.shape and place.index == identity(node.shape)

    def _access(self, node: Node, place: int, unit: Draft | Node) -> Access:
        """Return where a product finds an operand."""
        operand = node.inputs[place]
        base, offset = operand, flattened(identity(operand.shape), operand.shape)
        seen, index = through_views(operand, identity(operand.shape), operand.shape)
        form = offset_of(seen, index)
        forward = self.takes_strides(node) and all(c > 0 for _, c in form.terms)
        filled = base_of(operand).op is ops.CONSTANT
        if node.op is ops.EXTERN:
            pass  # the reference, asked for the error of one that failed, wants what it names
        elif (forward or form == offset) and seen.op not in (ops.CONSTANT, ops.SCALAR):
            base, offset = seen, form
        elif filled and (node.op is ops.INSERT or (node.op.kind == "scatter" and place == 0)):
            base, offset = base_of(operand), ZERO  # it begins filled with one number, or is that
        if behind_barrier(base):
            base = base.inputs[0]
        self.readers[base].add(unit)
        if base.op not in LEAVES:
            self.in_memory.add(base)
        return Access(base, offset)

    def _place(self, node: Node) -> None:
        if self.home.get(node) is node:  # a view that the reference takes too
            self._join_readers(node, node)
            return
        places = {place.key(): place for place in self.places[node]}
        if node.op in VIEWS and node not in self.in_memory:
            return
        stored = node in self.in_memory
        if not stored and is_cheap(node) and all(fits(node, p) for p in places.values()):
            for place in places.values():
                self._absorb(node, place)
            return
        if not stored and len(places) > 1 and self._may_repeat(node, places.values()):
            for place in places.values():
                self._absorb(node, place)
            return
        alone = len(places) == 1 and not stored
        for place in () if is_awaited(node, places.values()) else places.values():
            if self._may_absorb(node, place, alone):
                self._absorb(node, place)
                if not alone:
                    self._store(node, place.draft, offset_of(node, place.index))
                return
        self._begin(node)

    def _begin(self, node: Node) -> None:
        """A kernel of its own, or one beside nodes that read the same over the same space."""
        kept, reduced, depth = node.shape, (), None
        if node.op.kind == "reduce":
            reduced = tuple(node.inputs[0].shape[d] for d in node.attr("dims"))
            depth = len(kept)
        space = (*kept, *reduced)
        draft = self._beside(node, space, depth) or self._along_rows(node, space, depth)
        if draft is None:
            draft = Draft(space, depth)
            self.drafts.append(draft)
            self.by_space[space, depth].append(draft)
        index = identity(kept)
        self._store(node, draft, flattened(index, kept))
        self._absorb(node, ReadPlace(draft, index, ()))

    def _beside(self, node: Node, space: tuple[Any, ...], depth: int | None) -> Draft | None:
        for draft in reversed(self.by_space[space, depth][-4:]):
            has_room = len(draft.members) < MOST_MEMBERS // 2 and draft.passes < MOST_PASSES
            shares = any(base_of(n) in draft.reads or n in draft.members for n in node.inputs)
            if has_room and shares and draft.depth == depth and not self._closes_cycle(node, draft):
                return draft
        return None

    def _along_rows(self, node: Node, space: tuple[Any, ...], depth: int | None) -> Draft | None:
        """A kernel over rows of which the node needs a reduction that the kernel needs as well.

        A loss and its gradient: what the one has read and computed of a row is near for the other.
        """
        for draft in reversed(self.reducing[space][-4:]):
            has_room = len(draft.members) < MOST_MEMBERS // 2 and draft.passes < MOST_PASSES
            is_like = depth in (None, draft.depth) and draft.product is None
            if has_room and is_like and has_many_rows(space[: draft.depth]):
                shared = reduced_for([node], draft, self.native) & reduced_for(
                    draft.members, draft, self.native
                )
                if shared and not self._closes_cycle(node, draft):
                    return draft
        return None

    def _store(self, node: Node, draft: Draft, offset: Affine) -> None:
        draft.stores[node] = offset
        self.home[node] = draft
        self._join_readers(node, draft)

    def _join_readers(self, node: Node, home: Draft | Node) -> None:
        for reader in self._reading(node):
            if reader is not home:
                self.needs[reader].add(home)

    def _reading(self, node: Node) -> set[Draft | Node]:
        return self.readers[node] | {place.draft for place in self.places[node]}

    def _closes_cycle(self, node: Node, draft: Draft, inside: ReadPlace | None = None) -> bool:
        """Return True if the draft, if it stores the node, would wait for one that waits for it."""
        others = set(self.readers[node])
        for place in self.places[node]:
            if inside is None or place.key() != inside.key():
                others.add(place.draft)
        return bool(others) and reaches(self.needs, draft, others)

    # --- may a node be computed where it is read? ------------------------------------------------

    def _may_absorb(self, node: Node, place: ReadPlace, alone: bool) -> bool:
        draft = place.draft
        if not fits(node, place) or node.op in VIEWS:
            return False
        if len(draft.members) >= MOST_MEMBERS or len(draft.reads) >= MOST_READS:
            return False
        if not alone:
            if not covers(node, place) or self._closes_cycle(node, draft, place):
                return False
        if node.op.kind == "reduce":
            return may_reduce_in(node, place)
        return times_computed(place) <= node.size or is_light(node)

    def _may_repeat(self, node: Node, places: Iterable[ReadPlace]) -> bool:
        """Return True if each reader computes the node again, as a backward does with an
        activation.

        It is a function of one value alone, so that this value in memory takes the place of the
        node, and of everything between them: never more is stored, and mostly less.
        """
        if is_narrowest_draw(node):
            return False
        return has_one_source(node, self.position, self.native) and all(
            fits(node, place)
            and len(place.draft.members) < MOST_MEMBERS
            and len(place.draft.reads) < MOST_READS
            and times_computed(place) <= node.size
            for place in places
        )

    # --- computing inside ------------------------------------------------------------------------

    def _absorb(self, node: Node, place: ReadPlace) -> None:
        draft = place.draft
        draft.members[node].add((place.index, place.guards))
        if node.op in LOOKUPS:
            self._keep(looked_up(node, place.index, draft)[0], draft)
        if node.op.kind == "reduce":
            open_rows(node, place)
            draft.passes += 1
            if draft.passes == 1:
                self.reducing[draft.space].append(draft)
        for operand, index, guards in operand_places(node, place.index, place.guards, draft):
            base, index = through_views(operand, index, draft.space)
            if behind_barrier(base):
                self._keep(base.inputs[0], draft)
                continue
            if base.op is ops.CONSTANT or base.op is ops.SCALAR:
                continue
            draft.reads.add(base)
            if base.op is not ops.INPUT:
                if base.op in VIEWS:
                    draft.views.add((base, offset_of(base, index), guards))
                if base.op in VIEWS or not (base in self.native or base in self.products):
                    self.in_memory.add(base)
                self.places[base].append(ReadPlace(draft, index, guards))

    def _keep(self, node: Node, draft: Draft) -> None:
        """The draft reads the node in memory."""
        draft.keep(node)
        self.readers[node].add(draft)
        if node.op not in LEAVES:
            self.in_memory.add(node)

    # --- sums over rows that a kernel makes anyway -----------------------------------------------

    def _join_sums(self) -> None:
        for sums in [draft for draft in self.drafts if are_sums(draft)]:
            for rows in self.drafts:
                joint = self._joint(rows, sums) if are_rows(rows) else None
                if joint is not None:
                    join(rows, sums, joint)
                    self._becomes(sums, rows)
                    break

    def _joint(self, rows: Draft, sums: Draft) -> Joint | None:
        """The space of both as one kernel, where they may be one."""
        if not sums.reads & (rows.reads | set(rows.members)):
            return None
        if len(rows.members) + len(sums.members) > MOST_MEMBERS or sums in self.needs[rows]:
            return None
        joint = joint_of(rows, sums)
        if joint is None or self._waits_beyond(sums, rows) or self._waits_beyond(rows, sums):
            return None
        stored = ((n, p) for n in rows.stores for p in self.places[n] if p.draft is sums)
        kept = any(sums in self.readers[n] for n in rows.stores)
        return joint if not kept and agrees(rows, joint, stored) else None

    def _waits_beyond(self, draft: Draft, other: Draft) -> bool:
        """Return True if a draft waits for another by way of a third."""
        between = self.needs[draft] - {other}
        return any(reaches(self.needs, unit, {other}) for unit in between)

    def _becomes(self, old: Draft, new: Draft) -> None:
        """Merge one draft into another; values that only the two of them read are not stored."""
        self.drafts.remove(old)
        self.home.update(dict.fromkeys(old.stores, new))
        for units in (*self.needs.values(), *self.readers.values()):
            if old in units:
                units.discard(old)
                units.add(new)
        for place in (place for places in self.places.values() for place in places):
            if place.draft is old:
                place.draft = new
        self.needs[new] |= self.needs.pop(old, set())
        self.needs[new].discard(new)
        for node in list(new.stores):
            if node not in self.outputs and self._reading(node) <= {new}:
                del new.stores[node]


# --- computed again by each reader, or not computed at all ------------------------------------

_SAME_SIZE = VIEWS - {ops.BARRIER}  # where they do not repeat or leave out elements

LONGEST_REPEATED = 24  # nodes of a formula that every reader computes again: gelu's has ten
MOST_COSTLY_REPEATED = 2  # functions among them: one takes as long as storing and loading
SMALL_BESIDE = 8  # a value this many times smaller is no burden to read again


def is_awaited(node: Node, places: Iterable[ReadPlace]) -> bool:
    """Return True if a large kernel waits for a number that is soon added up: it waits for no more."""
    if node.op.kind != "reduce" or node.size != 1:
        return False
    size = SMALL_BESIDE * node.inputs[0].size
    return any(prod(place.draft.space) >= size for place in places)


def has_one_source(node: Node, position: Mapping[Node, int], native: Container[Node]) -> bool:
    """Return True if a short formula makes the node of one value, and of values small beside it.

    Args:
        position: The position of every node in the graph's order.
        native: The nodes that kernels can compute.
    """
    frontier, costly = {node}, 0
    for _ in range(LONGEST_REPEATED):
        latest = max(frontier, key=position.__getitem__, default=node)
        if (len(frontier) == 1 and latest is not node) or not frontier:
            return True
        costly += latest.op in COSTLY
        same = latest.op in _SAME_SIZE and latest.size == latest.inputs[0].size
        is_step = latest.op.kind == "elementwise" or same
        if not is_step or latest not in native or costly > MOST_COSTLY_REPEATED:
            return False
        frontier.remove(latest)
        frontier.update(_large_operands(latest, node))
    return False


def is_narrowest_draw(node: Node) -> bool:
    """Return True if a chain makes the node of random bits alone, and nothing in it is as narrow.

    A mask of dropout: its random numbers take eight times its memory, and more to make again.
    """
    latest = node
    for _ in range(LONGEST_REPEATED):
        if latest.op.kind != "elementwise":  # what others read may be several tensors at once
            return False
        large = _large_operands(latest, node)
        if len(large) != 1:
            return False
        (latest,) = large
        if latest.dtype.itemsize <= node.dtype.itemsize:
            return False
        if latest.op is ops.RANDOM_BITS:
            return True
    return False


def _large_operands(latest: Node, node: Node) -> list[Node]:
    """The operands of one node of a formula that are not small beside its result."""
    with by_sample():  # what is computed again is right, small or not
        return [n for n in latest.inputs if SMALL_BESIDE * base_of(n).size > node.size]

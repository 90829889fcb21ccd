"""Groups nodes into loop nests: each value is computed where it is used, or kept in memory.

Nodes are visited from the outputs back, so that whoever reads a node has its place already.  A
node that is read at one index map by one kernel is computed inside it; one that must be in memory
is stored by the kernel that computes it anyway, where there is one; any other begins a kernel.
Views are index maps and cost nothing; a barrier's operand is always in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.loop_nest import ZERO, Access, Affine, Kernel, Product, Store, Unit, flattened, identity
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.passes.fusion.body import Body
from ltc.passes.fusion.column_sums import Joint, agrees, are_rows, are_sums, join, joint_of
from ltc.passes.fusion.draft import Draft, ReadPlace
from ltc.passes.fusion.index_maps import (
    LOOKUPS,
    VIEWS,
    behind_barrier,
    looked_up,
    offset_of,
    operand_places,
    through_views,
)  # fmt: skip
from ltc.passes.fusion.legality import (
    COSTLY,
    FEWEST_ROWS,
    LEAVES,
    MOST_PASSES,
    base_of,
    covers,
    fits,
    is_cheap,
    is_light,
    may_reduce_in,
    open_rows,
    times_computed,
)  # fmt: skip

_SAME_SIZE = VIEWS - {ops.BARRIER}  # where they do not repeat or leave out elements
# Views that the reference takes as they are, without a copy.
FREE_FOR_REFERENCE = frozenset({ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.BARRIER})

MOST_MEMBERS = 160  # nodes of one kernel: code grows with them, and registers do not
MOST_READS = 48  # buffers of one kernel
LONGEST_REPEATED = 24  # nodes of a formula that every reader computes again: gelu's has ten
MOST_COSTLY_REPEATED = 2  # functions among them: one takes as long as storing and loading
SMALL_BESIDE = 8  # a value this many times smaller is no burden to read again
# Buffers that an epilogue fills. A product stores its results in tiles, a few vectors of each row:
# an update that reads and writes more in such bits takes longer than one that streams by itself.
MOST_STORES_BEHIND = 2


def fuse(
    graph: Graph,
    is_native: Callable[[Node], bool],
    is_product: Callable[[Node], bool] = lambda node: False,
    takes_strides: Callable[[Node], bool] = lambda node: False,
) -> list[Unit]:
    """What runs, in order: kernels, products, and nodes that the reference computes.

    is_native      whether kernels can compute a node, as far as its op and dtypes go
    is_product     whether a node is a product that can hold an epilogue
    takes_strides  whether a product is one of matrices, whose operands may be views of what is
                   in memory, and whose epilogue may count its rows by several variables
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
        return self._ordered()

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
        if len(draft.stores) > MOST_STORES_BEHIND:
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
        """Where a product finds an operand."""
        operand = node.inputs[place]
        base, offset = operand, flattened(identity(operand.shape), operand.shape)
        seen, index = through_views(operand, identity(operand.shape), operand.shape)
        form = offset_of(seen, index)
        forward = self.takes_strides(node) and all(c > 0 for _, c in form.terms)
        if node.op is ops.EXTERN:
            pass  # the reference, asked for the error of one that failed, wants what it names
        elif (forward or form == offset) and seen.op not in (ops.CONSTANT, ops.SCALAR):
            base, offset = seen, form
        elif node.op.kind == "scatter" and place == 0 and base_of(operand).op is ops.CONSTANT:
            base, offset = base_of(operand), ZERO  # the result begins filled with one number
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
        if self._is_awaited(node, places.values()):
            self._begin(node)
            return
        for place in places.values():
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
            if has_room and is_like and prod(space[: draft.depth]) >= FEWEST_ROWS:
                shared = self._reduced_for([node], draft) & self._reduced_for(draft.members, draft)
                if shared and not self._closes_cycle(node, draft):
                    return draft
        return None

    def _reduced_for(self, nodes: Iterable[Node], draft: Draft) -> set[Node]:
        """The reductions of the draft's rows that the nodes are made of, or are."""
        rows, waiting = draft.space[: draft.depth], list(nodes)
        seen: set[Node] = set()
        while waiting and len(seen) < MOST_MEMBERS:
            node = waiting.pop()
            is_made = node.op.kind in ("elementwise", "reduce") or node.op in VIEWS
            if is_made and node in self.native and node not in seen:
                seen.add(node)
                waiting.extend(node.inputs)
        return {node for node in seen if node.op.kind == "reduce" and node.shape == rows}

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
        """Whether the draft, if it stores the node, would wait for one that waits for it."""
        others = set(self.readers[node])
        for place in self.places[node]:
            if inside is None or place.key() != inside.key():
                others.add(place.draft)
        return bool(others) and self._reaches(draft, others)

    def _reaches(self, start: Draft | Node, goals: set[Any]) -> bool:
        seen, waiting = {start}, [start]
        while waiting:
            unit = waiting.pop()
            if unit in goals:
                return True
            new = self.needs[unit] - seen
            seen |= new
            waiting.extend(new)
        return False

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

    def _is_awaited(self, node: Node, places: Iterable[ReadPlace]) -> bool:
        """Whether a large kernel waits for a number that is soon added up: it waits for no more."""
        if node.op.kind != "reduce" or node.size != 1:
            return False
        size = SMALL_BESIDE * node.inputs[0].size
        return any(prod(place.draft.space) >= size for place in places)

    def _may_repeat(self, node: Node, places: Iterable[ReadPlace]) -> bool:
        """Whether each reader computes the node again: what a backward needs of an activation.

        It is a function of one value alone, so that this value in memory takes the place of the
        node, and of everything between them: never more is stored, and mostly less.
        """
        if self._is_narrowest_draw(node):
            return False
        return self._has_one_source(node) and all(
            fits(node, place)
            and len(place.draft.members) < MOST_MEMBERS
            and len(place.draft.reads) < MOST_READS
            and times_computed(place) <= node.size
            for place in places
        )

    def _has_one_source(self, node: Node) -> bool:
        """Whether a short formula makes the node of one value, and of what is small beside it."""
        frontier, costly = {node}, 0
        for _ in range(LONGEST_REPEATED):
            latest = max(frontier, key=self.position.__getitem__, default=node)
            if (len(frontier) == 1 and latest is not node) or not frontier:
                return True
            costly += latest.op in COSTLY
            same = latest.op in _SAME_SIZE and latest.size == latest.inputs[0].size
            is_step = latest.op.kind == "elementwise" or same
            if not is_step or latest not in self.native or costly > MOST_COSTLY_REPEATED:
                return False
            frontier.remove(latest)
            frontier.update(n for n in latest.inputs if SMALL_BESIDE * base_of(n).size > node.size)
        return False

    def _is_narrowest_draw(self, node: Node) -> bool:
        """Whether a chain makes the node of random bits alone, and nothing in it is as narrow.

        A mask of dropout: its random numbers take eight times its memory, and more to make again.
        """
        latest = node
        for _ in range(LONGEST_REPEATED):
            if latest.op.kind != "elementwise":  # what others read may be several tensors at once
                return False
            large = [n for n in latest.inputs if SMALL_BESIDE * base_of(n).size > node.size]
            if len(large) != 1:
                return False
            (latest,) = large
            if latest.dtype.itemsize <= node.dtype.itemsize:
                return False
            if latest.op is ops.RANDOM_BITS:
                return True
        return False

    # --- computing inside ------------------------------------------------------------------------

    def _absorb(self, node: Node, place: ReadPlace) -> None:
        draft = place.draft
        draft.members[node].add((place.index, place.guards))
        if node.op in LOOKUPS:
            self._keep(looked_up(node, place.index, draft.space)[0], draft)
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
                if base.op in VIEWS or not (base in self.native or base in self.products):
                    self.in_memory.add(base)
                self.places[base].append(ReadPlace(draft, index, guards))

    def _keep(self, node: Node, draft: Draft) -> None:
        """The draft reads the node in memory."""
        draft.reads.add(node)
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
        """Whether a draft waits for another by way of a third."""
        between = self.needs[draft] - {other}
        return any(self._reaches(unit, {other}) for unit in between)

    def _becomes(self, old: Draft, new: Draft) -> None:
        """What was one draft's is another's; what only the two of them read is not stored."""
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

    # --- the result ------------------------------------------------------------------------------

    def _ordered(self) -> list[Unit]:
        """Every unit after those it needs, otherwise as the graph was recorded."""
        units: list[Draft | Node] = [*self.drafts, *self.reference]
        units.sort(key=self._time)
        done: set[Any] = set()
        result: list[Unit] = []
        for unit in units:
            waiting = [(unit, False)]
            while waiting:
                one, needs_done = waiting.pop()
                if one in done:
                    continue
                if needs_done:
                    done.add(one)
                    result.append(self._unit(one))
                else:
                    waiting.append((one, True))
                    waiting.extend((u, False) for u in self.needs[one] if u not in done)
        return result

    def _unit(self, unit: Draft | Node) -> Unit:
        if isinstance(unit, Node):
            return self._product(unit, None) if unit in self.products else unit
        kernel = self._kernel(unit)
        if unit.product is None:
            return kernel
        return self._product(unit.product, kernel)

    def _product(self, node: Node, epilogue: Kernel | None) -> Product:
        results: tuple[Node | None, ...] = (node,)
        if not isinstance(node.type, TensorType):
            results = tuple(self.parts[node].get(i) for i in range(len(node.type)))
        return Product(node, self.accesses[node], epilogue, results)

    def _time(self, unit: Draft | Node) -> int:
        if isinstance(unit, Node):
            return self.position[unit]
        return max(self.position[n] for n in (*unit.stores, *unit.sums))

    def _kernel(self, draft: Draft) -> Kernel:
        body = Body(draft, self.home)
        stores = tuple(
            Store(node, body.stored(node, offset), offset) for node, offset in draft.stores.items()
        )
        sums = tuple(
            Store(node, body.operand(*place), offset, node.op)
            for node, (offset, place) in draft.sums.items()
        )
        depth = len(draft.space) if draft.depth is None else draft.depth
        return Kernel(draft.space, depth, stores + sums)

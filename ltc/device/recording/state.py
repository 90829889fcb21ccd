"""An ltc tensor: a state that hangs on its storage object.

The storage's Python object lives as long as the C++ storage, so everything that shares the storage
(detach, .data, nn.Parameter, a tensor saved for backward) shares the state without any Python.
Tensors always appear contiguous; a view is a state of its own that knows its base.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import ref

import torch

from ltc.aten.call import CallResult
from ltc.device.torch_device import empty_tensor, storage_of
from ltc.runtime.buffer import Buffer
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.reference_counts import IN_TWO_LISTS, each_holder_counts, reference_counts

_aten = torch.ops.aten
_EXPAND = _aten.expand.default
_REORDERINGS = frozenset(
    {  # views of all elements of their base, each once
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.detach.default,
        _aten.alias.default,
    }
)
_FEW = 16  # ended views that are not worth forgetting
_ids = itertools.count(1)
_views_change = renewed_lock(globals(), "_views_change")  # threads may share a base


class State:
    """The value of one tensor.

    A view whose value is None is stale: it is derived from its base again when read.

    Attributes:
        value: Its Value in the recording of some recorder, or None where nothing is pending.
        device: The Device it is on.
        buffer: The Buffer that holds it, or None where it has to be computed first.
        views: Weak references to the states that are views of the same base (shared by the base and
            all of them), or None where there is no view.
        base: The state this one is a view of, or None.
        chain: The views from its base to it: (overload, arguments, keywords, output index) each.
        base_storage: The base's storage, which holds its value while the core has that; unset before.
    """

    __slots__ = (
        "value", "device", "buffer", "views", "base", "chain", "number", "number_in_core",
        "base_storage", "__weakref__",
    )  # fmt: skip
    value: CallResult | None
    device: Any  # a Device, whose module imports this one
    buffer: Buffer | None
    views: list[ref[State]] | None
    base: State | None
    chain: tuple[Any, ...]
    number: int
    number_in_core: int
    base_storage: Any

    def __getattr__(self, name: str) -> Any:
        """Take the value of the state from the core, if it is there.

        Python calls this only for an empty slot, so that a read of a filled slot costs nothing.
        """
        if name not in ("value", "buffer") or not self.is_in_core:
            raise AttributeError(name)
        take(self)
        return getattr(self, name)

    @property
    def is_in_core(self) -> bool:
        """True if the core has the value: then this state has neither value nor buffer."""
        try:
            _value(self)
        except AttributeError:
            return True
        return False

    @property
    def tensor_id(self) -> int:
        """A number of its own, given when first asked for: 1, 2, …"""
        try:
            return self.number
        except AttributeError:
            self.number = next(_ids)
            return self.number

    @property
    def type(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype; of one that is no stale view."""
        holder: Any = self.value or self.buffer
        return holder.shape, holder.dtype

    @property
    def is_expanded(self) -> bool:
        """Return True if it is a view through one that shows elements several times."""
        return self.base is not None and any([link[0] is _EXPAND for link in self.chain])

    @property
    def is_reordering(self) -> bool:
        """True if a view shows all elements of its base, each once."""
        return all([link[0] in _REORDERINGS for link in self.chain])

    def add_view(self, view: State) -> None:
        """`view` and all views of the same base learn of each other's writes from now on."""
        views = view.views = self.views
        if views is not None:
            views.append(ref(view))  # in one step: no other thread's is lost
        if views is None or self.views is not views:  # the first, or one of an ended list
            with _views_change:
                if self.views is None:
                    self.views = []
                self.views.append(ref(view))
                view.views = self.views

    def leave_base(self) -> None:
        """Make a view a tensor of its own, of the value that it has.

        Its base's list of views keeps an entry until ended ones are forgotten.
        """
        self.base = self.views = self.base_storage = None
        self.chain = ()

    def living_views(self) -> list[State]:
        """Return all views of a base that are held; ended ones are forgotten if there are many."""
        views = [view() for view in list(self.views or ())]  # a copy: another thread may add one
        living = [view for view in views if view is not None and view.base is not None]
        if len(views) > 2 * len(living) + _FEW:
            self.forget_ended_views()
        return living

    def forget_ended_views(self) -> None:
        """Drop a base's references to views that are gone, or have left it."""
        with _views_change:
            views = self.views
            if views is None:  # another thread was first
                return
            for place in reversed(range(len(views))):
                view = views[place]()
                if view is None or view.base is None:
                    del views[place]  # one by one: another thread may add one meanwhile
            if not views:
                self.views = None
                if views:  # one was added just before
                    self.views = views


_value = vars(State)["value"].__get__


def take(state: State) -> None:
    """Take the value of a state from the core; core_seam.py puts the function here."""


def in_python(state: State) -> State:
    """Return the state once Python has its value, and knows its views: to write to it is to have both."""
    if state.is_in_core:
        take(state)
    return state


def new_state(value: CallResult | None, device: Any) -> State:
    """The state of a tensor that is no view.

    A function, since `State` has no constructor: generated kernels spell these lines out, which
    takes half the time of a call.
    """
    state = State()
    state.value, state.device = value, device
    state.buffer = state.views = state.base = None
    return state


def is_second(tensor: torch.Tensor) -> bool:
    """Return True if its storage is not that of its state: it may be gone while the state is alive."""
    return hasattr(storage_of(tensor), "is_second")


def liveness_is_as_assumed() -> bool:
    """Return True if a reference count tells a live state from a dead one on this interpreter."""
    tensor = empty_tensor((1,), torch.float32, 0)
    storage_of(tensor).lazy = State()
    states = [storage_of(tensor).lazy]
    (alive,) = reference_counts(states + [])
    del tensor
    (dead,) = reference_counts(states + [])
    return each_holder_counts() and alive == IN_TWO_LISTS + 1 and dead == IN_TWO_LISTS

"""Bring the device into being.  Importing this module does it, once, in the order that works.

One CPU backward first (then the autograd engine starts no device thread and fork stays legal), then
the name, hooks and guard, then kernels, autocast, and the patches of torch's Python code.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ltc.aten.schema import schema_of
from ltc.backends.interface import BackendRegistrar
from ltc.device import core_seam, torch_device
from ltc.device.dynamo import introduction
from ltc.device.hooks import (
    autocast,
    backend_settings,
    checked_values,
    module,
    native_classes,
    patches,
)
from ltc.device.ops import (
    adam_overload,
    copies,
    ctc_loss,
    decompositions,
    linear_layers,
    pickling,
    recurrence_overloads,
    recurrent_layers,
    sdpa,
    sdpa_overloads,
    sparse_coo,
    storages,
)
from ltc.device.ops.quick_copies import quickly
from ltc.device.recording import gradient_views
from ltc.device.recording.fast_path import build_kernel, lazily_built
from ltc.device.recording.recorder import devices
from ltc.device.recording.signature import Signature
from ltc.device.recording.state import liveness_is_as_assumed
from ltc.device.recording.stopped_threads import stop_other_threads
from ltc.device.recording.sync import exclusively
from ltc.device.recording.tensors import device_among
from ltc.errors import LtcError
from ltc.native.core import CORE, KERNEL_KEY
from ltc.runtime.background import compile_behind
from ltc.runtime.executor import all_executors
from ltc.runtime.program_cache import PROGRAMS
from ltc.support import torch_private
from ltc.support.process.held_signals import held
from ltc.tracebacks import entrance, shorten

# Left to C++: they share the storage, so the state, without any Python; or mean sparse, quantized
# and nested tensors, which ltc devices do not hold.
KEPT_IN_CPP = frozenset(
    """
    detach alias lift lift_fresh is_pinned _pin_memory detach_ set_data _version output_nr
    requires_grad_ is_same_size _has_same_storage_numel rename_ rename _fw_primal _make_dual
    _unpack_dual _make_dual_copy resize_as_sparse_ data _values values indices _indices
    crow_indices col_indices ccol_indices row_indices _coalesced_ _nnz dense_dim sparse_dim
    _nested_get_values _nested_view_from_jagged _cudnn_init_dropout_state retain_grad _lazy_clone
    qscheme q_scale q_zero_point
""".split()
)

skipped: list[str] = []  # overloads this torch lists but cannot give, and autocast names it lacks
_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def _library(namespace: str, kind: str = "IMPL") -> torch.library.Library:
    _libraries.append(torch.library.Library(namespace, kind))
    return _libraries[-1]


def _register_kernels(library: torch.library.Library) -> None:
    special = {
        **{
            name: quickly(name, _exclusive(kernel))
            for name, kernel in {**copies.KERNELS, **storages.KERNELS}.items()
        },
        **{name: _without_modes(k) for name, k in decompositions.KERNELS.items()},
        **{name: _without_modes(k) for name, k in recurrent_layers.KERNELS.items()},
        **{name: _without_modes(k) for name, k in sdpa.KERNELS.items()},
        **{name: _without_modes(k) for name, k in decompositions.HISTOGRAMS.items()},
        **{name: _without_modes(k) for name, k in ctc_loss.KERNELS.items()},
        "expand": _expand(),
        "_embedding_bag_backward": _without_modes(
            sparse_coo.bag_gradient(lazily_built("aten::_embedding_bag_backward"))
        ),
    }
    composite = set(torch_private.overloads_with_kernel("CompositeImplicitAutograd"))
    for name in torch_private.all_overload_names():
        rest = name.removeprefix("aten::")
        if rest == name or rest in special or rest.partition(".")[0] in KEPT_IN_CPP:
            continue
        if name in composite:
            continue
        if schema_of(name) is None:
            skipped.append(name)
        else:
            library.impl(rest, lazily_built(name), KERNEL_KEY)
    for rest, kernel in special.items():
        if schema_of(f"aten::{rest}") is not None:
            library.impl(rest, kernel, KERNEL_KEY)
        else:
            skipped.append(f"aten::{rest}")
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")


def _register_sparse_kernels(
    aten: torch.library.Library, everywhere: torch.library.Library
) -> None:
    for name, kernel in sparse_coo.KERNELS.items():
        aten.impl(name, _without_modes(kernel), "SparsePrivateUse1")
    everywhere.fallback(entrance(sparse_coo.refuse), "SparsePrivateUse1", with_keyset=False)


def _expand():
    """aten::expand: a view, but where autograd's formulas repeat elements a value of its own.

    There it is the gradient of a sum.  Always contiguous as it looks, the engine would make it
    `p.grad` without the copy it makes of a strided one, and no one could write to that gradient.
    """
    view = build_kernel(Signature(torch.ops.aten.expand.default))
    copy = build_kernel(Signature(torch.ops.aten.expand_copy.default))

    def kernel(self: torch.Tensor, size: Sequence[int], *, implicit: bool = False):
        try:
            made = view
            if torch_private.graph_task() != -1 and _repeats(self.shape, size):
                made = copy if gradient_views.formula_calls() else view
            return made(self, size, implicit=implicit)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def _repeats(shape: Sequence[int], size: Sequence[int]) -> bool:
    """Return True if expansion from `shape` to `size`, -1 for an extent kept, repeats elements."""
    lead = len(size) - len(shape)
    kept = (*[1] * lead, *shape)
    return prod(kept) != prod([own if new == -1 else new for own, new in zip(kept, size)])


def _without_modes(kernel: Callable[..., Any]):
    """A hand-written kernel calls torch itself; a user's function mode is not meant for that."""

    def guarded(*args: Any, **kwargs: Any):
        try:
            with torch_private.plain_functions():
                return kernel(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return guarded


def _exclusive(kernel: Callable[..., Any]):
    """A kernel that changes the recording by hand: no other thread may end it meanwhile."""

    def guarded(*args: Any, **kwargs: Any):
        try:
            recorder = device_among([*args, kwargs.get("device")]).recorder()
            with torch_private.plain_functions():
                return exclusively(recorder, lambda: kernel(*args, **kwargs))
        except BaseException as error:
            shorten(error)
            raise

    return guarded


def _other_namespaces(library: torch.library.Library) -> None:
    """Custom ops that have a CPU kernel only run too: recorded where they have a fake."""
    built: dict = {}

    def kernel(overload: Any, *args: Any, **kwargs: Any):
        if overload not in built:
            built[overload] = build_kernel(Signature(overload))
        return built[overload](*args, **kwargs)

    library.fallback(entrance(kernel), "PrivateUse1", with_keyset=False)


def _after_fork_in_child() -> None:
    for executor in all_executors():
        executor.after_fork_in_child()
    for device in devices():
        device.after_fork_in_child()
    PROGRAMS.after_fork_in_child()


def _prepare_to_exit() -> None:
    """Let what runs end, so that no thread works on while Python takes itself apart.

    An error that no mark or read has raised is printed as an uncaught one is.
    """
    stop_other_threads()
    for executor in all_executors():
        executor.wait()
    compile_behind.end()
    BackendRegistrar.prepare_to_exit()
    for executor in all_executors():
        failed = executor.unreported()
        if failed is not None:
            try:
                failed.raise_it()
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)


def _register() -> None:
    seed = torch_device.register_device(module.torch_module())
    torch_device.self_test()
    if not liveness_is_as_assumed():
        raise LtcError(
            "This Python counts references in a way that ltc does not know, so ltc cannot determine "
            "which tensors are alive. Use a regular (not a free-threaded) CPython, 3.11 to "
            f"3.14: this one is {sys.implementation.name} {sys.version.split()[0]}."
        )
    aten, everywhere = _library("aten"), _library("_")
    own = _library("ltc", "DEF")
    sdpa_overloads.define(own)
    recurrence_overloads.define(own)
    adam_overload.define(own)
    ctc_loss.define(own)
    checked_values.define(own)
    _register_kernels(aten)
    _register_sparse_kernels(aten, everywhere)
    sdpa.install(aten)
    recurrent_layers.install_cells(aten)
    recurrent_layers.install(aten)
    linear_layers.install(aten)
    checked_values.install(aten)
    _other_namespaces(everywhere)
    skipped.extend(autocast.install(aten, everywhere))
    pickling.install()
    storages.install()
    native_classes.install()
    backend_settings.install()
    patches.install()
    introduction.install()
    if CORE is not None:
        core_seam.install(CORE)
    if seed is not None:
        module.manual_seed_all(seed)
    held.watch()
    os.register_at_fork(after_in_child=_after_fork_in_child)
    atexit.register(_prepare_to_exit)


_register()

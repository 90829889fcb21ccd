"""Joint actions of replicas on values of any kind: reduce them, or act on some replicas only."""

from __future__ import annotations

import builtins
import io
import pickle
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.distributed import world
from ltc.distributed.rendezvous import rendezvous
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.torch_private import plain_functions
from ltc.tracebacks import entrance
from ltc.training_loop import transfer

_loading = renewed_lock(globals(), "_loading")  # what is allowed, is so for all threads at once


@entrance
def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list], Any]) -> Any:
    """`reduce_fn` of the list of everyone's `data`, in ordinal order, its tensors on the CPU.

    Every replica calls it and gets the same.

    Args:
        tag: Names the exchange: the same on every replica.
        data: Tensors, numbers, texts, containers of them, and objects of classes that this
            replica's own data has too; lazy tensors arrive as CPU tensors.
        reduce_fn: A function of the list of all replicas' `data`.

    Returns:
        The result of `reduce_fn`, the same on every replica.

    Raises:
        PeerFailure: If they call it with other tags, or one does not come.
        TypeError: If what another one sent needs more: nothing that arrives may run code of its
            sender's choice.

    Example:
        >>> ltm.mesh_reduce("accuracy", 0.75, lambda all: sum(all) / len(all))
        0.75
    """
    return reduce_fn(values_of_all(tag, transfer.to_cpu(data)))


def values_of_all(tag: str, value: Any) -> list:
    """Everyone's `value`, in ordinal order; raises as `mesh_reduce`.

    Example:
        >>> from ltc.distributed.mesh import values_of_all
        >>> values_of_all("seeds", 17)
        [17]
    """
    file = io.BytesIO()
    torch.save(value, file)
    payloads = rendezvous(tag, file.getvalue())
    with plain_functions(), _loading, torch.serialization.safe_globals(_allowed(file.getvalue())):
        return [_loaded(tag, payload) for payload in payloads]


def _loaded(tag: str, payload: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(payload), weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"The data that another replica sent as {tag!r} cannot be unpickled: it has classes that "
            f"this replica's own data lacks. Send tensors, numbers, strings and containers of them, "
            f"or allow the class with torch.serialization.add_safe_globals on every replica: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def _allowed(own: bytes) -> list:
    """Return the types that others' data may hold, beside those that PyTorch takes for harmless.

    Args:
        own: This replica's data, as torch.save has written them: its user chose their types.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(own))
    wanted = [frozenset, *_of_numpy(), *[(_named(name), name) for name in names]]
    there = torch.serialization.get_safe_globals()  # and these are to stay, when the block ends
    return [one for one in wanted if one not in there]


def _of_numpy() -> list:
    """Return the types of NumPy's numbers and arrays."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return []
    scalar, _ = numpy.float64(0).__reduce__()
    array, *_ = numpy.zeros(1).__reduce__()
    dtypes = [one for one in vars(numpy.dtypes).values() if isinstance(one, type)]
    return [scalar, array, numpy.ndarray, numpy.dtype, *dtypes]


def _named(name: str) -> Any:
    """A class or function by its module and name; that of a builtin may lack the former."""
    found = getattr(builtins, name, None)
    return pkgutil.resolve_name(name) if found is None else found


def do_on_ordinals(target: Callable, data: tuple = (), ordinals: Sequence[int] = (0,)) -> Any:
    """`target(*data)`, with tensors on the CPU, on the listed ordinals; None on the others.

    Every replica returns after all have called.

    Args:
        target: The function to call.
        data: Its lazy tensors are computed on every replica, and are CPU tensors in the call.
        ordinals: The ordinals on which it is called.

    Returns:
        The result of `target`; None on other ordinals.

    Raises:
        PeerFailure: If one does not come.

    Example:
        >>> ltm.do_on_ordinals(print, ("epoch", torch.ones(2, device="ltc").sum()))
        epoch tensor(2.)
    """
    chosen = world.place().ordinal in ordinals
    transfer.materialize([x for x in data if isinstance(x, torch.Tensor)])
    result = target(*transfer.to_cpu(data)) if chosen else None
    rendezvous("ltc.do_on_ordinals")
    return result

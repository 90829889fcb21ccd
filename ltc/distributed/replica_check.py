"""Whether replicas still hold the same parameters: a bit that flips in one of them stays there."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping

import torch

from ltc.checkpointing.storage_sharing import as_bytes
from ltc.distributed.rendezvous import rendezvous
from ltc.errors import LtcError
from ltc.support.torch_private import plain_functions
from ltc.tracebacks import entrance
from ltc.utils import transfer


class ReplicasDiffer(LtcError):
    """Replicas hold different values of what should be the same.

    names     of the tensors that differ, in the model's order
    ordinals  of the replicas that hold something else than most do; of two replicas, both

    >>> def replica(rank):
    ...     try:
    ...         ltm.check_replicas({"scale": torch.full((), rank, device="ltc")})
    ...     except ltm.ReplicasDiffer as error:
    ...         return error.names, error.ordinals
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [(['scale'], [0, 1]), (['scale'], [0, 1])]
    """

    def __init__(self, message: str, names: list[str], ordinals: list[int]) -> None:
        super().__init__(message)
        self.names, self.ordinals = names, ordinals

    def __reduce__(self) -> tuple:  # exceptions travel between ranks
        return type(self), (str(self), self.names, self.ordinals)


@entrance
def check_replicas(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Raise ReplicasDiffer, on every replica, where a parameter has not the same bits on all.

    model  its parameters are looked at; or tensors by name, such as `model.state_dict()`

    Every replica calls it, in the same place, every thousand steps say. It reads all parameters and
    exchanges eight bytes for each. Buffers are not looked at where a model is given: statistics of
    batches differ by right.
    Raises PeerFailure where a replica does not come.

    >>> model = torch.nn.Linear(4, 2).to("ltc")
    >>> ltm.check_replicas(model)
    """
    tensors = model if isinstance(model, Mapping) else dict(model.named_parameters())
    with plain_functions(), torch.no_grad():
        values = transfer.to_cpu([tensor.detach() for tensor in tensors.values()])
        mine = {name: _digest(value) for name, value in zip(tensors, values)}
    payloads = rendezvous("ltc.check_replicas", json.dumps(mine).encode())
    _compare([json.loads(payload) for payload in payloads])


def _digest(value: torch.Tensor) -> str:
    """Of dtype, shape and bits."""
    digest = hashlib.blake2b(f"{value.dtype} {list(value.shape)} ".encode(), digest_size=8)
    digest.update(as_bytes(value).numpy().data)
    return digest.hexdigest()


def _compare(replicas: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for digests in replicas for name in digests))
    differing = [name for name in names if len({one.get(name) for one in replicas}) > 1]
    if not differing:
        return
    held = [one.get(differing[0]) for one in replicas]
    usual, count = collections.Counter(held).most_common(1)[0]
    is_clear = 2 * count > len(held)
    ordinals = [k for k, digest in enumerate(held) if digest != usual or not is_clear]
    others = f"the other {count}" if is_clear else "each other"
    who = (
        f"Replica {ordinals[0]} differs"
        if len(ordinals) == 1
        else f"Replicas {_listed(ordinals)} differ"
    )
    raise ReplicasDiffer(
        f"{who} from {others} in {differing[0]!r}, {_counted(differing)} not the same bits on all "
        f"{len(replicas)} replicas. What "
        f"all compute is the same, so either a replica's program did something of its own (other "
        f"initial values, a step that the others left out), or its memory is at fault. Begin again "
        f"from a checkpoint; `broadcast_master_param` makes them equal.",
        differing,
        ordinals,
    )


def _listed(ordinals: list[int]) -> str:
    """ "0, 2 and 3"."""
    return f"{', '.join(map(str, ordinals[:-1]))} and {ordinals[-1]}"


def _counted(names: list[str]) -> str:
    more = len(names) > 1
    return f"the first of {len(names)} tensors that are" if more else "the only tensor that is"

"""How a sum gets across the hosts: by the chunked ring, or by the backend's own all_reduce.

Which is faster depends on the network, the number of hosts and the size, so both are timed.  They
add in different orders, so a choice once made stays, and what was timed is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

RING, BACKEND = "ring", "backend"
ENGINES = (RING, BACKEND)
# Others are the ring's: gloo's min and max lose NaN, and it rounds half precision in its own way.
SUMMED_BY_BACKEND = (torch.float32, torch.float64, torch.int32, torch.int64)
MOST_TIMED_BYTES = 8 << 20  # beyond it a sum takes as long as its bytes
_ROUNDS = 3

_log = logging.getLogger("ltc")


class InterHostChoice:
    """The choice of one replica, the same on every member of a group.

    forced  RING or BACKEND: that one, wherever it can; "" to find out by timing
    """

    def __init__(self, forced: str = "") -> None:
        self.forced = forced
        self._chosen: dict[tuple, str] = {}  # by group and power of two of the bytes

    def engine(
        self,
        members: tuple[int, ...],
        is_first: bool,
        kind: str,
        flat: torch.Tensor,
        run: Callable[[str, torch.Tensor], None],
        slowest: Callable[[list[float]], list[float]],
    ) -> str:
        """The engine for `flat`. Times both, on a copy, where the group has none for such a size.

        run      reduces a tensor by one of the engines
        slowest  each number's largest among the members: they must come to the same choice
        """
        if kind != "sum" or flat.dtype not in SUMMED_BY_BACKEND or not flat.numel():
            return RING
        if self.forced:
            return self.forced
        key = (members, min(flat.nbytes, MOST_TIMED_BYTES).bit_length())
        if key not in self._chosen:
            sample = torch.zeros_like(flat[: MOST_TIMED_BYTES // flat.itemsize])
            seconds = slowest([_fastest(engine, sample, run) for engine in ENGINES])
            self._chosen[key] = engine = ENGINES[seconds.index(min(seconds))]
            if is_first:
                _log.info(
                    "sums of %d KiB among %s: ring %.2f ms, backend %.2f ms; %s from now on",
                    sample.nbytes >> 10,
                    f"{len(members)} hosts",
                    *[s * 1e3 for s in seconds],
                    engine,
                )
        return self._chosen[key]


def _fastest(engine: str, sample: torch.Tensor, run: Callable[[str, torch.Tensor], None]) -> float:
    run(engine, sample)  # connects
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run(engine, sample)
        times.append(time.perf_counter() - started)
    return min(times)

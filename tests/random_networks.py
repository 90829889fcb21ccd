"""Random networks by their seeds: whether one fails, and the smallest that fails like it."""

from __future__ import annotations

from collections.abc import Callable

from tests.networks.compose import drawn_network
from tests.networks.judge import Impossible, Verdict, judged
from tests.networks.network import Network
from tests.networks.shrink import shrunk


def tried(seed: int) -> tuple[Network, Verdict]:
    """The network of a seed and what became of it; of those the CPU refuses, a variation."""
    variation = 0
    while True:
        network = drawn_network(seed, variation)
        try:
            return network, judged(network)
        except Impossible:
            variation += 1


def failure_of(seed: int) -> str | None:
    """What is wrong with network number `seed` on ltc, or None."""
    _, verdict = tried(seed)
    return str(verdict) or None


def smallest(
    network: Network, verdict: Verdict, found: Callable[[Network], object] = lambda network: None
) -> Network:
    """The smallest network that fails in the same way: wrong, or raising the same kind of error.

    found  is told of every smaller one on the way
    """
    return shrunk(network, _failing_like(verdict), found=found)


def _failing_like(verdict: Verdict) -> Callable[[Network], bool]:
    kind = _kind(verdict)

    def fails(network: Network) -> bool:
        try:
            return _kind(judged(network)) == kind
        except Impossible:
            return False

    return fails


def _kind(verdict: Verdict) -> str:
    """What two failures have in common: an error's type, or being wrong."""
    if verdict.raised:
        return verdict.raised.split(":")[0]
    return "wrong" if verdict.wrong else ""

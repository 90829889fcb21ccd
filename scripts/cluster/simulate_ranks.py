"""Simulate start-up, reduction and agreement as ranks are added: real code over a modelled wire.

Every rank is a thread that runs the package's own rendezvous and schedules; a message takes LATENCY
plus its bytes over BANDWIDTH, in a time that each rank keeps for itself, so the result does not
depend on how the threads are scheduled.

    python scripts/cluster/simulate_ranks.py            # 2 to 4096 ranks
    python scripts/cluster/simulate_ranks.py --most 64
"""

from __future__ import annotations

import argparse
import collections
import queue
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from ltc.distributed.rendezvous import gather_payloads
from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.collective_ops import Exchange, reduce
from ltc.distributed.transport.wire import Share

INSIDE = (2e-6, 10e9)  # seconds, bytes per second: shared memory of one host
ACROSS = (30e-6, 1.25e9)  # a 10 Gbit/s network
RANKS_PER_HOST = 8
STACK_BYTES = 256 << 10
REDUCED_BYTES = 1 << 20


class Network:
    """The links of all ranks, and what went over them."""

    def __init__(self, ranks: int, per_host: int = RANKS_PER_HOST) -> None:
        self.ranks, self.per_host = ranks, min(per_host, ranks)
        self._links: dict = collections.defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def link(self, sender: int, receiver: int) -> queue.SimpleQueue:
        with self._lock:
            return self._links[sender, receiver]

    def cost(self, sender: int, receiver: int, nbytes: int) -> float:
        same = sender // self.per_host == receiver // self.per_host
        latency, bandwidth = INSIDE if same else ACROSS
        return latency + nbytes / bandwidth


class ModelledWire:
    """One rank's end: a clock of its own, and counts."""

    message_bytes = 512 << 10
    hop_bytes = collective_schedule.HOP_BYTES_OF_NETWORK

    def __init__(self, network: Network, replica: int) -> None:
        self.network, self.replica = network, replica
        self.replicas, self.per_host = network.ranks, network.per_host
        self.seconds = 0.0
        self.messages = self.bytes = 0

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        return Share(flat, is_copy=False)

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        self.messages += 1
        self.bytes += part.nbytes
        arrives = self.seconds + self.network.cost(self.replica, receiver, part.nbytes)
        # a sender is busy for as long as its bytes take to leave
        self.seconds += self.network.cost(self.replica, receiver, part.nbytes) - INSIDE[0]
        self.network.link(self.replica, receiver).put((part.clone(), tag, arrives))

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        part, found, arrives = self.network.link(sender, self.replica).get(timeout=600)
        assert found == tag and part.nbytes == like.nbytes
        self.seconds = max(self.seconds, arrives)
        return part

    def give_back(self, sender: int) -> None:
        """Do nothing: it has a copy."""

    def finish(self) -> None:
        """A message is on its way at once."""


def run(ranks: int, action) -> list[ModelledWire]:
    """`action(wire)` in a thread for each rank; the wires, with what they counted."""
    network = Network(ranks)
    wires = [ModelledWire(network, rank) for rank in range(ranks)]
    before = threading.stack_size(STACK_BYTES)
    threads = [threading.Thread(target=action, args=(wire,)) for wire in wires]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    return wires


def rendezvous(wire: ModelledWire) -> None:
    found = gather_payloads(
        wire, tuple(range(wire.replicas)), wire.replica, 1, b"%d" % wire.replica
    )
    assert found == [b"%d" % rank for rank in range(wire.replicas)]


def reduction(wire: ModelledWire) -> None:
    x = torch.full((REDUCED_BYTES // 4,), float(wire.replica % 7))
    exchange = Exchange(wire, tuple(range(wire.replicas)), wire.replica, 1)
    reduce(exchange, "max", x, x)
    assert float(x[0]) == min(6, wire.replicas - 1)


def ring_alone(hosts: int) -> tuple[int, float]:
    """(messages, seconds) of a ring among hosts by its schedule, every member doing the same."""
    share = REDUCED_BYTES // 4 // RANKS_PER_HOST
    steps = collective_schedule.ring_all_reduce(0, hosts, share, ModelledWire.message_bytes // 4)
    sent = [b - a for action, _, a, b in steps if action == collective_schedule.SEND]
    return len(sent), sum(ACROSS[0] + 4 * n / ACROSS[1] for n in sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=4096, help="ranks of the largest run")
    parser.add_argument(
        "--most-reduced", type=int, default=128, help="ranks of the largest reduction"
    )
    options = parser.parse_args()
    print("ranks | rendezvous: ms, most messages of a rank | all_reduce 1 MiB: ms, most messages")
    ranks = 2
    while ranks <= options.most:
        met = run(ranks, rendezvous)
        row = f"{ranks:5} | {_ms(met):9.3f} {max(w.messages for w in met):5}"
        if ranks <= options.most_reduced:
            reduced = run(ranks, reduction)
            row += f" | {_ms(reduced):9.3f} {max(w.messages for w in reduced):6}"
        else:
            messages, seconds = ring_alone(ranks // RANKS_PER_HOST)
            row += f" | {seconds * 1e3:9.3f} {messages:6} (the ring among hosts, by its schedule)"
        print(row, flush=True)
        ranks *= 2


def _ms(wires: list[ModelledWire]) -> float:
    return max(wire.seconds for wire in wires) * 1e3


if __name__ == "__main__":
    main()

"""A program whose exchanges are part of it, where all replicas launch the same one; else over the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltc.backends.capabilities import ComputationCapabilities, LaunchToken
from ltc.backends.collective_runner import agree


class ReplicatedComputation:
    """One replica's part.

    Replicas say each other the names of their programs at each launch. Where these differ, exchanges
    go over the host, which finds out whether the exchanges themselves differ, and tells it.
    """

    def __init__(
        self,
        together: Any,
        name: bytes,
        over_host: Callable[[], Any],
        aliased: tuple[tuple[int, ...], ...],
    ) -> None:
        """Take both ways to run a graph.

        Args:
            together: The computation whose exchanges are part of it.
            name: Sixteen bytes, equal on replicas whose graphs are.
            over_host: Compiles the other one, at its first launch.
            aliased: The positions of outputs that lie in the same memory there.
        """
        self._together, self._name, self._compile_over_host = together, name, over_host
        self._over_host: Any = None
        self.upload, self.download = together.upload, together.download
        self.wait = together.wait
        self.capabilities = ComputationCapabilities(aliased, begin=self.begin)

    def begin(self, buffers: list[Any], scalars: list[Any]) -> tuple[list[Any], LaunchToken | None]:
        if agree(self._name):
            begun: tuple[list[Any], LaunchToken] = self._together.begin(buffers, scalars)
            return begun
        if self._over_host is None:
            self._over_host = self._compile_over_host()
        outputs: list[Any] = self._over_host.launch(buffers, scalars)
        return outputs, None

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        outputs, token = self.begin(buffers, scalars)
        if token is not None:
            token.wait()
        return outputs

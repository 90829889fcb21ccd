"""Messages from one rank of a group to another, each with a header that describes it.

gloo ends the process of a receiver whose tensor is too short, and fills a part of one that is too
long. So a receiver takes the header first, then as many bytes as were sent, and compares.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ltc.device.user_line import user_line
from ltc.distributed.c10d import group_calls
from ltc.distributed.c10d.group_calls import GroupCalls
from ltc.support.torch_private import ProcessGroup, Work, backend_of_group

CALLS = frozenset({"send", "recv", "recv_any_source", "recv_", "recv_any_source_"})
_HEADER = "q24s"  # bytes of the message, name of its type


def begun(
    name: str, group: ProcessGroup, tensors: list[torch.Tensor], values: Sequence[Any]
) -> Work:
    """The work of a message that has begun, of CPU tensors.

    Args:
        values: The call's arguments: tensors, group, other rank, tag; of a receive from anyone
            without the rank.
    """
    (tensor,) = tensors
    name = name.removesuffix("_")
    backend, calls = backend_of_group(group, "cpu"), group_calls.of(group)
    if name == "recv_any_source":
        tag, peer = int(values[2]), -1
    else:
        peer, tag = int(values[2]), int(values[3])
    if calls is None:
        if name == "send":
            return backend.send(tensors, peer, tag)
        return (
            backend.recv_anysource(tensors, tag) if peer < 0 else backend.recv(tensors, peer, tag)
        )
    return Send(calls, tensor, peer, tag) if name == "send" else Receive(calls, tensor, peer, tag)


class _Message(Work):
    """The common part of a send and a receive: a future, and a line for the board."""

    _awaited: set[_Message] = set()  # C++ does not keep the Python part of a Work alive

    def __init__(self, calls: GroupCalls, text: str, peer: int) -> None:
        super().__init__()
        self._calls, self._peer = calls, peer
        self._text = f"{text} in the group of ranks {list(calls.ranks)} at {user_line()}".encode()
        self._over = False
        self._awaited.add(self)
        calls.communicator.board.region.raise_abort_report()

    def _await(self, future: Future) -> Any:
        communicator = self._calls.communicator
        communicator.show(self._text, 1)
        try:
            return self._calls.await_future(future, self._peer)
        except RuntimeError as error:
            communicator.lose(error)
            raise
        finally:
            communicator.board.end()
            self._awaited.discard(self)

    def is_completed(self) -> bool:
        return self._over

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class Send(_Message):
    """A message on its way: it is over once the other rank has taken it."""

    def __init__(self, calls: GroupCalls, tensor: torch.Tensor, peer: int, tag: int) -> None:
        name = _name_of(tensor)
        super().__init__(calls, f"send of {name} to rank {calls.ranks[peer]}", peer)
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        header = _bytes(struct.pack(_HEADER, content.numel(), str(tensor.dtype).encode()))
        parts = [header, content] if content.numel() else [header]
        self._parts = parts  # gloo reads them
        self._works = [calls.backend.send([part], peer, tag) for part in parts]

    def wait(self, timeout=None) -> bool:
        if not self._over:
            works = self._works
            self._await(group_calls.in_thread(lambda: [work.wait() for work in works]))
            self._over, self._parts, self._works = True, [], []
        return True


class Receive(_Message):
    """A message to come: its tensor has it once this has been waited for."""

    _latest: dict[tuple, Future] = {}  # by sender and tag: messages come in the order of the sends

    def __init__(self, calls: GroupCalls, tensor: torch.Tensor, peer: int, tag: int) -> None:
        source = "any rank" if peer < 0 else f"rank {calls.ranks[peer]}"
        super().__init__(calls, f"receive of {_name_of(tensor)} from {source}", peer)
        self._tensor, self._source = tensor, peer
        key = (id(calls), peer, tag)
        before = Receive._latest.get(key)
        self._future = Receive._latest[key] = group_calls.in_thread(
            _taking(calls.backend, peer, tag, before)
        )
        self._key = key

    def wait(self, timeout=None) -> bool:
        if not self._over:
            self._source, dtype, content = self._await(self._future)
            if Receive._latest.get(self._key) is self._future:
                del Receive._latest[self._key]
            self._require(dtype, content)
            if content.numel():
                with torch.no_grad():
                    self._tensor.copy_(content.view(self._tensor.dtype).view(self._tensor.shape))
            self._over = True
        return True

    def _require(self, dtype: str, content: torch.Tensor) -> None:
        expected = self._tensor
        if dtype == str(expected.dtype) and content.numel() == expected.nbytes:
            return
        calls = self._calls
        calls.communicator.fail(
            f"Rank {calls.ranks[self._source]} has sent {content.numel()} bytes of {dtype} to rank "
            f"{calls.ranks[calls.communicator.replica]}, which expects {expected.nbytes} bytes of "
            f"{expected.dtype}: {self._text.decode()}. Ranks:"
        )

    def _source_rank(self) -> int:
        return self._source


def _taking(backend: Any, peer: int, tag: int, before: Future | None) -> Callable[[], tuple]:
    """A call that gives (sender, its type, its bytes) of the next message."""

    def take() -> tuple[int, str, torch.Tensor]:
        if before is not None:
            before.exception()  # waits until it has its message, or none
        header = torch.empty(struct.calcsize(_HEADER), dtype=torch.uint8, device="cpu")
        work = (
            backend.recv_anysource([header], tag) if peer < 0 else backend.recv([header], peer, tag)
        )
        work.wait()
        source = work._source_rank() if peer < 0 else peer
        nbytes, dtype = struct.unpack(_HEADER, header.numpy().tobytes())
        content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            backend.recv([content], source, tag).wait()
        return source, dtype.rstrip(b"\0").decode(), content

    return take


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _name_of(tensor: torch.Tensor) -> str:
    return group_calls.types_of([tensor])

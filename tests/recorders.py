"""The recorder of the calling thread, as tests begin with it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.recording import sync
from ltc.device.recording.recorder import device_at


def forget_paths() -> None:
    """It is as a new one: nothing pending, nothing that runs at once, no path, no habit."""
    recorder = device_at(0).recorder()
    sync.flush(recorder)
    recorder._plant()


@contextmanager
def process_of_one_device(**settings: object) -> Iterator[None]:
    """As in a process of one device that was told nothing but these settings."""
    ltm.mark_step()
    with config.override(LTC_BACKEND="llvm", **settings):
        forget_paths()
        yield
        ltm.mark_step()
    forget_paths()


def in_a_new_thread(function: Callable[[], None]) -> None:
    """A thread has paths of its own; what it raises is raised here."""
    found: list[BaseException] = []

    def run() -> None:
        sync.discard(device_at(0))  # the recorder of an ended thread may have come back
        forget_paths()
        try:
            function()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if found:
        raise found[0]

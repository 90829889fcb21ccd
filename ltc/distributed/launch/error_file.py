"""The file in which torchrun looks for the error of a rank that has failed: its summary shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ltc.errors import PeerFailure
from ltc.support.lazy_module import LazyModule
from ltc.tracebacks import shorten

_torchelastic = LazyModule("torch.distributed.elastic.multiprocessing.errors")


@contextlib.contextmanager
def error_recorded() -> Iterator[None]:
    """Write an error of the block into the file that TORCHELASTIC_ERROR_FILE names, if it is set.

    A PeerFailure is left out: torchrun shows the earliest error, and that one follows from another
    rank's, maybe within the same second.
    """
    try:
        yield
    except PeerFailure:
        raise
    except Exception as error:
        shorten(error)
        _torchelastic.get_error_handler().record_exception(error)
        raise

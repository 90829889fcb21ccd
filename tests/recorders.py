"""The recorder of the calling thread, as tests begin with it."""

from ltc.device.recording import sync
from ltc.device.recording.recorder import device_at


def forget_paths() -> None:
    """It is as a new one: nothing pending, nothing that runs at once, no path, no habit."""
    recorder = device_at(0).recorder()
    sync.flush(recorder)
    recorder._plant()

"""Steps whose explanations are looked at: where they run, and which of their lines is to blame."""

import inspect
import threading

import torch

from tests.recorders import forget_paths


def data(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype).to("ltc")


def line_to_blame(step) -> str:
    """As an explanation has it: the line of the function that ends in "# here"."""
    source, first = inspect.getsourcelines(step)
    (offset,) = [k for k, line in enumerate(source) if line.rstrip().endswith("# here")]
    return f"{inspect.getsourcefile(step)}:{first + offset} in {step.__name__}"


def in_a_thread(function, *arguments):
    """What it returns, called in a thread of its own, which has recorded nothing yet."""
    made = []

    def run():
        forget_paths()  # of an ended thread, whose number and recorder may be had again
        made.append(function(*arguments))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]

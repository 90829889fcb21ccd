"""PyTorch's own table of operators (`op_db`), without its search for the test that asks.

Before each sample the table walks the stack, with the source of every frame, to find a test case of
PyTorch's own to tell. There is none here, and below pytest one walk takes longer than the sample.
"""

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

__all__ = ["op_db"]


def _no_test() -> None:
    """Stand for the search outside PyTorch's own tests."""


for module in (common_utils, core):
    if hasattr(module, "extract_test_fn"):  # not all versions look for it
        module.extract_test_fn = _no_test

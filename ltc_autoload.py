"""What `import torch` runs where ltc is installed: `device="ltc"` works without `import ltc`.

It gives the device its name, and a module torch.ltc that imports ltc when the device is first used.
A program that never uses it pays a millisecond.  TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off.

It stands outside the package, since whatever is inside imports all of ltc.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any


def announce() -> None:
    """Called by torch at the end of its import; an error here would make torch unusable."""
    import torch  # noqa: PLC0415  it is being imported

    if "ltc" in sys.modules:  # which is what has imported torch, and does the rest itself
        return
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        return  # another outside device is in the one place that torch has
    if torch._C._get_accelerator().type != "cpu" and torch.accelerator.is_available():
        return  # programs that ask for the accelerator mean that one, until ltc is imported
    torch.utils.rename_privateuse1_backend("ltc")
    torch._C._acc.register_python_privateuseone_hook(_hooks())  # asked of by dist.barrier(), say
    torch.utils.generate_methods_for_privateuse1_backend()  # Tensor.ltc, Module.ltc, is_ltc
    module = WaitingModule("torch.ltc")
    module.pinning = torch.library.Library(
        "aten", "IMPL"
    )  # loaders pin where there is an accelerator
    module.pinning.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    torch._register_device_module("ltc", module)


def _hooks() -> Any:
    """What C++ asks of the device before ltc is imported, which brings its own."""
    global _kept
    import torch  # noqa: PLC0415  see above

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return False  # nothing of the device is in use

    _kept = Hooks()
    return _kept


_kept: Any = None  # C++ holds a plain pointer to it


class WaitingModule(types.ModuleType):
    """torch.ltc until ltc is imported, which takes its place.

    seed     what torch.manual_seed was given meanwhile; None without it
    pinning  what pins memory until ltc does
    """

    seed: int | None = None
    pinning: Any = None

    def _lazy_init(self) -> None:
        """Called by torch before it makes the first tensor on the device."""
        _import_ltc()

    def manual_seed_all(self, seed: int) -> None:
        self.seed = int(seed)

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its tools ask every module
            raise AttributeError(name)
        _import_ltc()
        present = sys.modules[self.__name__]
        if present is self:  # asked while ltc is being imported
            raise AttributeError(f"ltc is being imported, and torch.ltc has no {name} yet")
        return getattr(present, name)


def _import_ltc() -> None:
    """As at the top of a program, wherever the device happens to be used first."""
    import torch  # noqa: PLC0415  this module must not import it, which imports this module

    no_modes = torch.utils._python_dispatch._disable_current_modes
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), no_modes():
        import_module("ltc")

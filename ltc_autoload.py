"""The entry points that torch and pytest load: `device="ltc"` works without `import ltc`.

It gives the device its name, and a module torch.ltc that imports ltc at the device's first use.
torch takes a device with a name for the machine's accelerator. A program that never names ltc would
see one come and go with the package, so until the first use torch answers as it did without it.
A program that never uses ltc pays a millisecond.  TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off.

pytest loads `pytest_plugin`, by which tests say what their steps may cost on an ltc device:

    @pytest.mark.ltc_budget(compiles=1, syncs=0)
    def test_training_stays_on_the_device(): ...

    def test_a_second_step_compiles_nothing(ltc_budget):
        step()
        with ltc_budget(compiles=0):
            step()

It stands outside the package, since whatever is inside imports all of ltc.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

NAME = "ltc"
NO_ACCELERATOR = "Cannot access accelerator device when none is available."  # as torch words it

LOOKS_FOR_ANY = ("torch._utils", "torch.distributed.checkpoint.filesystem")
INDUCTOR_PARTS = frozenset(  # of a device that it compiles for, which ltc is not
    ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
)


def announce() -> None:
    """Called by torch at the end of its import; an error here would make torch unusable."""
    import torch  # noqa: PLC0415  it is being imported

    if NAME in sys.modules:  # which is what has imported torch, and does the rest itself
        return
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        return  # another outside device is in the one place that torch has
    if torch._C._get_accelerator().type != "cpu" and torch.accelerator.is_available():
        return  # programs that ask for the accelerator mean that one, until ltc is imported
    module = WaitingModule()
    module.accelerator = torch._C._accelerator_getAccelerator()  # before the name is known
    torch.utils.rename_privateuse1_backend(NAME)
    torch._C._acc.register_python_privateuseone_hook(_hooks())  # a backward on the CPU asks them
    # Tensor.ltc, Module.ltc, is_ltc
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(NAME, module)
    module.hide()
    sys.meta_path.insert(0, NamedByAVariable())


def _hooks() -> Any:
    """The object that C++ asks about the device. It takes the first one, and no other later."""
    global _kept
    import torch  # noqa: PLC0415  see above

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        in_use = False  # until ltc is imported

        def is_available(self) -> bool:
            return self.in_use

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return self.in_use

    _kept = Hooks()
    return _kept


_kept: Any = None  # C++ holds a plain pointer to it


class WaitingModule(types.ModuleType):
    """torch.ltc until ltc is imported, which takes its place.

    seed         the last argument of torch.manual_seed; None before the first
    accelerator  the machine's accelerator without ltc: None, or one that cannot be used
    """

    seed: int | None = None
    accelerator: Any = None

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self._library: Any = None
        self._hidden: list[tuple[Any, str, Any]] = []  # (holder, name, torch's own)

    def _lazy_init(self) -> None:
        """Called by torch before it makes the first tensor on the device."""
        _import_ltc()

    def manual_seed_all(self, seed: int) -> None:
        self.seed = int(seed)

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        """True; False to the modules of torch that look for a device that no one has named."""
        return sys._getframe(1).f_globals.get("__name__") not in LOOKS_FOR_ANY

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in INDUCTOR_PARTS:  # looked up in every module, or device
            raise AttributeError(name)
        _import_ltc()
        present = sys.modules[self.__name__]
        if present is self:  # asked while ltc is being imported
            raise AttributeError(f"ltc is being imported, and torch.ltc has no {name} yet")
        return getattr(present, name)

    # --- torch's answers about accelerators -----------------------------------------------------

    def hide(self) -> None:
        """Let torch answer about accelerators, activities and groups as it does without ltc."""
        import torch  # noqa: PLC0415  see above

        for name in dir(torch._C):
            if name == "_get_accelerator" or name.startswith("_accelerator_"):
                self._put(torch._C, name, self._answer_of(name))
        for holder in (torch.autograd, torch.autograd.profiler, torch.profiler):
            self._put(holder, "_supported_activities", _without_outside_devices(torch))
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_pin_memory", self._pin, "CPU")
        if torch.distributed.is_available():
            from torch.distributed import distributed_c10d  # noqa: PLC0415

            begin = _naming(distributed_c10d.init_process_group)
            for holder in (torch.distributed, distributed_c10d):
                self._put(holder, "init_process_group", begin)
            _register_backend(torch.distributed)
        self._put(torch, "Generator", _naming_class(torch.Generator))
        settings = sys.modules[f"torch.backends.{NAME}"] = WaitingSettings(f"torch.backends.{NAME}")
        setattr(torch.backends, NAME, settings)

    def reveal(self) -> None:
        """Undo `hide`. ltc calls it, once, when it takes this module's place."""
        for holder, name, original in self._hidden:
            setattr(holder, name, original)
        self._hidden.clear()
        self._library._destroy()
        _kept.in_use = True

    def _put(self, holder: Any, name: str, answer: Callable) -> None:
        if hasattr(holder, name):
            self._hidden.append((holder, name, getattr(holder, name)))
            setattr(holder, name, answer)

    def _answer_of(self, name: str) -> Callable:
        """A function that answers as the one of torch._C does on a machine without ltc."""
        import torch  # noqa: PLC0415  see above

        if name.endswith("AllocatorSettings"):  # of the process: they name no device
            return getattr(torch._C, name)
        if name.startswith("_accelerator_hooks_"):
            return lambda *_: None if "_set_" in name else -1
        answers = {
            "_get_accelerator": lambda: self.accelerator or torch.device("cpu"),
            "_accelerator_getAccelerator": lambda: self.accelerator,
            "_accelerator_setDeviceIndex": lambda index: None if index < 0 else _refuse(),
        }
        return answers.get(name, _refuse)

    def _pin(self, tensor: Any, device: Any = None) -> Any:
        """The kernel that pins memory: torch's own would ask C++ for the accelerator, so ltc."""
        import torch  # noqa: PLC0415  see above

        device = device or self.accelerator
        if device is None:
            _refuse()
        of_all_devices = torch._C.DispatchKeySet(torch._C.DispatchKey.IPU)
        return torch.ops.aten._pin_memory.default.redispatch(of_all_devices, tensor, device)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(NO_ACCELERATOR)


def _without_outside_devices(torch: Any) -> Callable[[], set]:
    """The function that lists what a profiler can observe."""
    original = torch.autograd._supported_activities
    outside = torch.profiler.ProfilerActivity.PrivateUse1

    return lambda: original() - {outside}


class WaitingSettings(types.ModuleType):
    """torch.backends.ltc until ltc is imported, which takes its place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _import_ltc()
        return getattr(sys.modules[self.__name__], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            _import_ltc()
            setattr(sys.modules[self.__name__], name, value)


def _naming_class(native: Any) -> Any:
    """torch.Generator, which imports ltc first if its argument names it: C++ cannot make one."""

    class Naming(type(native)):  # type: ignore[misc]  # torch's own metaclass
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, native)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, native)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if not any(_names_ltc(value) for value in (*args, *kwargs.values())):
                return native(*args, **kwargs)
            _import_ltc()
            import torch  # noqa: PLC0415  see above

            return torch.Generator(*args, **kwargs)

    return Naming(native.__name__, (native,), {"__module__": "torch", "__doc__": native.__doc__})


# --- process groups -------------------------------------------------------------------------------


def _naming(original: Callable) -> Callable:
    """init_process_group, which imports ltc first if an argument names it."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if any(_names_ltc(value) for value in (*args, *kwargs.values())):
            _import_ltc()
        distributed = import_module("torch.distributed.distributed_c10d")
        current = distributed.init_process_group  # ltc's own from its import on
        return (original if current is init_process_group else current)(*args, **kwargs)

    return init_process_group


def _names_ltc(value: Any) -> bool:
    """True of the backends "ltc" and "cpu:gloo,ltc:gloo", of "ltc://" and of device("ltc", 0)."""
    if isinstance(value, str):
        return NAME in value.lower().replace(":", ",").split(",")
    return getattr(value, "type", None) == NAME


def _register_backend(distributed: Any) -> None:
    """Let new_group("ltc") and is_backend_available("ltc") know the backend before the import."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        _import_ltc()
        return distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)

    distributed.Backend.register_backend(NAME, make, devices=["cpu", NAME])


# --- the first use --------------------------------------------------------------------------------


class NamedByAVariable:
    """A finder of modules that finds none: with ACCELERATE_TORCH_DEVICE=ltc it imports ltc.

    It does so before the packages that read the variable, since ltc has to tell them more.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("accelerate", "transformers"):
            if os.environ.get("ACCELERATE_TORCH_DEVICE", "").partition(":")[0] == NAME:
                _import_ltc()


def _import_ltc() -> None:
    """Import ltc as at the top of a program, wherever the device happens to be used first."""
    import torch  # noqa: PLC0415  this module must not import it, which imports this module

    no_modes = torch.utils._python_dispatch._disable_current_modes
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), no_modes():
        import_module(NAME)


# --- pytest ---------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """Make `pytest_plugin` when pytest asks for it: other programs import no pytest."""
    if name == "pytest_plugin":
        return _pytest_plugin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _pytest_plugin() -> Any:
    import pytest  # noqa: PLC0415  see above

    class Plugin:
        """`@pytest.mark.ltc_budget(...)` and the fixture `ltc_budget`; ltc is imported where one is used."""

        def pytest_configure(self, config: Any) -> None:
            config.addinivalue_line(
                "markers",
                "ltc_budget(compiles=None, programs=None, syncs=None, fallbacks=None, "
                "transfers_mb=None, warn=False): the test fails if it costs more than that, as in "
                "`with ltc.budget(...):`",
            )

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: Any) -> Any:
            mark = item.get_closest_marker("ltc_budget")
            if mark is None:
                return (yield)
            with import_module(NAME).budget(*mark.args, **mark.kwargs):
                return (yield)

        @pytest.fixture
        def ltc_budget(self) -> Any:
            """Return `ltc.budget`, for a part of a test."""
            return import_module(NAME).budget

    return Plugin()

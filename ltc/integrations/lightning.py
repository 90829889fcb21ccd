"""`import ltc.integrations.lightning`: `Trainer(accelerator="ltc")` and `Fabric(accelerator="ltc")`.

The accelerator is entered in the registries of Lightning, of both packages where both are there:
`lightning`, and `pytorch_lightning` with `lightning_fabric`. Two devices are two processes that have one
device each; their gradients are averaged by DDP over ltc's process group. For what Lightning chooses by
a list of kinds (the strategy of one device, where autocast is on) it would take the CPU or CUDA
for a kind that it has not heard of, so those two choices are made here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

import ltc.device.register  # noqa: F401  # brings the device into being
from ltc.integrations.around import around
from ltc.support.torch_private import DEVICE_TYPE

# (of the Trainer, of Fabric), by the name of the package that is asked for
PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


class _Devices:
    """The facts that Lightning asks an accelerator for: count of devices, their ids, their memory."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != DEVICE_TYPE:
            raise ValueError(f"This accelerator has devices of type {DEVICE_TYPE}, not {device}.")

    def teardown(self) -> None:
        """Nothing is held for Lightning that would have to be given back."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return torch.get_device_module(DEVICE_TYPE).memory_stats(device)

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of processes: from a number, its text, -1 for all, or a list."""
        count = len(devices) if isinstance(devices, (list, tuple)) else int(devices)
        if count == -1:
            return _Devices.auto_device_count()
        if count < 1:
            raise ValueError(f"devices={devices!r}: at least one ltc device is needed.")
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """One device for each process, which each calls the first: it has no other."""
        return [torch.device(DEVICE_TYPE, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return DEVICE_TYPE


def _register(registry: Any, base: type) -> type:
    """Enter the accelerator, a subclass of the package's own base, in its registry."""
    accelerator = type("LtcAccelerator", (_Devices, base), {"__module__": __name__})
    registry.register(DEVICE_TYPE, accelerator, description="ltc", override=True)
    return accelerator


def _choose_for(
    connector: type, accelerator: type, strategies: ModuleType, precision: ModuleType, flag: str
) -> None:
    """Make the connector's choices for the accelerator; it makes them itself for any other.

    Args:
        flag: The attribute of a connector that holds the precision asked for.
    """

    def strategy(original: Callable, made: Any) -> Any:
        chosen = original(made)
        if not isinstance(made.accelerator, accelerator):
            return chosen
        if isinstance(chosen, strategies.SingleDeviceStrategy):
            return strategies.SingleDeviceStrategy(device=made._parallel_devices[0])
        return chosen

    def mixed(original: Callable, made: Any) -> Any:
        asked = getattr(made, flag)
        if isinstance(made.accelerator, accelerator) and asked in ("16-mixed", "bf16-mixed"):
            return precision.MixedPrecision(asked, DEVICE_TYPE)
        return original(made)

    around(connector, "_choose_strategy", strategy)
    around(connector, "_check_and_init_precision", mixed)


def _serve(ddp: type, device_ids: str) -> None:
    """Have DDP of the device over ltc's process group, and without indices of CUDA devices.

    Args:
        device_ids: The name of the method that gives these.
    """

    def is_ours(strategy: Any) -> bool:
        return strategy.root_device.type == DEVICE_TYPE

    def no_indices(original: Callable, strategy: Any) -> Any:
        return None if is_ours(strategy) else original(strategy)

    def backend(original: Callable, strategy: Any) -> str:
        asked = strategy._process_group_backend
        return original(strategy) if asked or not is_ours(strategy) else DEVICE_TYPE

    around(ddp, device_ids, no_indices)
    around(ddp, "_get_process_group_backend", backend)


def install() -> None:
    """Enter the accelerator in each package that is installed; ModuleNotFoundError where none is."""
    found = [names for package, names in PACKAGES.items() if find_spec(package)]
    if not found:
        raise ModuleNotFoundError(
            "ltc.integrations.lightning needs Lightning: pip install lightning"
        )
    for trainer, fabric in found:
        _install_trainer(trainer)
        _install_fabric(fabric)


def _install_trainer(package: str) -> None:
    accelerators = importlib.import_module(f"{package}.accelerators")
    connectors = importlib.import_module(f"{package}.trainer.connectors.accelerator_connector")
    _choose_for(
        connectors._AcceleratorConnector,
        _register(accelerators.AcceleratorRegistry, accelerators.Accelerator),
        strategies := importlib.import_module(f"{package}.strategies"),
        importlib.import_module(f"{package}.plugins.precision"),
        "_precision_flag",
    )
    _serve(strategies.DDPStrategy, "determine_ddp_device_ids")


def _install_fabric(package: str) -> None:
    accelerators = importlib.import_module(f"{package}.accelerators")
    _choose_for(
        importlib.import_module(f"{package}.connector")._Connector,
        _register(accelerators.ACCELERATOR_REGISTRY, accelerators.Accelerator),
        strategies := importlib.import_module(f"{package}.strategies"),
        importlib.import_module(f"{package}.plugins.precision"),
        "_precision_input",
    )
    _serve(strategies.DDPStrategy, "_determine_ddp_device_ids")


install()

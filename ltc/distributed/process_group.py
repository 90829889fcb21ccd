"""`torch.distributed` on lazy tensors: any process group that moves CPU tensors moves ltc's too.

The calls `c10d::*` get kernels for the device type, so DistributedDataParallel, FSDP, DTensor and
everything else that PyTorch builds on process groups works without knowing of ltc.  The backend
name "ltc" stands for gloo, for CPU and ltc tensors alike.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ltc.device.tensor import is_lazy
from ltc.device.torch_api import DEVICE_TYPE
from ltc.distributed import host_path
from ltc.errors import Unsupported

_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def install() -> None:
    """Teach torch.distributed about ltc.  Once per process."""
    dist.Backend.register_backend(DEVICE_TYPE, _gloo, devices=["cpu", DEVICE_TYPE])
    dist.Backend.backend_capability["gloo"].append(DEVICE_TYPE)
    _register_kernels()
    _explain_what_the_reducer_cannot_do()


def _gloo(store, rank: int, size: int, timeout):
    """What carries a group of the backend "ltc": gloo, as one would make it by name."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _register_kernels() -> None:
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():  # torch has kernels for outside devices, which need C++ there
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in host_path.WRITTEN:
            if hasattr(torch.ops.c10d, name):
                library.impl(name, host_path.kernel_of(name), "PrivateUse1")


# --- DistributedDataParallel ------------------------------------------------------------------

def _explain_what_the_reducer_cannot_do() -> None:
    """`static_graph` and `find_unused_parameters` want pinned memory from a device's C++ hooks.

    Hooks written in Python cannot supply it; torch's own error would be about an allocator.
    """
    make, set_static = DistributedDataParallel.__init__, DistributedDataParallel._set_static_graph

    def __init__(self, module, *args, **kwargs):
        for option in ("find_unused_parameters", "static_graph"):
            if kwargs.get(option):
                _require_no_lazy(module, option)
        make(self, module, *args, **kwargs)

    def _set_static_graph(self):
        _require_no_lazy(self.module, "static_graph")
        set_static(self)

    __init__.__doc__, __init__.__wrapped__ = make.__doc__, make
    DistributedDataParallel.__init__ = __init__
    DistributedDataParallel._set_static_graph = _set_static_graph


def _require_no_lazy(module: torch.nn.Module, option: str) -> None:
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise Unsupported(
            f"DistributedDataParallel({option}=True) does not work on ltc devices: torch's reducer "
            f"then asks the device for pinned memory, which a device written in Python cannot "
            f"give. Leave {option} out, and let every parameter take part in the loss (add "
            f"0 * p.sum() for one that does not), or use torch.distributed.fsdp.fully_shard."
        )


install()

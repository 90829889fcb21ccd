"""ltm: devices, replicas, steps, exchanges and files, under the names of the lazy tensor core.

The names that users import stand together here; the modules beside this one, and those that they
call, define them.
"""

from __future__ import annotations

from ltc.core import devices as _devices
from ltc.core import exchanges as _exchanges
from ltc.core import replicas as _replicas
from ltc.core import training as _training
from ltc.core.devices import *  # noqa: F403  each module's list says what is public
from ltc.core.exchanges import *  # noqa: F403
from ltc.core.replicas import *  # noqa: F403
from ltc.core.training import *  # noqa: F403
from ltc.distributed.bucketed import (
    CoalescingBuckets,
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from ltc.distributed.mesh import do_on_ordinals, mesh_reduce
from ltc.distributed.rendezvous import rendezvous
from ltc.training_loop.transfer import (
    ToLazyTensorArena,
    check_view_sharing,
    send_cpu_data_to_device,
)

__all__ = [
    "CoalescingBuckets",
    "ToLazyTensorArena",
    "all_gather_bucketized",
    "all_reduce_bucketized_gradients",
    "check_view_sharing",
    "do_on_ordinals",
    "mesh_reduce",
    "reduce_scatter_bucketized",
    "rendezvous",
    "send_cpu_data_to_device",
]
__all__ += _devices.__all__
__all__ += _exchanges.__all__
__all__ += _replicas.__all__
__all__ += _training.__all__

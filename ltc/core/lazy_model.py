"""ltm: devices, replicas, steps, exchanges and files, under the names of the lazy tensor core.

The names that users import stand together here; the modules beside this one, and those that they
call, define them.
"""

from __future__ import annotations

from ltc.core.devices import (
    get_lazy_supported_devices,
    get_memory_info,
    get_rng_state,
    is_lazy_tensor,
    lazy_device,
    lazy_device_hw,
    lazy_real_devices,
    parse_lazy_device,
    set_rng_state,
)
from ltc.core.exchanges import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    recv,
    reduce_scatter,
    send,
)
from ltc.core.replicas import (
    get_local_ordinal,
    get_ordinal,
    is_master_ordinal,
    lazy_replication_devices,
    master_print,
    set_replication,
    xrt_world_size,
)
from ltc.core.training import (
    add_step_closure,
    load,
    mark_step,
    optimizer_step,
    reduce_gradients,
    save,
    unlazy,
    wait_device_ops,
)
from ltc.distributed.bucketed import (
    CoalescingBuckets,
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from ltc.distributed.collective_context import CollectiveContext
from ltc.distributed.mesh import do_on_ordinals, mesh_reduce
from ltc.distributed.rendezvous import rendezvous
from ltc.distributed.replica_check import ReplicasDiffer, check_replicas
from ltc.utils.rate_tracker import RateTracker
from ltc.utils.transfer import ToLazyTensorArena, check_view_sharing, send_cpu_data_to_device

__all__ = [
    "CoalescingBuckets",
    "CollectiveContext",
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "RateTracker",
    "ReplicasDiffer",
    "ToLazyTensorArena",
    "add_step_closure",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_replicas",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "get_lazy_supported_devices",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "is_lazy_tensor",
    "is_master_ordinal",
    "lazy_device",
    "lazy_device_hw",
    "lazy_real_devices",
    "lazy_replication_devices",
    "load",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "parse_lazy_device",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "save",
    "send",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xrt_world_size",
]

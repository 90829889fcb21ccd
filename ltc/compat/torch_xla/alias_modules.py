"""`import torch_xla`, and every module below it, made of the rows of the table at the end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ltc.compat.torch_xla.xla_only import stand_in

PACKAGE = "torch_xla"
_SCRIPT = "ltc.compat.torch_xla.script_"  # then the script's path, as hexadecimal digits


class _NamesModule(ModuleType):
    """A module of torch_xla: each name is looked up in ltc when it is first asked for."""

    def __init__(self, row: AliasModule) -> None:
        super().__init__(row.name, f"{row.name}, as ltc has it.")
        self._row = row
        self.__all__ = sorted({*row.found, *row.refused})

    def __getattr__(self, name: str) -> Any:
        value = _value_of(self._row, name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple:
        """A function that uses it, sent to another process by value, takes the stand-in along."""
        return module_named, (self.__name__,)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]


def _value_of(row: AliasModule, name: str) -> Any:
    full = f"{row.name}.{name}"
    if name in row.found:
        module, _, wanted = row.found[name].partition(":")
        return getattr(importlib.import_module(module), wanted)
    if name in row.refused:
        return stand_in(full, row.refused[name])
    if full in MODULES:
        return importlib.import_module(full)
    if row.otherwise and not name.startswith("__"):
        return stand_in(full, row.otherwise)
    raise AttributeError(
        f"module {row.name!r} has no attribute {name!r} in ltc: docs/torch_xla.md lists the existing names."
    )


class _TableFinder(MetaPathFinder, Loader):
    """Finds torch_xla's modules in the table, and a script under the name that main_spec gives it."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(_SCRIPT):
            return main_spec(bytes.fromhex(fullname.removeprefix(_SCRIPT)).decode())
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _NamesModule(MODULES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run: the names are looked up when they are asked for."""


def module_named(name: str) -> ModuleType:
    """A module of torch_xla, in a process that may not have had it before."""
    return importlib.import_module(name)


def main_spec(path: str) -> ModuleSpec:
    """The spec under which a script runs as the main program.

    A process that multiprocessing starts imports its parent's main program again, by the name in
    its spec. This one lies below ltc.compat.torch_xla, so that process has torch_xla before the
    script asks for it.
    """
    absolute = str(Path(path).resolve())
    name = _SCRIPT + absolute.encode().hex()
    spec = ModuleSpec(name, SourceFileLoader(name, absolute), origin=absolute)
    spec.has_location = True
    return spec


def install() -> None:
    """Make torch_xla importable. Once per process; ImportError where a real one is installed."""
    real = PathFinder.find_spec(PACKAGE)
    own = str(Path(__file__).parent)
    if real is not None and own not in map(_resolved, real.submodule_search_locations or []):
        raise ImportError(
            f"torch_xla itself is installed, at {real.origin}, and `import ltc.compat.torch_xla` "
            f"would hide it. Uninstall it, or use an environment without it; for both in one, write "
            f"`import ltc.core.lazy_model` in place of `import torch_xla.core.xla_model`."
        )
    if PACKAGE in sys.modules:
        raise ImportError(
            "A module named torch_xla is loaded already. Import ltc.compat.torch_xla before it."
        )
    sys.meta_path.insert(0, _TableFinder())


def _resolved(folder: str) -> str:
    return str(Path(folder).resolve())


# --- The table --------------------------------------------------------------------------------


_LTM = "ltc.core.lazy_model"
_HERE = "ltc.compat.torch_xla."
_OPS, _RUNS = _HERE + "extras.op_builder", _HERE + "extras.model_comparator"

_HLO = "it shows, or takes, XLA's own graphs. ltc's are shown by ltc.debug.graphs.text(tensor) and LTC_DUMP"
_SPMD = (
    "sharding by XLA's compiler is part of XLA. Use torch.distributed.tensor (DTensor), fully_shard or "
    "DistributedDataParallel, which run on ltc"
)
_STABLEHLO = (
    "StableHLO is written by XLA's compiler. Use torch.export, which writes PyTorch's own form"
)
_PALLAS = (
    "Pallas kernels are compiled by JAX for TPUs. Use torch.nn.functional.scaled_dot_product_attention, "
    "or the formula in torch operations: ltc fuses it"
)
_BUILDER = (
    "it builds XLA operations by hand. Write the formula in torch operations: ltc compiles them"
)
_GONE = "torch_xla itself has dropped it. Print with xm.master_print, measure with xm.RateTracker"
_CLOUD = "it reads from Google's cloud, or TensorFlow's files. Use a torch.utils.data.Dataset of your own"
_PLUGIN = "devices are plugged into ltc in another way: see docs/vendor.md"
_CHECKPOINTS = (
    "it is made for XLA's sharded tensors. Use ltc.utils.checkpoint.CheckpointManager, or "
    "torch.distributed.checkpoint"
)
_FRAMES = "LTC_LINES=1 and LTC_DUMP show which line of the script recorded what"
_CONSOLIDATE = (
    "the shards are PyTorch's here. Use FullyShardedDataParallel.state_dict_type, or "
    "torch.distributed.checkpoint"
)
_POINTER = "tensors of ltc share no memory with other libraries. Pass on tensor.cpu()"


class AliasModule:
    """One module of torch_xla.

    Args:
        name: Its dotted path.
        found: Name there -> "module:name" in ltc.
        refused: Name there -> what to do instead.
        otherwise: The advice for any other name of it; "" where a wrong name is an AttributeError.
    """

    def __init__(
        self,
        name: str,
        found: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        otherwise: str = "",
    ) -> None:
        self.name = f"torch_xla.{name}".rstrip(".")
        self.found: dict[str, str] = {}
        for module, names in (found or {}).items():
            for entry in names.split():
                alias, _, wanted = entry.partition("=")
                self.found[alias] = f"{module}:{wanted or alias}"
        self.refused = {n: why for why, names in (refused or {}).items() for n in names.split()}
        self.otherwise = otherwise


_ROWS = (
    AliasModule(
        "",
        {
            _HERE
            + "top_level": "device devices device_count real_devices sync step compile launch "
            "manual_seed",
            _HERE + "xla_only": "set_custom_compile_options",
            "ltc": "__version__",
        },
        {_STABLEHLO: "save_as_stablehlo save_torch_model_as_stablehlo"},
    ),
    AliasModule(
        "_XLAC",
        {
            "ltc.support.observation.metrics": "_clear_counters=clear_counters _clear_metrics=clear_metrics "
            "_get_executed_fallback_ops=executed_fallback_ops _xla_counter_names=counter_names "
            "_xla_counter_value=counter_value _xla_increment_counter=count "
            "_xla_metric_data=metric_data _xla_metric_names=metric_names "
            "_xla_metrics_report=metrics_report",
            "ltc.device.recording.tensors": "_xla_get_tensor_id=tensor_id "
            "_xla_get_tensor_view_alias_id=alias_id",
            _HERE + "xla_bindings": "_get_git_revs=get_git_revs _xla_get_all_devices=all_devices "
            "_xla_get_cpu_tensors=cpu_tensors _xla_get_default_device=default_device "
            "_xla_get_devices=supported_devices _xla_get_rng_seed=get_rng_seed "
            "_xla_memory_info=memory_info _xla_real_devices=real_devices "
            "_xla_set_default_device=set_default_device _xla_set_rng_seed=set_rng_seed "
            "_xla_step_marker=step_marker _xla_sync_multi=sync_multi "
            "_xla_tensors_from_aten=tensors_from_aten _xla_wait_device_ops=wait_device_ops "
            "_get_xla_tensor_dimension_size=dimension_size",
            _HERE + "xla_only": "_xla_set_use_full_mat_mul_precision=set_full_mat_mul_precision",
        },
        otherwise=_HLO,
    ),
    AliasModule("version", {"ltc": "__version__"}),
    AliasModule("core"),
    AliasModule(
        "core.xla_model",
        {
            _LTM: "CollectiveContext CoalescingBuckets RateTracker REDUCE_AND REDUCE_MAX REDUCE_MIN "
            "REDUCE_MUL REDUCE_OR REDUCE_SUM ToXlaTensorArena=ToLazyTensorArena add_step_closure "
            "all_gather all_gather_bucketized all_reduce all_reduce_bucketized_gradients all_to_all "
            "broadcast_master_param check_view_sharing collective_broadcast collective_permute "
            "do_on_ordinals get_local_ordinal get_ordinal is_master_ordinal is_xla_tensor=is_lazy_tensor "
            "master_print mesh_reduce optimizer_step parse_xla_device=parse_lazy_device recv "
            "reduce_gradients reduce_scatter reduce_scatter_bucketized rendezvous save send unlazy "
            "xrt_world_size",
            _HERE + "top_level": "mark_step=sync",
            _HERE + "xla_bindings": "wait_device_ops",
            _HERE + "xla_model": "DeviceContext MemoryInfo fork_rng get_memory_info get_rng_state "
            "get_xla_supported_devices optimization_barrier_ send_cpu_data_to_device set_replication "
            "set_rng_state xla_device xla_device_hw xla_device_kind xla_real_devices "
            "xla_rendezvous xla_replication_devices",
        },
        {
            _STABLEHLO: "get_stablehlo get_stablehlo_bytecode",
            _BUILDER: "XLA_LIB",
            _GONE: "TrainStepMetrics TestStepMetrics get_log_fn",
        },
    ),
    AliasModule(
        "core.functions",
        {
            "ltc.core.functions": "AllGather AllReduce AllReduceSumLayer SyncBatchNorm all_gather "
            "all_reduce distributed_mm",
            _HERE + "extras.box_suppression": "nms",
        },
    ),
    AliasModule(
        "core.xla_builder",
        {_OPS: "Op=BuiltOp Shape=BuiltShape Type create_builder mkshape tensor_shape"},
        otherwise=_BUILDER,
    ),
    AliasModule("core.xla_op_registry", {_OPS: "register"}, otherwise=_BUILDER),
    AliasModule(
        "core.xla_env_vars",
        otherwise="ltc reads other environment variables: docs/api.md lists them",
    ),
    AliasModule(
        "core.dynamo_bridge",
        {_HERE + "program_structure": "extract_compiled_graph"},
        otherwise="what torch.compile records is ltc's own: torch.compile(model) needs no bridge",
    ),
    AliasModule(
        "runtime",
        {
            _LTM: "global_ordinal=get_ordinal local_ordinal=get_local_ordinal world_size=xrt_world_size",
            _HERE
            + "xla_runtime": "addressable_device_count addressable_runtime_device_count device_type "
            "get_master_ip get_num_cached_compilation_graph global_device_count "
            "global_runtime_device_attributes global_runtime_device_count host_index initialize_cache "
            "is_bf16_supported is_spmd local_device_count local_process_count process_count "
            "process_index runtime_device_attributes set_device_type using_pjrt",
            _HERE + "xla_model": "xla_device",
        },
        {_SPMD: "use_spmd"},
    ),
    AliasModule("distributed"),
    AliasModule(
        "distributed.xla_multiprocessing",
        {
            "ltc.distributed.lazy_multiprocessing": "MpModelWrapper MpSerialExecutor spawn",
            _HERE + "xla_only": "create_optimized_replica_groups",
        },
    ),
    AliasModule(
        "distributed.parallel_loader",
        {
            "ltc.distributed.parallel_loader": "PerDeviceLoader",
            _HERE
            + "replica_loops": "MpDeviceLoader=XlaMpDeviceLoader ParallelLoader=XlaParallelLoader",
        },
        {"its queues are private to ltc's loaders. Use ParallelLoader": "PerDeviceQueue"},
    ),
    AliasModule(
        "distributed.data_parallel",
        {
            "ltc.distributed.data_parallel": "Context ThreadResult",
            _HERE + "replica_loops": "DataParallel=XlaDataParallel",
        },
    ),
    AliasModule(
        "distributed.xla_backend",
        refused={
            "init_process_group('xla', init_method='xla://') makes the group": "ProcessGroupXla "
            "XlaProcessGroup"
        },
    ),
    AliasModule("distributed.worker", otherwise=_CLOUD),
    AliasModule(
        "distributed.fsdp",
        {
            _HERE + "sharded_training": "XlaFullyShardedDataParallel",
            _HERE + "program_structure": "checkpoint_module",
        },
        {_CONSOLIDATE: "consolidate_sharded_model_checkpoints consolidate_sharded_state_dicts"},
    ),
    AliasModule(
        "distributed.fsdp.xla_fully_sharded_data_parallel",
        {_HERE + "sharded_training": "XlaFullyShardedDataParallel"},
    ),
    AliasModule(
        "distributed.fsdp.wrap",
        {
            "torch.distributed.fsdp.wrap": "always_wrap_policy lambda_auto_wrap_policy "
            "size_based_auto_wrap_policy transformer_auto_wrap_policy"
        },
        {"pass auto_wrap_policy to XlaFullyShardedDataParallel": "recursive_wrap"},
    ),
    AliasModule(
        "distributed.fsdp.utils",
        {_HERE + "program_structure": "checkpoint_module"},
        {"layers need no patch here": "apply_xla_patch_to_nn_linear BucketizedReduceScatter"},
    ),
    AliasModule("distributed.fsdp.state_dict_utils", otherwise=_CONSOLIDATE),
    AliasModule("distributed.fsdp.consolidate_sharded_ckpts", otherwise=_CONSOLIDATE),
    AliasModule(
        "distributed.fsdp.xla_flatten_params_wrapper",
        otherwise="the flat parameters are PyTorch's here: torch.distributed.fsdp",
    ),
    AliasModule("distributed.spmd", otherwise=_SPMD),
    AliasModule("distributed.spmd.xla_sharding", otherwise=_SPMD),
    AliasModule("distributed.spmd.xla_sharded_tensor", otherwise=_SPMD),
    AliasModule("distributed.spmd.debugging", otherwise=_SPMD),
    AliasModule("distributed.spmd.api", otherwise=_SPMD),
    AliasModule(
        "distributed.zero_redundancy_optimizer",
        {_HERE + "sharded_training": "ZeroRedundancyOptimizer=XlaZeroRedundancyOptimizer"},
    ),
    AliasModule("utils"),
    AliasModule("utils.serialization", {"ltc.utils.serialization": "TensorReference load save"}),
    AliasModule(
        "utils.utils",
        {
            "ltc.utils.utils": "Cleaner DataWrapper FnDataGenerator LazyProperty SampleGenerator "
            "TimedScope TmpFolder as_list check_env_flag eprint flatten_nested_tuple "
            "for_each_instance for_each_instance_rewrite get_free_tcp_ports get_print_fn getenv_as "
            "list_copy_append null_print parallel_work shape timed"
        },
    ),
    AliasModule(
        "utils.closures", {"ltc.training_loop.closures": "AsyncClosureHandler ClosureHandler"}
    ),
    AliasModule("utils.keyd_queue", {"ltc.utils.keyd_queue": "KeydQueue Queue QueueBase"}),
    AliasModule("utils.cached_dataset", {"ltc.utils.cached_dataset": "CachedDataset"}),
    AliasModule("utils.checkpoint_tagger", {"ltc.utils.checkpoint_tagger": "CheckpointTagger"}),
    AliasModule(
        "utils.checkpoint",
        {
            _HERE + "program_structure": "checkpoint",
            "torch.utils.checkpoint": "CheckpointFunction get_device_states set_device_states",
        },
    ),
    AliasModule(
        "utils.buffer_donor_context",
        {_HERE + "xla_only": "alias_with_buffer_donor_config"},
    ),
    AliasModule("utils.dlpack", otherwise=_POINTER),
    AliasModule("utils.gcsfs", otherwise=_CLOUD),
    AliasModule("utils.tf_record_reader", otherwise=_CLOUD),
    AliasModule("utils.stablehlo_test_utils", otherwise=_STABLEHLO),
    AliasModule("debug"),
    AliasModule(
        "debug.metrics",
        {
            "ltc.support.observation.metrics": "clear_all clear_counters clear_metrics counter_names counter_value "
            "executed_fallback_ops metric_data metric_names metrics_report short_metrics_report"
        },
    ),
    AliasModule(
        "debug.profiler",
        {
            "ltc.support.observation.profiler": "StepTrace Trace get_tracer_marked_step set_tracer_marked_step",
            _HERE
            + "xla_profiler": "start_server start_trace stop_trace trace trace_detached trace_me",
        },
    ),
    AliasModule("debug.metrics_saver", {"ltc.support.observation.metrics_saver": "save_metrics"}),
    AliasModule("debug.graph_saver", {_HERE + "xla_bindings": "save_tensors_graph"}),
    AliasModule("debug.metrics_compare_utils", otherwise="compare ltc.debug.metrics.as_dict()"),
    AliasModule(
        "debug.model_comparator",
        {_RUNS: "compare compare_tensors configure save tensor_file_compare"},
    ),
    AliasModule("debug.frame_parser_util", otherwise=_FRAMES),
    AliasModule(
        "amp",
        {
            _HERE + "device_strings": "autocast=XlaAutocast",
            "ltc.amp": "GradScaler custom_bwd custom_fwd syncfree",
        },
    ),
    AliasModule("amp.syncfree", {"ltc.amp.syncfree": "Adam AdamW SGD"}),
    AliasModule("backends", {_HERE + "xla_only": "get_mat_mul_precision set_mat_mul_precision"}),
    AliasModule("test"),
    AliasModule(
        "test.test_utils",
        {
            _HERE + "training_prints": "close_summary_writer get_summary_writer mp_test now "
            "print_test_update print_training_update write_to_summary"
        },
    ),
    AliasModule(
        "experimental",
        {_HERE + "top_level": "eager_mode eager_mode_context is_eager_mode"},
    ),
    AliasModule(
        "experimental.eager",
        {_HERE + "top_level": "eager_mode eager_mode_context is_eager_mode"},
    ),
    AliasModule(
        "experimental.gradient_accumulation",
        {_HERE + "program_structure": "gradient_accumulation"},
    ),
    AliasModule("experimental.scan", {_HERE + "program_structure": "scan"}, otherwise=_HLO),
    AliasModule("experimental.scan_layers", {_HERE + "program_structure": "scan_layers"}),
    AliasModule(
        "experimental.fori_loop",
        {_HERE + "program_structure": "while_loop"},
        {"write the loop in Python: it is recorded": "fori_loop"},
    ),
    AliasModule(
        "experimental.assume_pure",
        {_HERE + "program_structure": "assume_pure assume_pure_torch=assume_pure"},
        otherwise="it calls JAX. What is recorded here is traced once by itself",
    ),
    AliasModule("experimental.gru", {"torch.nn": "GRU"}),
    AliasModule("experimental.pjrt_backend"),
    AliasModule(
        "experimental.pjrt",
        {
            _LTM: "global_ordinal=get_ordinal local_ordinal=get_local_ordinal world_size=xrt_world_size "
            "broadcast_master_param rendezvous",
            _HERE + "xla_runtime": "addressable_device_count device_type global_device_count "
            "local_device_count local_process_count process_count process_index set_device_type "
            "using_pjrt",
            _HERE + "replica_loops": "run_multiprocess",
        },
    ),
    AliasModule(
        "experimental.callback",
        otherwise="xm.add_step_closure(function, run_async=True) is called once a step is over",
    ),
    AliasModule(
        "experimental.spmd_fully_sharded_data_parallel",
        otherwise=_SPMD,
    ),
    AliasModule("experimental.distributed_checkpoint", otherwise=_CHECKPOINTS),
    AliasModule("experimental.plugins", otherwise=_PLUGIN),
    AliasModule("experimental.custom_kernel", otherwise=_PALLAS),
    AliasModule("experimental.splash_attention", otherwise=_PALLAS),
    AliasModule("experimental.pallas_kernels", otherwise=_PALLAS),
    AliasModule("experimental.stablehlo_custom_call", otherwise=_STABLEHLO),
    AliasModule("experimental.mark_pattern_utils", otherwise=_STABLEHLO),
    AliasModule("experimental.xla_marker", otherwise=_STABLEHLO),
    AliasModule("experimental.xla_mlir_debuginfo", otherwise=_HLO),
    AliasModule("experimental.unbounded_dynamism_export", otherwise=_STABLEHLO),
    AliasModule("experimental.xla_dynamic_reshape_ops", otherwise=_STABLEHLO),
    AliasModule("experimental.dynamo_mark_sharding", otherwise=_SPMD),
    AliasModule(
        "experimental.dynamo_set_buffer_donor",
        otherwise="ltc finds by itself which memory a program may write over",
    ),
    AliasModule(
        "experimental.quantized",
        otherwise="quantized weights are PyTorch's own: torch.ao.quantization",
    ),
    AliasModule(
        "experimental.xla_quantized_matmul",
        otherwise="quantized weights are PyTorch's own: torch.ao.quantization",
    ),
    AliasModule(
        "experimental.pytreeify",
        otherwise="write a torch.autograd.Function of tensors",
    ),
    AliasModule(
        "experimental.deprecation",
        otherwise="it marks torch_xla's own names. Use warnings.warn",
    ),
    AliasModule("stablehlo", otherwise=_STABLEHLO),
    AliasModule("tf_saved_model_integration", otherwise=_STABLEHLO),
    AliasModule("_internal"),
    AliasModule(
        "_internal.pjrt",
        {_HERE + "replica_loops": "run_multiprocess"},
        otherwise="processes are started by torch_xla.launch",
    ),
)

MODULES = {row.name: row for row in _ROWS}

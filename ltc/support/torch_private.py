"""Every private name of torch that ltc leans on, in one place, each with what it is used for.

A name that this torch lacks is told here, once, when ltc is imported, together with the versions
that have it.  No other module spells one; a test looks.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch

DEVICE_TYPE = "ltc"
OLDEST, NEWEST = (2, 10), (2, 16)


def require() -> None:
    """Raise ImportError if this torch is too old, or taken; warn of a version that is untested."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST:
        raise ImportError(
            f"ltc needs torch >= {_text(OLDEST)}: torch {torch.__version__} cannot host a "
            f"device written in Python. Install a newer one: pip install 'torch==2.13.*'."
        )
    if version >= NEWEST:
        warnings.warn(
            f"ltc has not been tested with torch {torch.__version__}, only with {_text(OLDEST)} up to "
            f"(without) {_text(NEWEST)}. If something fails, try torch 2.13.",
            stacklevel=2,
        )
    taken = _named("torch._C", "_get_privateuse1_backend_name")()
    if taken not in ("privateuseone", DEVICE_TYPE):
        raise ImportError(
            f"torch has one slot for an outside device and {taken!r} holds it in this process. "
            f"Import ltc in a process that does not import that backend."
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _named(module: str, name: str) -> Any:
    """Return the object of that name in a module of torch; raise ImportError if this torch has
    none.
    """
    try:
        return resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks {module}.{name}, which ltc is built on. Use a "
            f"torch from {_text(OLDEST)} up to (without) {_text(NEWEST)}."
        ) from error


class Replaceable:
    """A private function of torch in whose place ltc puts one that knows lazy tensors."""

    def __init__(self, module: str, name: str, *, also_in: str = "") -> None:
        """Find the function.

        Args:
            module, name: The module, and the function there, with its class if it is in one.
            also_in: Another module that has imported it.
        """
        _named(module, name)
        holder, _, self._name = name.rpartition(".")
        self._holders = [_named(module, holder) if holder else import_module(module)]
        if also_in:
            self._holders.append(import_module(also_in))

    @property
    def current(self) -> Callable[..., Any]:
        """Return the present function: torch's own, or its replacement."""
        return getattr(self._holders[0], self._name)

    def replace(self, function: Callable[..., Any]) -> None:
        for holder in self._holders:
            setattr(holder, self._name, function)


require()

# --- what a device is made of

PrivateUse1Hooks = _named("torch._C", "_acc.PrivateUse1Hooks")
PrivateUse1DeviceGuard = _named("torch._C", "_acc.DeviceGuard")
register_hooks = _named("torch._C", "_acc.register_python_privateuseone_hook")
register_device_guard = _named("torch._C", "_acc.register_python_privateuseone_device_guard")
artifact_logger = _named("torch._logging", "getArtifactLogger")  # what TORCH_LOGS switches on
register_device_module = _named("torch", "_register_device_module")
PRIVATE_USE_1 = _named("torch._C", "_autograd.DeviceType.PrivateUse1")
create_empty_tensor = _named("torch._C", "_acc.create_empty_tensor")
reinterpret_tensor = _named("torch._C", "_dynamo.guards._reinterpret_tensor")
from_dlpack = _named("torch._C", "_from_dlpack")
CURRENT_INDEX = Replaceable("torch._C", "_accelerator_getDeviceIndex")
SET_INDEX = Replaceable("torch._C", "_accelerator_setDeviceIndex")
EXCHANGE_INDEX = Replaceable("torch._C", "_accelerator_exchangeDevice")
PUT_INDEX_BACK = Replaceable("torch._C", "_accelerator_maybeExchangeDevice")
STREAM_OF_INDEX = Replaceable("torch._C", "_accelerator_getStream")

# --- dispatch

OpOverload = _named("torch._ops", "OpOverload")
DispatchKey = _named("torch._C", "DispatchKey")
DispatchKeySet = _named("torch._C", "DispatchKeySet")
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastPrivateUse1)
has_kernel = _named("torch._C", "_dispatch_has_kernel_for_dispatch_key")
FILE_OF_OPS: str = _named("torch", "_ops.__file__")  # where a call of an overload begins
# (key) -> the names of all overloads that have a kernel for it
overloads_with_kernel = _named("torch._C", "_dispatch_get_registrations_for_dispatch_key")
all_overload_names = _named("torch._C", "_dispatch_get_all_op_names")
schema_named = _named("torch._C", "_get_schema")  # (name, overload); RuntimeError if there is none
schema_of_overload = operator.attrgetter("_schema")
exclude_dispatch_keys = _named("torch._C", "_ExcludeDispatchKeyGuard")
force_dispatch_keys = _named("torch._C", "_ForceDispatchKeyGuard")
below_autograd = _named("torch._C", "_AutoDispatchBelowAutograd")
function_mode_depth = _named("torch._C", "_len_torch_function_stack")
kernel_of_key = operator.attrgetter("_op_dk")  # what calls an overload's C++ kernel for a key
function_of = operator.attrgetter("_op")  # what an overload calls, without its Python
# Where torch's own Python functions are: they take their arguments in half an overload's time.
_BOUND = tuple(_named("torch._C", one) for one in ("_VariableFunctions", "TensorBase", "_nn"))
attention_chosen_for = _named("torch", "_fused_sdp_choice")  # the number of an SDPBackend
dispatch_mode_depth = _named("torch._C", "_len_torch_dispatch_stack")
no_dispatch_modes = _named("torch.utils._python_dispatch", "_disable_current_modes")
plain_functions = _named("torch._C", "DisableTorchFunction")  # no default device, no user's mode
DispatchMode: Any = _named("torch.utils._python_dispatch", "TorchDispatchMode")
map_leaves = _named("torch.utils._pytree", "tree_map")
is_transformed = _named("torch._C", "_are_functorch_transforms_active")
library_for_a_while = _named("torch.library", "_scoped_library")
_default_dispatch = _named("torch._C", "_disabled_torch_dispatch_impl")
_forward_mode = _named("torch.autograd", "forward_ad")


# Of `torch.autograd.grad(is_grads_batched=True)`, which is no transformation.
is_batched = _named("torch._C._functorch", "is_legacy_batchedtensor")


def bound_function(name: str) -> Callable[..., Any] | None:
    """torch's own Python function or method of that name, under whatever Python has put over it."""
    return next((f for place in _BOUND if (f := getattr(place, name, None)) is not None), None)


def is_forward_mode() -> bool:
    """Return True if tensors may carry tangents."""
    return _forward_mode._current_level >= 0


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's class handles overloads itself, as DTensor does."""
    return type(tensor).__torch_dispatch__ is not _default_dispatch


# --- autograd

is_view_replay_enabled = _named("torch._C", "_is_view_replay_enabled")
set_view_replay_enabled = _named("torch._C", "_set_view_replay_enabled")
is_multithreading_enabled = _named("torch._C", "_is_multithreading_enabled")
set_multithreading_enabled = _named("torch._C", "_set_multithreading_enabled")
graph_task = _named("torch._C", "_current_graph_task_id")  # -1 outside a backward
autograd_node = _named("torch._C", "_current_autograd_node")  # whose backward runs; or None
sequence_number = _named("torch._C", "_autograd._get_sequence_nr")  # of the next such node
number_of_node = operator.methodcaller("_sequence_nr")
is_view = operator.methodcaller("_is_view")  # one that autograd follows
CheckpointFrame = _named("torch.utils.checkpoint", "_CheckpointFrame")
# (False) -> the pair that `torch.autograd.graph.saved_tensors_hooks` has set, or None
saved_tensors_hooks = _named("torch._C", "_autograd._top_saved_tensors_default_hooks")
RUN_BACKWARD = Replaceable("torch.autograd.graph", "_engine_run_backward", also_in="torch.autograd")
ADAM_ON_LISTS = Replaceable("torch.optim.adam", "_multi_tensor_adam")
GLOBAL_MODULE_HOOKS = tuple(  # around the calls of every module
    _named("torch.nn.modules.module", f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
GLOBAL_OPTIMIZER_HOOKS = tuple(  # around the steps of every optimizer
    _named("torch.optim.optimizer", f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")
)
hooks_of_tensor = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)  # its attributes: None, or a dict

# --- the profiler

_profiler = _named("torch.autograd", "profiler")
record_region = _named("torch._C", "_profiler._RecordFunctionFast")  # a span of a name


def is_profiled() -> bool:
    """Return True if torch's profiler is active in this process."""
    return bool(_profiler._is_profiler_enabled)


def shown_region(name: str) -> Any:
    """A block that torch's profiler shows by that name, where it looks."""
    return record_region(name) if is_profiled() else contextlib.nullcontext()


# --- tensors and storages

Generator = _named("torch._C", "Generator")
StorageBase = _named("torch._C", "StorageBase")
TensorBase = _named("torch._C", "TensorBase")
TENSOR_CLASSES = _named("torch", "_tensor_classes")
storage_from_pointer = _named("torch._C", "_construct_storage_from_data_pointer")
untyped_part = operator.attrgetter("_untyped_storage")  # of a typed storage
element_bytes = operator.methodcaller("_element_size")
storage_identity = operator.attrgetter("_cdata")
storage_use_count = _named("torch._C", "_storage_Use_Count")  # of a storage's identity
exchange_contents = _named("torch._C", "_swap_tensor_impl")  # of two tensors; Python objects stay
# In less than half the time of torch.empty, where this torch has it.
empty_strided_cpu = getattr(_named("torch._C", "_dynamo.guards"), "_empty_strided_cpu", None)
foreach_mul = _named("torch", "_foreach_mul")
foreach_copy_ = _named("torch", "_foreach_copy_")
increment_version = _named("torch._C", "_increment_version")  # of a list of tensors
dtypes_without_typed_storage = _named("torch.storage", "_new_dtypes")
rebuild_tensor = _named("torch._utils", "_rebuild_tensor_v2")
rebuild_tensor_with_dtype = _named("torch._utils", "_rebuild_tensor_v3")
IS_ASSIGNABLE = Replaceable("torch", "_has_compatible_shallow_copy_type")
HAS_STORAGE = Replaceable("torch._C", "_has_storage")
REDUCE_TENSOR = Replaceable("torch", "Tensor._reduce_ex_internal")
TYPED_STORAGE_SIZE = Replaceable("torch", "TypedStorage._size")
TO_DLPACK = (
    Replaceable("torch._C", "_to_dlpack"),
    Replaceable("torch._C", "_to_dlpack_versioned"),
)
TENSOR_TEXT = Replaceable("torch._tensor_str", "_tensor_str")  # of its elements
TENSOR_REPR = Replaceable("torch._tensor_str", "_str")  # with its device, dtype, gradient
DEFAULT_DTYPE_SETTERS = (
    Replaceable("torch._C", "_set_default_dtype"),
    Replaceable("torch._C", "_set_default_tensor_type"),
)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """The storage as one of that dtype, which torch.save asks for."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# --- sparse tensors in coordinates, coalesced or not

places_of = operator.methodcaller("_indices")  # [sparse dimensions, nnz]
elements_of = operator.methodcaller("_values")  # [nnz, *dense dimensions]
count_of = operator.methodcaller("_nnz")


def coalesced(tensor: torch.Tensor, is_coalesced: bool = True) -> torch.Tensor:
    """The tensor, marked as one."""
    return tensor._coalesced_(is_coalesced)


# --- modules and loaders

RecursiveScriptModule = _named("torch.jit", "_script.RecursiveScriptModule")
register_builtin = _named("torch.jit", "_builtins._register_builtin")
TRACED_GRAPH = Replaceable("torch.jit", "_get_trace_graph")  # what torch.onnx.export has traced
# Passes of torch.onnx.export(dynamo=False) that look into the memory of a model's parameters:
# (graph, name -> tensor, …).
ONNX_PASSES = tuple(
    Replaceable("torch._C", f"_jit_pass_onnx_{name}")
    for name in ("eval_peephole", "constant_fold", "deduplicate_initializers")
)
MODULE_APPLY = Replaceable("torch.nn", "Module._apply")
MODULE_CALL = _named("torch.nn", "Module._call_impl")
# What may be called on a parameter without a shape.
taken_uninitialized = _named("torch.nn.parameter", "UninitializedTensorMixin._allowed_methods")
own_parameters = operator.attrgetter("_parameters")  # of a module: name -> parameter, itself
own_buffers = operator.attrgetter("_buffers")


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, unless they are to stay for the next epoch.

    Its `__del__` would: but where an error keeps it alive that runs in a garbage collection, which
    may have taken its queues first, and then waits 5 s for each worker.
    """
    if not getattr(iterator, "_persistent_workers", True):
        getattr(iterator, "_shutdown_workers", lambda: None)()


# --- what is asked of kernels without running them

FakeTensorMode = _named("torch._subclasses.fake_tensor", "FakeTensorMode")
DataDependentOutputException = _named(
    "torch._subclasses.fake_tensor", "DataDependentOutputException"
)
DynamicOutputShapeException = _named("torch._subclasses.fake_tensor", "DynamicOutputShapeException")
fake_tensor_log = logging.getLogger(FakeTensorMode.__module__)

# --- torch.compile

_dynamo = _named("torch._C", "_dynamo.eval_frame")
_LEFT_ALONE = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)


def leave_to_python(code: types.CodeType) -> None:
    """Let torch.compile trace no frame of this code, nor any frame below one."""
    _dynamo.set_code_exec_strategy(code, _LEFT_ALONE)


def left_to_python_now() -> Any:
    """Return the answer that does for one frame what `leave_to_python` does for all frames of a
    code.
    """
    answer = import_module("torch._dynamo.types").ConvertFrameReturn
    return answer(frame_exec_strategy=_LEFT_ALONE, apply_to_code=False)


def traced_frames() -> Replaceable:
    """Return the function that torch.compile calls for each frame that begins, until it has code
    for it.
    """
    return Replaceable("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__")


def optimizer_step_code() -> types.CodeType:
    """The code of every optimizer's `step`: its own, with its hooks around it."""
    return torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def never_inline(package: str) -> None:
    """Let torch.compile end its graph where the user's code calls a function of this package."""
    torch._dynamo.trace_rules.add(package)


InductorBackend: Any = _named("torch", "_TorchCompileInductorWrapper")


def name_backend(name: str, backend: Callable[..., Any]) -> None:
    """Let torch.compile know a backend by a name, unless its entry point is being loaded for that."""
    registry = import_module("torch._dynamo.backends.registry")
    if name not in registry._BACKENDS:
        registry.register_backend(backend, name=name)


EXPORT_ARCHIVE = "torch.export.pt2_archive._package"  # torch.export.save imports it


def is_pickled_in_exports() -> Replaceable:
    """Return the function that decides whether torch.export.save writes a weight as torch.save
    does.
    """
    return Replaceable(EXPORT_ARCHIVE, "_should_use_pickle")


# --- the default device

DEVICE_CONTEXT = Replaceable("torch.utils._device", "DeviceContext.__init__")  # `with device:` too
UNDER_DEVICE_CONTEXT = Replaceable("torch.utils._device", "DeviceContext.__torch_function__")
device_constructors = _named("torch.utils._device", "_device_constructors")  # what it applies to
builtin_of_scripts = _named("torch.jit._builtins", "_find_builtin")  # the operation of a function
name_for_scripts = _named("torch.jit._builtins", "_register_builtin")  # a function stands for it


# --- torch.distributed

ProcessGroup = _named("torch._C._distributed_c10d", "ProcessGroup")
Work = _named("torch._C._distributed_c10d", "Work")
work_from_future = _named("torch._C._distributed_c10d", "_create_work_from_future")
resolve_process_group = _named("torch.distributed.distributed_c10d", "_resolve_process_group")
default_store = _named("torch.distributed.distributed_c10d", "_get_default_store")
NEW_GROUP = Replaceable("torch.distributed.distributed_c10d", "_new_group_with_tag")
NEW_PROCESS_GROUP = Replaceable("torch.distributed.distributed_c10d", "_new_process_group_helper")
SPLIT_SOURCE = Replaceable("torch.distributed.distributed_c10d", "_get_split_source")
MAKE_REDUCER = Replaceable("torch.distributed", "Reducer.__init__")
SET_STATIC_GRAPH = Replaceable("torch.distributed", "Reducer._set_static_graph")
_DDP = "DistributedDataParallel."
REGISTER_BUILTIN_HOOK = Replaceable("torch.nn.parallel", _DDP + "_register_builtin_comm_hook")
CHECK_HOOK = Replaceable("torch.nn.parallel", _DDP + "_check_comm_hook")
MATCH_USED_MAP = Replaceable("torch.nn.parallel", _DDP + "_match_unused_params_allreduce")
REBUILD_BUCKETS = Replaceable("torch.distributed", "Reducer._rebuild_buckets")
WAIT_FOR_WORK = Replaceable("torch._C._distributed_c10d", "Work.wait")
group_devices = operator.attrgetter("_device_types")  # of a process group: what it serves


def wrapper_on_cpu(kind: type, like: torch.Tensor) -> Any:
    """A tensor of a subclass, without memory, that has the shape and dtype of `like`."""
    make = torch.Tensor._make_wrapper_subclass
    return make(kind, like.shape, dtype=like.dtype, device=torch.device("cpu"))


def backend_of_group(group: Any, kind: str) -> Any:
    """Return the backend that moves the tensors of that kind of device."""
    return group._get_backend(torch.device(kind))


def timeout_of_backend(backend: Any) -> timedelta | None:
    """Return how long its calls may take; None if it names no limit."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def add_backend_to_group(group: Any, kind: str, backend: Any) -> None:
    """Let it move the tensors of that kind of device too."""
    group._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, backend)


def name_custom_backend(group: Any) -> None:
    """Let a group find its backend by default, as DistributedDataParallel asks for it.

    Of a group that is made without the name of a backend torch takes gloo for the default one.
    """
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)


def gather_flat(backend: Any, result: torch.Tensor, part: torch.Tensor) -> Any:
    """The Work that fills `result` with every rank's part, one behind the other."""
    return backend._allgather_base(result, part)


def reduce_scatter_flat(backend: Any, result: torch.Tensor, whole: torch.Tensor, how: Any) -> Any:
    """The Work that fills `result` with this rank's part of the sum."""
    return backend._reduce_scatter_base(result, whole, how)

"""Kernels of `c10d::*` and `_c10d_functional::*` for lazy tensors: recorded where possible.

Point-to-point calls, and those that treat one rank unlike the others, run at once on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ltc.device.recording.fallback import assign_host
from ltc.device.recording.tensors import is_lazy, state_of
from ltc.distributed.c10d import on_host, traced
from ltc.support.torch_private import ProcessGroup, plain_functions, resolve_process_group

# --- c10d: results are written into tensors ---------------------------------------------------


def _all_reduce(tensors, group, reduce_op, *_) -> None:
    _assign(tensors, traced.all_reduce(tensors, _kind(reduce_op), group.group_name))


def _broadcast(
    tensors, group, root_rank: int, root_tensor: int, *_, exchange=traced.record
) -> None:
    given = [tensors[root_tensor]]
    _assign(tensors, traced.broadcast(given, root_rank, group.group_name, exchange))


def _all_gather(output_lists, inputs, group, *_, exchange=traced.record) -> None:
    for outputs, tensor in zip(output_lists, inputs):
        _require_one_of_each("all_gather", outputs, group)
        _require_sizes("all_gather", outputs, tensor.numel())
    gathered = traced.all_gather(_flat(inputs), group.size(), group.group_name, exchange)
    for outputs, joined in zip(output_lists, gathered):
        _assign(outputs, joined.chunk(group.size()))


def _all_gather_base(output, tensor, group, *_, exchange=traced.record) -> None:
    _all_gather_base_coalesced([output], [tensor], group, exchange=exchange)


def _all_gather_base_coalesced(outputs, inputs, group, *_, exchange=traced.record) -> None:
    _require_types("all_gather", outputs, inputs)
    for output, tensor in zip(outputs, inputs):
        _require_sizes("all_gather", [output], tensor.numel() * group.size())
    _assign(outputs, traced.all_gather(_flat(inputs), group.size(), group.group_name, exchange))


def _reduce_scatter(outputs, input_lists, group, reduce_op, *_) -> None:
    for output, tensors in zip(outputs, input_lists):
        _require_one_of_each("reduce_scatter", tensors, group)
        _require_sizes("reduce_scatter", [output], tensors[group.rank()].numel())
    joined = [torch.cat(_of_one_length(_flat(tensors))) for tensors in input_lists]
    sizes = [[x.numel() for x in tensors] for tensors in input_lists]
    scattered = traced.reduce_scatter(
        joined, _kind(reduce_op), group.size(), group.group_name, f"parts {sizes}"
    )
    _assign(outputs, [part[: out.numel()] for out, part in zip(outputs, scattered)])


def _reduce_scatter_base(output, tensor, group, reduce_op, *_) -> None:
    _reduce_scatter_base_coalesced([output], [tensor], group, reduce_op)


def _reduce_scatter_base_coalesced(outputs, inputs, group, reduce_op, *_) -> None:
    _require_types("reduce_scatter", outputs, inputs)
    for output, tensor in zip(outputs, inputs):
        _require_parts("reduce_scatter", tensor, output.numel(), group)
    scattered = traced.reduce_scatter(
        _flat(inputs), _kind(reduce_op), group.size(), group.group_name
    )
    _assign(outputs, scattered)


def _all_to_all_base(output, tensor, group, output_splits, input_splits, *_) -> None:
    _require_types("all_to_all", [output], [tensor])
    received = _splits(output, group, output_splits)
    sent = _splits(tensor, group, input_splits)
    if received[group.rank()] != sent[group.rank()]:
        raise ValueError(
            f"all_to_all: rank {group.rank()} sends itself {sent[group.rank()]} rows and receives "
            f"{received[group.rank()]} from itself. The two numbers must be equal."
        )
    _assign([output], [traced.all_to_all(tensor, received, sent, group.group_name)])


def _all_to_all(outputs, inputs, group, *_) -> None:
    """Lists of one tensor for each rank; as one flat tensor in parts, which every gloo can send."""
    _require_one_of_each("all_to_all", outputs, group)
    _require_one_of_each("all_to_all", inputs, group)
    received, sent = ([x.numel() for x in tensors] for tensors in (outputs, inputs))
    joined = traced.all_to_all(torch.cat(_flat(inputs)), received, sent, group.group_name)
    _assign(outputs, joined.split(received))


def _flat(tensors) -> list[torch.Tensor]:
    return [tensor.reshape(-1) for tensor in tensors]


def _of_one_length(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors, with zeros behind those that are shorter than the longest."""
    length = max(x.numel() for x in tensors)
    if all(x.numel() == length for x in tensors):
        return tensors
    return [torch.nn.functional.pad(x, (0, length - x.numel())) for x in tensors]


# What one rank alone can see is refused there, before anything is recorded: in the exchange it
# would end the run of all.


def _require_one_of_each(call: str, tensors, group) -> None:
    if len(tensors) != group.size():
        raise ValueError(
            f"{call} got a list of {len(tensors)} tensor(s), and the group has {group.size()} "
            f"ranks. Pass one tensor for each rank."
        )


def _require_sizes(call: str, outputs, elements: int) -> None:
    for output in outputs:
        if output.numel() != elements:
            raise ValueError(
                f"{call}: an output of {output.numel()} elements, {list(output.shape)}, for a result "
                f"of {elements}. All ranks give parts of one size: pad them, or pass outputs that "
                f"fit."
            )


def _require_parts(call: str, tensor: torch.Tensor, elements: int, group) -> None:
    if tensor.numel() != elements * group.size():
        raise ValueError(
            f"{call}: a tensor of {tensor.numel()} elements, {list(tensor.shape)}, for "
            f"{group.size()} ranks with outputs of {elements} elements each. Pad it, or pass outputs "
            f"that fit."
        )


def _require_types(call: str, outputs, inputs) -> None:
    for output, tensor in zip(outputs, inputs):
        if output.dtype is not tensor.dtype:
            raise ValueError(
                f"{call}: an output of {output.dtype} for a result of {tensor.dtype}. Pass one of the "
                f"same dtype."
            )


IN_PLACE = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_base_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_base_coalesced,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
}


def in_place_kernel(name: str) -> Callable:
    """Return the kernel of `c10d::<name>`, whose work is over as far as the caller can tell."""
    record = IN_PLACE[name]
    overload = getattr(torch.ops.c10d, name).default
    group_at = on_host.position_of("process_group", overload)
    at_once = on_host.kernel_of(name)

    def kernel(*args, **kwargs):
        values = on_host.in_schema_order(overload, args, kwargs)
        tensors = on_host.tensors_in(values)
        if not all(map(is_lazy, tensors)):
            return at_once(*args, **kwargs)
        operands = list(values)
        operands[group_at] = on_host.group_of(values[group_at])
        how = {"exchange": traced.run_at_once} if _is_control(name, tensors) else {}
        with torch.no_grad(), plain_functions():
            record(*operands, **how)
        return on_host.returned(overload, values, on_host.done(values[0]))

    return kernel


_CONTROL_CALLS = frozenset({"broadcast_", "allgather_", "_allgather_base_"})
_CONTROL_DTYPES = frozenset({torch.uint8, torch.int32, torch.int64})


def _is_control(name: str, tensors: list[torch.Tensor]) -> bool:
    """Return True if it moves whole numbers that are computed already: sizes, indices, a pickle.

    They are read next, to decide what to do; a program of their own would only be in the way.
    Another rank may have to compute its own first, and records: both ways meet in one exchange.
    """
    return name in _CONTROL_CALLS and all(
        x.dtype in _CONTROL_DTYPES and state_of(x).buffer is not None for x in tensors
    )


def _kind(reduce_op) -> str:
    operation = dist.ReduceOp.RedOpType(reduce_op.op())
    return traced.KINDS.get(operation, operation.name)


def _splits(tensor: torch.Tensor, group: ProcessGroup, given: list[int]) -> list[int]:
    """Return how many rows of the tensor go to each rank, or come from it; ValueError if they do
    not fit.
    """
    size, rows = group.size(), tensor.shape[0] if tensor.dim() else 0
    splits = list(given) or [rows // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: parts of {splits} rows of a tensor {list(tensor.shape)} among {size} "
            f"ranks. Pass one number of rows for each rank; their sum must be the first dimension."
        )
    return splits


def _assign(targets, results) -> None:
    """Each target holds its result; like any collective, that leaves its autograd version alone."""
    for target, result in zip(targets, results, strict=True):
        shaped = result.reshape(target.shape)
        if is_lazy(shaped):
            target.data.copy_(shaped)
        else:
            assign_host(target, shaped.to(target.dtype))


# --- _c10d_functional: results are new tensors ------------------------------------------------


def _group(name) -> ProcessGroup:
    """Return the group of a name, or of the object that torch.compile hands over in its place."""
    group = resolve_process_group(name) if isinstance(name, str) else name
    group = ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
    on_host.require_host_backend(group)
    return group


def all_reduce(tensors, reduce_op: str, group):
    return traced.all_reduce(tensors, reduce_op.lower(), _group(group).group_name)


def all_gather(tensors, group_size: int, group):
    tensors = [x.reshape(1) if x.dim() == 0 else x for x in tensors]
    return traced.all_gather(tensors, group_size, _group(group).group_name)


def reduce_scatter(tensors, reduce_op: str, group_size: int, group):
    return traced.reduce_scatter(tensors, reduce_op.lower(), group_size, _group(group).group_name)


def broadcast(tensors, src: int, group):
    return traced.broadcast(tensors, src, _group(group).group_name)


def all_to_all_single(x, output_splits, input_splits, group):
    group = _group(group)
    if len(output_splits) != group.size() or min(output_splits) < 0:
        raise ValueError(
            f"all_to_all: parts of {list(output_splits)} rows from {group.size()} ranks. Pass one number "
            f"of rows, 0 or more, for each rank."
        )
    splits = _splits(x, group, input_splits)
    return traced.all_to_all(x, output_splits, splits, group.group_name)


def wait_tensor(x):
    """Return x: a recorded result counts as ready, because reading it waits."""
    return x


def _of_one(function: Callable) -> Callable:
    return lambda x, *rest: function([x], *rest)[0]


def _into(function: Callable) -> Callable:
    def into(x, *rest, out):
        _assign([out], function([x], *rest))
        return out

    return into


def _over_itself(function: Callable) -> Callable:
    def over_itself(x, *rest):
        _assign([x], function([x], *rest))
        return x

    return over_itself


def _over_themselves(function: Callable) -> Callable:
    def over_themselves(tensors, *rest):
        _assign(tensors, function(tensors, *rest))
        return tensors

    return over_themselves


FUNCTIONAL = {
    "all_reduce": _of_one(all_reduce),
    "all_reduce_": _over_itself(all_reduce),
    "all_reduce_coalesced": all_reduce,
    "all_reduce_coalesced_": _over_themselves(all_reduce),
    "all_gather_into_tensor": _of_one(all_gather),
    "all_gather_into_tensor_out": _into(all_gather),
    "all_gather_into_tensor_coalesced": all_gather,
    "reduce_scatter_tensor": _of_one(reduce_scatter),
    "reduce_scatter_tensor_out": _into(reduce_scatter),
    "reduce_scatter_tensor_coalesced": reduce_scatter,
    "broadcast": _of_one(broadcast),
    "broadcast_": _over_itself(broadcast),
    "all_to_all_single": all_to_all_single,
    "wait_tensor": wait_tensor,
}


def functional_kernel(name: str) -> Callable:
    """The kernel of `_c10d_functional::<name>`."""
    record = FUNCTIONAL[name]

    def kernel(*args, **kwargs):
        with torch.no_grad(), plain_functions():
            return record(*args, **kwargs)

    return kernel

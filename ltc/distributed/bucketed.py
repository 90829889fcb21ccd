"""Lists of tensors exchanged some at a time: few enough exchanges, none too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ltc.distributed import collectives
from ltc.distributed.collectives import Groups

BUCKET_MEGABYTES = 160.0


class CoalescingBuckets:
    """Call a function with lists of tensors that together stay below a size; results keep order.

    Calling the object returns the results.

    Args:
        bucket_cap_mb: The most bytes of a call's tensors together, in units of 2**20.
        func: List of tensors -> list of as many results.
        input_list: The tensors; one larger than `bucket_cap_mb` travels alone.
        output_list: The tensors that get the results, one for each input; None makes new ones.

    Raises:
        TypeError: For an `input_list` that is no list.
        ValueError: For an `output_list` of another length, or with tensors of other shapes.

    Example:
        >>> def doubled(tensors):
        ...     print(len(tensors), "at once")
        ...     return [2 * x for x in tensors]
        >>> inputs = [torch.ones(n, device="ltc") for n in (1, 2, 3)]
        >>> results = ltm.CoalescingBuckets(doubled, inputs)()
        3 at once
        >>> results[1].tolist()
        [2.0, 2.0]
    """

    def __init__(
        self,
        func: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        output_list: list | None = None,
        bucket_cap_mb: float = BUCKET_MEGABYTES,
    ) -> None:
        if not isinstance(input_list, (list, tuple)):
            raise TypeError(f"input_list is a {type(input_list).__name__}: pass a list of tensors")
        if output_list is not None and len(output_list) != len(input_list):
            raise ValueError(
                f"output_list has {len(output_list)} tensors and input_list {len(input_list)}"
            )
        self._function, self._inputs, self._outputs = func, list(input_list), output_list
        self._limit = bucket_cap_mb * (1 << 20)
        self._results: list = [None] * len(self._inputs)
        self._bucket: list[int] = []
        self._bytes = 0

    def add(self, tensor: torch.Tensor, idx: int) -> None:
        """Put a tensor into the open bucket, sending that first where there is no room."""
        size = tensor.numel() * tensor.element_size()
        if self._bucket and self._bytes + size > self._limit:
            self.flush()
        self._bucket.append(idx)
        self._inputs[idx] = tensor
        self._bytes += size

    def flush(self) -> None:
        """Exchange what the open bucket holds."""
        if self._bucket:
            results = self._function([self._inputs[i] for i in self._bucket])
            for i, result in zip(self._bucket, results, strict=True):
                if self._outputs is not None:
                    result = into(self._outputs[i], result)
                self._results[i] = result
        self._bucket, self._bytes = [], 0

    def __call__(self) -> list[torch.Tensor]:
        for i, tensor in enumerate(self._inputs):
            self.add(tensor, i)
        self.flush()
        return self._results


def into(output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`output`, holding `result` from now on.

    Raises:
        ValueError: If their shapes differ.

    Example:
        >>> from ltc.distributed.bucketed import into
        >>> into(torch.empty(2, device="ltc"), torch.ones(2, device="ltc")).tolist()
        [1.0, 1.0]
    """
    if tuple(output.shape) != tuple(result.shape):
        raise ValueError(f"output of shape {list(output.shape)} for {list(result.shape)}")
    with torch.no_grad():
        return output.copy_(result)


def all_gather_bucketized(
    input_list,
    dim: int = 0,
    groups: Groups = None,
    output=None,
    pin_layout: bool = False,
    bucket_cap_mb: float = BUCKET_MEGABYTES,
) -> list[torch.Tensor]:
    """`all_gather` of each tensor of the list, in its order.

    Args:
        input_list: A list of tensors.
        dim: The dimension along which they are joined.
        groups: Lists of ordinals that exchange among themselves; None: all.
        output: The tensors that get the results, one for each input; None makes new ones.
        bucket_cap_mb: The most bytes gathered at a time, in units of 2**20.

    Returns:
        The joined tensors, in the order of `input_list`; `output` where it is given.

    Raises:
        RuntimeError: With `pin_layout`.
        TypeError: For an input that is no list.
        ValueError: For an `output` of another length or of other shapes; and what `all_gather`
            raises.

    Example:
        >>> x, y = torch.ones(2, device="ltc"), torch.zeros(1, device="ltc")
        >>> [z.tolist() for z in ltm.all_gather_bucketized([x, y])]  # each joined with the others'
        [[1.0, 1.0], [0.0]]
    """
    _refuse_pinned(pin_layout, "all_gather_bucketized")

    def gather(tensors):
        return [collectives.all_gather(x, dim, groups) for x in tensors]

    return CoalescingBuckets(gather, input_list, output, bucket_cap_mb)()


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output=None,
    pin_layout: bool = False,
    bucket_cap_mb: float = BUCKET_MEGABYTES,
) -> list[torch.Tensor]:
    """`reduce_scatter` of each tensor of the list, in its order.

    Args:
        reduce_type: "sum", "mul", "and", "or", "min" or "max".
        input_list: A list of tensors.
        scale: A factor of each result.
        scatter_dim: The dimension that is divided among the members.
        shard_count: The number of members of a group.
        groups: Lists of ordinals that exchange among themselves; None: all.
        output: The tensors that get the results, one for each input; None makes new ones.
        bucket_cap_mb: The most bytes reduced at a time, in units of 2**20.

    Returns:
        This replica's part of each, in the order of `input_list`; `output` where it is given.

    Raises:
        RuntimeError: With `pin_layout`.
        TypeError: For an input that is no list.
        ValueError: For an `output` of another length or of other shapes; and what `reduce_scatter`
            raises.

    Example:
        >>> x, y = torch.ones(2, device="ltc"), torch.zeros(1, device="ltc")
        >>> parts = ltm.reduce_scatter_bucketized("sum", [x, y], 0.5, scatter_dim=0, shard_count=1)
        >>> [z.tolist() for z in parts]
        [[0.5, 0.5], [0.0]]
    """
    _refuse_pinned(pin_layout, "reduce_scatter_bucketized")

    def scatter(tensors):
        return [
            collectives.reduce_scatter(reduce_type, x, scale, scatter_dim, shard_count, groups)
            for x in tensors
        ]

    return CoalescingBuckets(scatter, input_list, output, bucket_cap_mb)()


def all_reduce_bucketized_gradients(
    gradients,
    scale: float,
    groups: Groups = None,
    pin_layout: bool = True,
    bucket_cap_mb: float = 0,
) -> None:
    """Sum the gradients over the replicas and multiply by `scale`, in place, the last ones first.

    On one replica nothing is summed or scaled. Raises the errors of `all_reduce`.

    Args:
        groups: Lists of ordinals that sum among themselves; None: all together.
        pin_layout: Ignored: tensors have one layout here.
        bucket_cap_mb: The most bytes summed at a time, in units of 2**20; 0: all at once.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> def replica(rank):
        ...     gradient = torch.full((2,), rank + 1.0, device="ltc")
        ...     ltm.all_reduce_bucketized_gradients([gradient], scale=0.5)
        ...     return gradient.tolist()
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[1.5, 1.5], [1.5, 1.5]]
    """
    backwards = list(gradients)[::-1]
    for bucket in collectives.buckets(backwards, bucket_cap_mb or float("inf")):
        collectives.all_reduce("sum", bucket, scale, groups)


def _refuse_pinned(pin_layout: bool, name: str) -> None:
    if pin_layout:
        raise RuntimeError(f"{name}: lists of tensors have no pinned layout; pass pin_layout=False")

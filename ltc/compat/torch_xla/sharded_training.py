"""torch_xla's names for sharded models and optimizers, over PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer

from ltc.compat.torch_xla.xla_device import native, shown
from ltc.compat.torch_xla.xla_only import XlaOnly, ignored
from ltc.compat.torch_xla.xla_process_group import ensure_group
from ltc.core.lazy_model import reduce_gradients


class XlaFullyShardedDataParallel(FullyShardedDataParallel):
    """PyTorch's FullyShardedDataParallel, by torch_xla's arguments; it shards over all processes.

    Step with `optimizer.step()`, not with xm.optimizer_step: the gradients are averaged already.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        auto_wrap_policy: Callable | None = None,
        auto_wrapper_callable: Callable | None = None,
        param_init_fn: Callable | None = None,
        sharding_groups: Any = None,
        **options: Any,
    ) -> None:
        if sharding_groups is not None or auto_wrapper_callable is not None:
            raise XlaOnly(
                "XlaFullyShardedDataParallel with sharding_groups or auto_wrapper_callable: ltc uses "
                "PyTorch's FSDP, which lacks them. Use "
                "torch.distributed.fsdp.FullyShardedDataParallel with a process_group or a "
                "device_mesh, and wrap inner modules by hand."
            )
        if options:
            ignored("fsdp_options", f"PyTorch's own FSDP has no {', '.join(options)}")
        ensure_group()
        super().__init__(
            module,
            sharding_strategy=_STRATEGIES[bool(reshard_after_forward)],
            mixed_precision=_precision(compute_dtype, buffer_dtype, fp32_reduce_scatter),
            auto_wrap_policy=auto_wrap_policy,
            param_init_fn=param_init_fn,
            device_id=native(shown()),
            use_orig_params=True,
        )

    def get_shard_metadata(self) -> None:
        """Raises XlaOnly: the shards are PyTorch's."""
        raise XlaOnly(
            "get_shard_metadata: the shards are PyTorch's here. Save with "
            "FullyShardedDataParallel.state_dict_type, or torch.distributed.checkpoint."
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, groups: Any = None) -> Any:
        """Scale the gradients so that their norm over all shards is at most `max_norm`."""
        return super().clip_grad_norm_(max_norm, norm_type)


def _precision(
    compute: torch.dtype | None, buffers: torch.dtype | None, reduce_in_float32: bool
) -> MixedPrecision | None:
    """Return the types that differ from the parameters' float32: computed, reduced, kept; None:
    none.
    """
    if compute in (None, torch.float32) and buffers is None:
        return None
    return MixedPrecision(compute, torch.float32 if reduce_in_float32 else compute, buffers)


_STRATEGIES = {True: ShardingStrategy.FULL_SHARD, False: ShardingStrategy.SHARD_GRAD_OP}


class XlaZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
    """PyTorch's ZeroRedundancyOptimizer, by torch_xla's arguments.

    A step averages the gradients over the replicas, clips them, as torch_xla's does where it is not
    told otherwise, and updates each replica's share of the parameters. So a model under DDP, whose
    gradients are averaged before, is not for it.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Any = None,
        **defaults: Any,
    ) -> None:
        if sharding_groups is not None:
            raise XlaOnly(
                "ZeroRedundancyOptimizer with sharding_groups: it is PyTorch's here. Use "
                "torch.distributed.optim.ZeroRedundancyOptimizer with a process_group."
            )
        options = {name: defaults.pop(name) for name in _XLA_OPTIONS if name in defaults}
        if options or optimizer_dtype is not None:
            ignored("zero_options", "PyTorch's own optimizer chooses buckets and dtypes itself")
        ensure_group()
        self._clips, self._max_norm = grad_clipping, 1.0 if max_norm is None else max_norm
        self.grad_norm: torch.Tensor | None = None  # of the last step, before it was clipped
        super().__init__(params, optimizer_class, **defaults)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Average and clip the gradients, then update; what `closure` returned."""
        loss = None if closure is None else closure()
        reduce_gradients(self)
        if self._clips:
            of_all = [p for group in self.param_groups for p in group["params"]]
            self.grad_norm = nn.utils.clip_grad_norm_(of_all, self._max_norm)
        super().step(**kwargs)
        return loss


_XLA_OPTIONS = (
    "grad_norm_groups",
    "lazy_init",
    "bucket_cap_mb_all_gather",
    "bucket_cap_mb_reduce_scatter",
    "use_grad_acc_hook",
    "save_master_weights",
    "higher_cc_precision",
)

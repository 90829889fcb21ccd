"""Optimizers that skip a step on the device: the host never reads whether gradients were finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.errors import Unsupported

Update = Callable[[torch.Tensor, torch.Tensor], Any]


class _SyncFree:
    """The common base: `step` with `found_inf`. A subclass defines the update of one parameter."""

    _step_supports_amp_scaling = True  # GradScaler then sets found_inf and grad_scale, unread

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Make one step, which changes nothing, state included, if `found_inf` is not zero.

        Args:
            found_inf: One number on the device; None: the one that GradScaler found, if it is in
                use.

        Returns:
            The result of `closure`.

        Raises:
            ValueError: If `found_inf` is more than one number.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if found_inf is None:
            found_inf = getattr(self, "found_inf", None)
        update = _update_unless(found_inf)
        grad_scale = getattr(self, "grad_scale", None)
        optimizer: Any = self  # mixed into one of torch.optim
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _check(p)
                    gradient = p.grad if grad_scale is None else p.grad / grad_scale.to(p.device)
                    optimizer._update(
                        p, -gradient if group["maximize"] else gradient, group, update
                    )
        return loss


def _update_unless(found_inf: torch.Tensor | None) -> Update:
    """Return a function of (tensor, new value) that writes the value where `found_inf` is zero."""
    if found_inf is None:
        return torch.Tensor.copy_
    if found_inf.numel() != 1:
        raise ValueError(
            f"found_inf has the shape {list(found_inf.shape)}: pass a tensor of one element."
        )
    skip = found_inf.reshape(()) != 0
    return lambda old, new: old.copy_(torch.where(skip.to(old.device), old, new))


def _check(p: torch.Tensor) -> None:
    if p.is_complex() or (p.grad is not None and p.grad.is_sparse):
        kind = "complex parameters" if p.is_complex() else "sparse gradients"
        raise Unsupported(
            f"The optimizers of ltc.amp.syncfree have no formula for {kind}. "
            f"Use the optimizer of torch.optim, which waits for the device in each step."
        )


class SGD(_SyncFree, torch.optim.SGD):
    """torch.optim.SGD; the state also holds whether a parameter's momentum has begun."""

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict, update: Update) -> None:
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * p
        if group["momentum"]:
            gradient = self._with_momentum(p, gradient, group, update)
        update(p, p - group["lr"] * gradient)

    def _with_momentum(
        self, p: torch.Tensor, gradient: torch.Tensor, group: dict, update: Update
    ) -> torch.Tensor:
        state = self.state[p]
        if "momentum_begun" not in state:
            begun = state.get("momentum_buffer") is not None  # from a state of torch.optim.SGD
            state["momentum_begun"] = torch.full((), begun, dtype=torch.bool, device=p.device)
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer, begun = state["momentum_buffer"], state["momentum_begun"]
        # Dampening spares the first gradient, and the first few steps may all be skipped.
        later = group["momentum"] * buffer + (1 - group["dampening"]) * gradient
        velocity = torch.where(begun, later, gradient)
        update(buffer, velocity)
        update(begun, torch.ones_like(begun))
        return gradient + group["momentum"] * velocity if group["nesterov"] else velocity


class Adam(_SyncFree, torch.optim.Adam):
    """torch.optim.Adam with its step count on the device."""

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict, update: Update) -> None:
        """Source: arXiv:1412.6980, algorithm 1; with decoupled decay, arXiv:1711.05101."""
        state = self._state_of(p, group["amsgrad"])
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if group["decoupled_weight_decay"]:
            decayed = p * (1 - lr * decay)
        else:
            decayed, gradient = p, gradient + decay * p
        step = state["step"] + 1
        mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        largest = torch.maximum(state["max_exp_avg_sq"], square) if group["amsgrad"] else square
        correction1 = 1 - beta1 ** step.double()  # one number: double costs nothing
        correction2 = 1 - beta2 ** step.double()
        denominator = largest.sqrt() / correction2.sqrt() + group["eps"]
        update(p, decayed - (lr / correction1) * mean / denominator)
        update(state["exp_avg"], mean)
        update(state["exp_avg_sq"], square)
        if group["amsgrad"]:
            update(state["max_exp_avg_sq"], largest)
        update(state["step"], step)

    def _state_of(self, p: torch.Tensor, amsgrad: bool) -> dict[str, torch.Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(p)
        state["step"] = state["step"].to(p.device)  # torch.optim.Adam keeps it on the CPU
        return state


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW with its step count on the device."""

"""Mixed precision: autocast, loss scaling, and optimizers that need no read to skip a step."""

from ltc.amp import syncfree
from ltc.amp.autocast import autocast, custom_bwd, custom_fwd
from ltc.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "syncfree"]

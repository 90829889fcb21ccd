"""Closures that run after a step: in the caller's thread, or behind it in one of their own."""

from ltc.training_loop.closures import (
    AsyncClosureHandler,
    ClosureHandler,
    StepClosures,
)

__all__ = [
    "AsyncClosureHandler",
    "ClosureHandler",
    "StepClosures",
]

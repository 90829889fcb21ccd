"""Facts of the device for other packages, handed to them when they are imported."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

from ltc.support.after_import import after_import

# the module of another package, and the plug-in that it is handed to
PLUG_INS = {
    "accelerate.accelerator": "ltc.integrations.accelerate_hooks",
    "accelerate.commands.launch": "ltc.integrations.accelerate_launch",
    "safetensors": "ltc.integrations.safetensors_files",
    "safetensors.torch": "ltc.integrations.safetensors_ties",
    "torch._decomp.decompositions": "ltc.integrations.norm_decompositions",
    "torch.distributed.checkpoint.default_planner": "ltc.integrations.checkpoint_planner",
    "torch.nn.attention.flex_attention": "ltc.integrations.flex_attention",
    "torch.optim.swa_utils": "ltc.integrations.weight_averages",
    "transformers.training_args": "ltc.integrations.transformers_arguments",
    "transformers.trainer": "ltc.integrations.transformers_trainer",
}
STAND_INS = str(Path(__file__).parents[1] / "compat")


def _plug_in(name: str) -> None:
    importlib.import_module(PLUG_INS[name]).install(sys.modules[name])


def install() -> None:
    """Follow the imports to come; what has been imported already is told at once."""
    if STAND_INS in sys.path:  # as in this project's own tests: no torch_xla is installed there
        os.environ.setdefault("USE_TORCH_XLA", "0")
    for name in PLUG_INS:
        after_import(name, functools.partial(_plug_in, name))

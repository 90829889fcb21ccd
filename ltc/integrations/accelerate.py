"""`import ltc.integrations.accelerate`: accelerate, and transformers' Trainer, train on ltc.

It does as the variable ACCELERATE_TORCH_DEVICE=ltc, which both packages read. One that is set
already stays as it is. Import it before an Accelerator or TrainingArguments is made.
"""

from __future__ import annotations

import os

import accelerate  # noqa: F401  # who asks for this without the package is told at once

from ltc.integrations.asked_for import VARIABLE
from ltc.support.torch_private import DEVICE_TYPE

os.environ.setdefault(VARIABLE, DEVICE_TYPE)

"""What the tests of trainers share: a tiny language model, rows to train with, a loop per package."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCRIPTS = Path(__file__).parents[1] / "scripts" / "compare"
WORDS = 48


def prepare_torchvision() -> None:
    """To be called before anything imports torchvision, whose own library may not fit this torch."""
    if find_spec("torchvision"):
        sys.path.insert(0, str(SCRIPTS))
        import torchvision_operators  # noqa: F401


def needs(package: str):
    """The package, or the test is skipped and says why."""
    prepare_torchvision()
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")


def perceptron(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 3))


def batches(shuffle: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(32, 8, generator=generator)
    return DataLoader(TensorDataset(rows, rows[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


def language_model(**options) -> nn.Module:
    transformers = needs("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=WORDS,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        pad_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(2, WORDS, shape, generator=torch.Generator().manual_seed(2))

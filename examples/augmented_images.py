"""Images with augmentation in the loader's workers: a small convolutional network tells ten gratings apart.

Workers make and shift the images while the device trains. Losses and counts stay on the device: an epoch reads
two numbers, behind its last mark.
"""

import math

import torch
from on_both import mark_step, on_both, options
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SIZE, CLASSES, BATCH = 28, 10, 64


class Gratings(Dataset):
    """Stripes at ten angles, shifted, mirrored in brightness and with noise: other ones each time."""

    def __init__(self, images: int) -> None:
        self.images = images
        across = torch.linspace(-math.pi, math.pi, SIZE)
        self.y, self.x = torch.meshgrid(across, across, indexing="ij")

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % CLASSES
        angle = math.pi * label / CLASSES
        shift, contrast = 2 * math.pi * torch.rand(()), torch.rand(()) + 0.5
        image = (3 * (self.x * math.cos(angle) + self.y * math.sin(angle)) + shift).sin()
        return (contrast * image + 0.3 * torch.randn(SIZE, SIZE))[None], label


def network() -> nn.Sequential:
    """Return two convolutions with batch norm, and a linear layer."""
    first = nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.GELU(), nn.MaxPool2d(4)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.MaxPool2d(7)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, CLASSES))


def train(device: str, images: int, epochs: int, workers: int) -> str:
    """Train for some epochs; return loss and accuracy of the last one."""
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(
        Gratings(images), BATCH, shuffle=True, num_workers=workers, drop_last=True,
        persistent_workers=workers > 0, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    for _ in range(epochs):
        total, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for batch, labels in loader:
            x, y = batch.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            right += (outputs.argmax(1) == y).sum()
            mark_step(device)
        found, count = torch.stack([total, right]).tolist()  # one read for both
    return f"loss {found / len(loader):.2f}, accuracy {100 * count / len(loader) / BATCH:.0f} %"


if __name__ == "__main__":
    on_both(train, **options(__doc__, images=6400, epochs=6, workers=2))

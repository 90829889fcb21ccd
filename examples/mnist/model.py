"""The convolutional network for 28x28 digits that the examples train; it knows nothing of devices."""

import torch
from torch import nn
from torch.nn import functional as F


class MNIST(nn.Module):
    """Two convolutions and two linear layers: images [N, 1, 28, 28] to log-probabilities [N, 10].

    dropout  the share of channels (after the second convolution) and of hidden units set to zero
             while training; 0 makes a step repeat exactly on another device
    """

    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.narrow = nn.Conv2d(1, 10, kernel_size=5)
        self.wide = nn.Conv2d(10, 20, kernel_size=5)
        self.hidden = nn.Linear(20 * 4 * 4, 50)
        self.digits = nn.Linear(50, 10)
        self.drop_channels = nn.Dropout2d(dropout)
        self.drop_units = nn.Dropout(dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.narrow(images), 2))  # [N, 10, 12, 12]
        x = self.drop_channels(self.wide(x))  # [N, 20, 8, 8]
        x = F.relu(F.max_pool2d(x, 2)).flatten(1)  # [N, 320]
        x = self.drop_units(F.relu(self.hidden(x)))  # [N, 50]
        return F.log_softmax(self.digits(x), dim=1)

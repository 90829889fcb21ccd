"""A character model: an LSTM learns to continue a text, then samples one.

Training runs on the device; the loss is read once in 50 steps. Sampling needs each character for the next
one, a few operations at a time, so it runs on the CPU: there is nothing to compile in it.
"""

import torch
from on_both import mark_step, on_both, options
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps on. " * 40
LETTERS = sorted(set(TEXT))
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class CharacterModel(nn.Module):
    """Logits of the next character after each character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, codes, state=None):
        output, state = self.lstm(self.embedding(codes), state)
        return self.head(output), state


def batch(rows: int, length: int) -> torch.Tensor:
    """Return pieces of the text that begin anywhere."""
    begins = torch.randint(len(CODES) - length - 1, (rows,))
    return torch.stack([CODES[begin : begin + length + 1] for begin in begins])


def train(device: str, steps: int, width: int, sampled: int) -> str:
    """Train, and return the last loss and a sample."""
    model = CharacterModel(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        piece = batch(16, 48).to(device)
        optimizer.zero_grad()
        logits, _ = model(piece[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mark_step(device)
        if step % 50 == 0:
            loss.item()  # behind the mark, and not in each step
    return f"loss {loss.item():.2f}, {sample(model.cpu(), sampled)!r}"


@torch.no_grad()
def sample(model: CharacterModel, length: int) -> str:
    """Return the text that the model continues "the " with."""
    found, codes, state = "the ", torch.tensor([[LETTERS.index(one) for one in "the "]]), None
    for _ in range(length):
        logits, state = model(codes, state)
        codes = logits[:, -1].softmax(-1).multinomial(1)
        found += LETTERS[codes.item()]
    return found


if __name__ == "__main__":
    on_both(train, **options(__doc__, steps=300, width=128, sampled=40))

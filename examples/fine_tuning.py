"""Fine-tuning with transformers' Trainer: a small BERT learns which sentences praise.

The Trainer takes the device of its arguments; `ltc.integrations` ends each of its steps. The model has
random weights, so that nothing is downloaded: put `from_pretrained` in place of the configuration.
"""

import tempfile

import torch
from on_both import on_both, options

GOOD, BAD = (2, 3, 4, 5), (6, 7, 8, 9)  # codes of words of praise and of blame


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of twelve words, of which one tells."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        codes = torch.randint(10, 100, (12,), generator=draw)
        words = GOOD if number % 2 else BAD
        place, word = (int(torch.randint(n, (1,), generator=draw)) for n in (12, len(words)))
        codes[place] = words[word]
        found.append({"input_ids": codes, "labels": torch.tensor(number % 2)})
    return found


def train(device: str, steps: int, width: int) -> str:
    """Train the model by the Trainer; return its accuracy."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=100, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, data = BertForSequenceClassification(shape), sentences(512)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3,
            use_cpu=device == "cpu", report_to=[], disable_tqdm=True, save_strategy="no",
            logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=data).train()
    with torch.no_grad():
        codes = torch.stack([one["input_ids"] for one in data])
        outputs = model.cpu().eval()(input_ids=codes).logits.argmax(1)
    right = (outputs == torch.stack([one["labels"] for one in data])).float().mean().item()
    return f"accuracy {100 * right:.0f} %"


if __name__ == "__main__":
    import ltc  # noqa: F401  the Trainer finds the device

    on_both(train, **options(__doc__, steps=200, width=64))

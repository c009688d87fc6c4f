"""transformers: ``Trainer`` trains a scheduled model; losses as without."""

import copy
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import dynaflow_xla as dfx  # +


def train(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of three steps."""
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        trainer = Trainer(model, given, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """A small classifier, trained twice from the same weights."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    rows = [
        {"input_ids": torch.randint(0, 99, (12,)), "labels": torch.tensor(n % 2)} for n in range(12)
    ]
    plain = train(copy.deepcopy(model), rows)

    model = dfx.schedule(model, "branches")  # +

    fast = train(model, rows)
    print("losses", plain, fast)
    assert all(abs(a - b) < 1e-3 for a, b in zip(plain, fast, strict=True))


if __name__ == "__main__":
    main()

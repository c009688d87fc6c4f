"""Small PyTorch models that several test files run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


class Recurrent(nn.Module):
    """A recurrent layer of torch, and a head."""

    def __init__(self, cls: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = cls(6, 8, **options)
        self.head = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0])


class Towers(nn.Module):
    """Two branches with dropout that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x: Any) -> Any:
        return torch.softmax(self.left(x) * self.right(x), -1)


def as_captured(model: Any) -> Any:
    """What to compare bits with: the model, or where Dynamo would take other code of it, that code.

    transformers asks ``is_exporting()``, which older versions of Dynamo take for true, and then makes
    a causal mask that the attention would not need.
    """

    def asks(x: Any) -> Any:
        return x + int(torch.compiler.is_exporting())

    zero = torch.zeros(1)
    if torch.equal(torch.compile(asks, backend="eager")(zero), asks(zero)):
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo compiles each code object a few times only
    return torch.compile(call, backend="eager", fullgraph=True)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def transformer(name: str) -> Any:
    """A small model of a kind, with random weights; skips where transformers is missing."""
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))
    if name == "gpt2":
        config = tf.GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        model = tf.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # else a warning breaks the graph
        return model
    if name == "bert":
        small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
        return tf.BertForMaskedLM(tf.BertConfig(**small))
    if name == "mixtral":
        config = tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
        model = tf.MixtralForCausalLM(config)
    else:
        config = tf.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
        model = tf.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model

"""transformers: a model in two nano-batches, its hooks kept; values as the original's."""

import torch
from transformers import BertConfig, BertModel

import dynaflow_xla as dfx  # +


def main() -> None:
    """A small BERT with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=99,
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, 99, (4, 16))
    mask = torch.ones_like(ids)
    seen: list[tuple[int, ...]] = []
    model.encoder.layer[0].register_forward_hook(lambda *a: seen.append(tuple(a[2][0].shape)))
    plain = model(input_ids=ids, attention_mask=mask).last_hidden_state

    axes = {"input_ids": 0, "attention_mask": 0}  # +
    model = dfx.schedule(model, dfx.NanoBatch(2), in_axes=axes)  # +

    with torch.no_grad():
        for _ in range(2):
            fast = model(input_ids=ids, attention_mask=mask).last_hidden_state
    print(f"greatest difference: {(fast - plain).abs().max():.1e}; hook called {len(seen)} times")
    assert torch.allclose(fast, plain, atol=1e-5) and len(seen) == 3


if __name__ == "__main__":
    main()

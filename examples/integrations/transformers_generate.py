"""transformers: ``generate`` with a static cache on a scheduled model; the same tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaflow_xla as dfx  # +


def main() -> None:
    """A small Llama with random weights, greedy."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 99, (2, 8))
    given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static",
             "disable_compile": True, "pad_token_id": 0}  # fmt: skip
    plain = model.generate(ids, **given)

    model.forward = dfx.schedule(model.forward, "branches")  # +

    fast = model.generate(ids, **given)
    print("tokens", fast[0, 8:].tolist(), "plans:", dfx.stats().plans)
    assert torch.equal(plain, fast)


if __name__ == "__main__":
    main()

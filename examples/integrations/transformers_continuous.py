"""transformers' continuous batching on a scheduled model: requests come and go, the same tokens."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import dynaflow_xla as dfx  # +


def main() -> None:
    """A small Llama with random weights, three requests, greedy."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("paged|sdpa")
    given = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=98, pad_token_id=0)
    requests = [torch.randint(0, 97, (n,)).tolist() for n in (5, 9, 3)]

    def tokens() -> list[list[int]]:
        return [x.generated_tokens for x in model.generate_batch(requests, given).values()]

    plain = tokens()

    for layer in model.model.layers:  # +
        layer.mlp.forward = dfx.schedule(layer.mlp.forward, "branches")  # +

    fast = tokens()
    print("tokens", fast, "plans:", dfx.stats().plans)
    assert plain == fast


if __name__ == "__main__":
    main()

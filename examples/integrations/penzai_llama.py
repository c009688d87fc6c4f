"""penzai, a JAX library of language models: a small Llama in two nano-batches, the same logits."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llama

import dynaflow_xla as dfx  # +


def main() -> None:
    """A small Llama with random weights; prompts in two nano-batches."""
    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=64, projection_dim=16,
        mlp_hidden_dim=128, num_decoder_blocks=2, vocab_size=99, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip
    model = llama.build_llamalike_transformer(config, jax.random.key(1))
    static, weights = pz.unbind_variables(model, freeze=True)
    ids = jax.random.randint(jax.random.key(0), (4, 16), 0, 99)

    def logits(weights, ids):
        model = pz.bind_variables(static, weights)
        positions = pz.nx.wrap(jnp.arange(ids.shape[1])).tag("seq")
        tokens = pz.nx.wrap(ids).tag("batch", "seq")
        out = model(tokens, token_positions=positions)
        return out.unwrap("batch", "seq", "vocabulary")

    plain = jax.jit(logits)(weights, ids)

    fast = dfx.schedule(jax.jit(logits), dfx.NanoBatch(2), in_axes=(None, 0))  # +
    scheduled = fast(weights, ids)  # +

    lanes = len(dfx.plan(fast, weights, ids).lanes_used)
    print(f"lanes: {lanes}; greatest difference {jnp.abs(plain - scheduled).max():.1e}")
    assert jnp.allclose(plain, scheduled, atol=1e-4)


if __name__ == "__main__":
    main()

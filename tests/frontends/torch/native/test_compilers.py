"""Regions compiled by Inductor and AOTInductor: values, sharing, the cache on disk, threads."""

from __future__ import annotations

import contextlib
import errno
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

X = torch.randn(4, 8)


class Layers(nn.Module):
    """Three layers of one structure, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: Any) -> Any:
        return self.layers[1](self.layers[0](x)) * self.layers[2](x) + self.last(x)


RULES = [dfx.Module("layers/*"), dfx.Module("last")]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Notes each compilation of this process; there are no others."""
    from dynaflow_xla.frontends.torch._compat import compiling
    from dynaflow_xla.frontends.torch.native.compiling import compilers, worker as compile_worker

    made: list[str] = []

    def count(name: str) -> Any:
        original = getattr(compiling, name)

        def call(*args: Any) -> Any:
            made.append(name)
            return original(*args)

        return call

    monkeypatch.setattr(compiling, "inductor", count("inductor"))
    monkeypatch.setattr(compiling, "aot_compile", count("aot_compile"))
    monkeypatch.setattr(compile_worker, "compile_all", lambda *_: None)
    monkeypatch.setattr(compilers, "_compiled", {})
    return made


class Alternating(dfx.Strategy):
    """Each region on the other lane than the one before: nothing has a neighbour."""

    def schedule(self, s: Any) -> None:
        lane = 0
        while ready := s.ready():
            s.execute(ready[0], lane=lane)
            lane = (lane + 1) % s.lanes


def programs(fast: Any) -> list[Any]:
    (entry,) = fast._dfx_core.entries
    return [p for stretch in entry.native.stretches() for p in stretch.programs]


@pytest.mark.parametrize("compiler", ["inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_equal_structures_compile_once(compiler: str, counted: list[str]) -> None:
    model = Layers().eval()
    quick = {"compiler_options": {"cpp_wrapper": False}} if compiler == "inductor" else {}
    fast = dfx.schedule(
        model, strategy=Alternating(), lanes=2, compiler=compiler, rules=RULES, **quick
    )
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
        pg = dfx.graph(fast, X)
    assert len(pg.regions) >= 4
    assert len(counted) == len(set(programs(fast))) < len(programs(fast))
    with torch.no_grad():
        for parameter in model.parameters():  # weights are inputs, not part of what was compiled
            parameter.mul_(2)
        torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
    before = len(counted)
    again = dfx.schedule(
        Layers().eval(), strategy=Alternating(), lanes=2, compiler=compiler, rules=RULES, **quick
    )
    with torch.no_grad():
        again(X)
    assert len(counted) == before


def test_neighbours_on_a_lane_are_one_program(counted: list[str]) -> None:
    model = Layers().eval()
    fast = dfx.schedule(model, strategy="sequential", compiler="inductor", rules=RULES)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
        told = dfx.explain(fast, X)
        (entry,) = fast._dfx_core.entries
        assert len(entry.pg.regions) >= 4
        assert len(programs(fast)) == len(counted) == 1
        operators = sum(s.operators for s in entry.native.stretches())
        assert (
            f"{operators} of {operators} operators are compiled by inductor, as 1 program" in told
        )
        # One by one, for profiles: then each region is a stretch, compiled on its own.
        assert len(dfx.profile(fast, X).region_ns()) == len(entry.pg.regions)
        torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)


def test_code_is_for_the_sizes_that_there_are(counted: list[str]) -> None:
    """Inductor takes sizes as open where it sees real tensors and may guard on shapes."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    model = Layers().eval()
    fast = dfx.schedule(
        model, strategy="sequential", compiler="inductor", compiler_options={"cpp_wrapper": False}
    )
    with torch.no_grad(), config.patch(force_disable_caches=True):
        result, codes = run_and_get_code(fast, X)
        torch.testing.assert_close(result, model(X), rtol=1e-5, atol=1e-5)
    assert len(counted) == len(codes) == 1
    assert "assert_size_stride" in codes[0]
    assert not re.findall(r"\bk?s\d+\b", codes[0])


@pytest.mark.parametrize(
    "options", [{"no_such": 1}, {"max_autotune": "maybe"}, {"epilogue_fusion": [1]}, {3: 4}]
)
@pytest.mark.parametrize("compiler", ["inductor", "aoti", "auto"])
def test_options_that_the_compiler_does_not_have(compiler: str, options: Any) -> None:
    with pytest.raises(
        dfx.PlanError, match=rf"those of torch\.compile.*got '?{next(iter(options))}"
    ):
        dfx.schedule(Layers(), "sequential", compiler=compiler, compiler_options=options)


def test_attention_without_dropout_is_compiled(counted: list[str]) -> None:
    """PyTorch tags it as random, whatever its dropout is."""

    def f(q: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q.sin(), q, q).cos()

    fast = dfx.schedule(f, strategy="sequential", compiler="inductor")
    q = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(q), f(q), rtol=1e-5, atol=1e-5)
    (entry,) = fast._dfx_core.entries
    (stretch,) = entry.native.stretches()
    assert len(stretch.programs) == 1 and stretch.compiled == stretch.operators


@pytest.mark.parametrize("compiler", ["inductor", "aoti"])
@pytest.mark.parametrize("nano", [False, True])
def test_inputs_that_are_kept_negated_or_conjugated(compiler: str, nano: bool) -> None:
    """Inductor's code overlooks these bits, under ``torch.compile``, too."""

    def f(x: Any) -> Any:
        return (x * 2 + x.conj() * 3).tanh() + x

    z = torch.randn(4, 3, dtype=torch.complex64)
    for x in (torch._neg_view(torch.randn(4, 3)), z.conj().imag, z.conj()):
        assert x.is_neg() or x.is_conj()
        strategy = dfx.NanoBatch(2) if nano else RoundRobin()
        fast = dfx.schedule(f, strategy, compiler=compiler, in_axes=0)
        for _ in range(2):
            torch.testing.assert_close(fast(x), f(x), rtol=1e-5, atol=1e-5)


def test_gradients_that_are_kept_negated() -> None:
    f = torch.nn.Linear(3, 3)
    x = torch.randn(4, 3, requires_grad=True)
    fast = dfx.schedule(lambda x: f(x.sin()).tanh() * 2, RoundRobin(), compiler="inductor")
    grads = []
    for made in (fast.original, fast, fast):
        given = torch._neg_view(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
        grads.append(torch.autograd.grad(made(x), (x, f.weight), given))
    for got in grads[1:]:
        torch.testing.assert_close(got, grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_error_in_a_program_is_the_originals(lanes: int) -> None:
    """It names the operator's region, and the next call finds nothing of it."""
    table = nn.Embedding(10, 8)

    def f(i: Any, x: Any) -> Any:
        with dfx.mark("looked up"):
            rows = table(i).sin().cos()
        with dfx.mark("multiplied"):
            product = (x @ x).sin().cos()
        return rows + product

    fast = dfx.schedule(
        f, strategy=Alternating(), lanes=lanes, compiler="inductor",
        compiler_options={"cpp_wrapper": False},
    )  # fmt: skip
    good, x = torch.arange(8), torch.randn(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(good, x), f(good, x), rtol=1e-5, atol=1e-5)
        with pytest.raises(dfx.EngineError, match=r"looked up.*test_compilers.py:\d+.*IndexError"):
            fast(good + 5, x)
        torch.testing.assert_close(fast(good, x), f(good, x), rtol=1e-5, atol=1e-5)


_LOCK = """
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)]).eval()
fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=0, compiler=COMPILER)
x = torch.randn(4, 8)
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    (graph,) = fast._dfx_core.entries
    (made,) = graph._plans.values()
    print([(len(s.programs), s.operators - s.compiled) for s in made.entry.native.stretches()])
"""


@pytest.mark.parametrize("compiler", ["inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_a_lane_of_nano_batches_is_one_program(run_script: Any, compiler: str) -> None:
    """No Python between its operators: the lock is taken where a program begins and where it ends."""
    told = run_script(_LOCK.replace("COMPILER", repr(compiler)))
    assert told.split("\n")[0] in ("[(1, 0), (1, 0)]", "[(1, 0), (1, 0), (0, 1)]")


def test_training_with_inductor(counted: list[str]) -> None:
    model = Layers().train()
    fast = dfx.schedule(
        model, strategy=dfx.Branches(), compiler="inductor", rules=RULES,
        compiler_options={"cpp_wrapper": False},
    )  # fmt: skip
    gradients = []
    for m in (model, fast):
        torch.manual_seed(2)
        model.zero_grad()
        m(X).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for w, g in zip(*gradients, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    assert "operator by operator" in dfx.explain(fast, X)  # the dropout, with the original's bits


_PROCESS = """
from torch import nn
torch.set_num_threads(1)
made = []
from dynaflow_xla.frontends.torch._compat import compiling
from dynaflow_xla.frontends.torch.native.compiling import worker as compile_worker
original, everything = compiling.aot_compile, compile_worker.compile_all
def aot_compile(*args):
    made.append("here")
    return original(*args)
def compile_all(compiler, settings, requests):
    made.extend("process" for _ in requests)
    return everything(compiler, settings, requests)
compiling.aot_compile, compile_worker.compile_all = aot_compile, compile_all
ends = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
model = nn.Sequential(*ends).eval()
class Apart(dfx.Strategy):
    def schedule(self, s):
        for lane in (0, 1):
            s.execute(s.ready()[0], lane=lane)
fast = dfx.schedule(model, strategy=Apart(), lanes=2, compiler="aoti",
                    rules=[dfx.Module("0"), dfx.Module("1")])
x = torch.randn(2, 4)
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x))
print(" ".join(made))
"""


def test_a_second_process_compiles_nothing(run_script: Any) -> None:
    first = run_script(_PROCESS).split()
    assert first == ["process", "process"], "the processes did not compile what was asked"
    assert run_script(_PROCESS).split() == []


_INDUCTOR = """
from torch import nn
from torch._dynamo.utils import counters
torch.set_num_threads(1)
ends = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
model = nn.Sequential(*ends).eval()
class Apart(dfx.Strategy):
    def schedule(self, s):
        for lane in (0, 1):
            s.execute(s.ready()[0], lane=lane)
fast = dfx.schedule(model, strategy=Apart(), lanes=2, compiler="inductor",
                    rules=[dfx.Module("0"), dfx.Module("1")])
x = torch.randn(2, 4)
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x))
seen = counters["inductor"]
print(seen["fxgraph_cache_hit"], seen["fxgraph_cache_miss"] + seen["fxgraph_cache_bypass"])
"""


@pytest.mark.slow
def test_a_second_process_finds_inductor_code(
    run_script: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    run_script(_INDUCTOR)
    assert run_script(_INDUCTOR).split() == ["2", "0"]


def test_dropout_in_a_checkpoint() -> None:
    """What a checkpoint keeps of the generator has a size that PyTorch takes for open."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def inner(self, x: Any) -> Any:
            return self.b(nn.functional.dropout(self.a(x).relu(), 0.3).sin() * 2)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, found = Net(), []
    fast = dfx.schedule(
        model, "sequential", compiler="inductor", compiler_options={"cpp_wrapper": False}
    )
    for net in (model, fast):
        x = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()
        torch.manual_seed(3)
        result = net(x)
        wanted = [x, *model.parameters()]
        found.append([result, *torch.autograd.grad(result.square().sum(), wanted), torch.rand(1)])
    for want, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, want)
    assert "sizes may change" not in str(dfx.explain(fast, x))


def test_open_sizes_are_refused() -> None:
    from dynaflow_xla.frontends.torch.native.compiling import compilers

    class Symbolic:
        symbolic = True
        device = torch.device("cpu")

    with pytest.raises(dfx.UnsupportedError, match=r"fixed sizes.*eager"):
        compilers.Compiler(Symbolic(), None, False, "aoti", None)


def test_a_library_that_fails_is_an_error(tmp_path: Any) -> None:
    from dynaflow_xla.ffi import _engine

    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(RuntimeError, match="broken.so"):
        _engine.AotiModel(str(broken), 1)


@pytest.fixture
def twice() -> Iterator[Any]:
    """An operator of the user's, whose results lie in memory otherwise than it says."""
    library = torch.library.Library("dfx_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: (x * 2).T.contiguous().T, "CompositeExplicitAutograd")
    torch.library.register_fake("dfx_tests::twice", torch.empty_like, lib=library)
    torch.library.register_autograd("dfx_tests::twice", lambda _, grad: grad * 2, lib=library)
    yield torch.ops.dfx_tests.twice
    library._destroy()


@pytest.mark.parametrize("strategy", [dfx.Sequential(), Alternating()], ids=["one lane", "two"])
@pytest.mark.parametrize("compiler", ["inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_operators_without_code_run_as_they_are(
    compiler: str, strategy: Any, twice: Any, counted: list[str]
) -> None:
    def f(x: Any) -> Any:
        doubled = twice(x.sin().cos())
        return torch.linalg.eigvalsh(doubled @ doubled.T), doubled.exp() + x

    quick = {"compiler_options": {"cpp_wrapper": False}} if compiler == "inductor" else {}
    fast = dfx.schedule(
        f, strategy=strategy, lanes=2, backend="torch", compiler=compiler,
        rules=[dfx.Op("*twice*")], **quick,
    )  # fmt: skip
    for _ in range(2):
        x = torch.randn(4, 8)
        torch.testing.assert_close(fast(x), f(x), rtol=1e-4, atol=1e-4)
    (entry,) = fast._dfx_core.entries
    stretches = entry.native.stretches()
    assert 0 < sum(s.compiled for s in stretches) < sum(s.operators for s in stretches)
    assert len(counted) == len(set(map(id, programs(fast)))) > 0


def test_what_torch_compile_met_before_changes_nothing(twice: Any, counted: list[str]) -> None:
    """Inductor then has the operator in its tables, as one that it calls."""

    def f(x: Any) -> Any:
        return twice(x.sin().cos()).exp() + x

    # One row lies as the rule says.
    torch.compile(lambda x: twice(x), dynamic=False)(torch.randn(1, 8))
    fast = dfx.schedule(f, strategy="sequential", backend="torch", compiler="inductor")
    torch.testing.assert_close(fast(X), f(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiler", ["inductor", pytest.param("aoti", marks=pytest.mark.slow)])
def test_a_backward_gets_what_was_kept_as_it_expects_it(
    compiler: str, twice: Any, counted: list[str]
) -> None:
    def f(x: Any) -> Any:
        # exp keeps its result, and the product both factors, for the backward.
        return (twice(x.sin()).exp() * x.cos()).tanh().sum()

    quick = {"compiler_options": {"cpp_wrapper": False}} if compiler == "inductor" else {}
    fast = dfx.schedule(f, strategy="sequential", backend="torch", compiler=compiler, **quick)
    x = torch.randn(4, 8, requires_grad=True)
    (want,) = torch.autograd.grad(f(x), x)
    for _ in range(2):
        (got,) = torch.autograd.grad(fast(x), x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_aoti_leaves_complex_numbers_to_pytorch(counted: list[str]) -> None:
    def f(x: Any) -> Any:
        z = torch.complex(x, x.sin())
        return ((z * z).exp() + z.conj()).abs().tanh() * x.cos().sin()

    fast = dfx.schedule(f, strategy="sequential", backend="torch", compiler="aoti")
    torch.testing.assert_close(fast(X), f(X), rtol=1e-4, atol=1e-4)
    assert counted


def test_layouts_that_repeat_memory_and_other_types() -> None:
    from dynaflow_xla.frontends.torch.native.compiling import layouts

    wide = torch.arange(3.0).expand(4, 3)
    given = wide.contiguous().double()
    layout = layouts.Layout.of(wide)
    assert layout.fits(wide) and not layout.fits(given)
    (got,) = layouts.call(lambda x: (x,), {0: layout}, given)
    assert got.stride() == (0, 1) and got.dtype is torch.float32 and torch.equal(got, wide)
    one = torch.randn(5, 1, 2)
    assert layouts.Layout.of(one).fits(one.as_strided((5, 1, 2), (2, 77, 1)))


def test_a_layout_that_rules_do_not_foresee(counted: list[str]) -> None:
    """The fused encoder layer makes contiguous results, and PyTorch's rule says: as the input is."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.GRU(8, 16, batch_first=True)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Sequential(nn.Linear(16, 4), nn.Tanh())

        def forward(self, x: Any) -> Any:
            return self.head(self.encoder(self.first(x)[0]))

    model, x = Recurrent().eval(), torch.randn(3, 5, 8)
    fast = dfx.schedule(model, strategy="sequential", compiler="inductor")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        kinds = {op.kind for op in dfx.graph(fast, x).graph.ops}
    assert any("transformer_encoder_layer" in kind for kind in kinds)


def test_numbers_that_are_made_tensors_in_a_model(counted: list[str]) -> None:
    def f(x: Any) -> Any:
        return (x * torch.tensor(32.0).sqrt()).tanh() / torch.tensor([1.0, 2.0]).sum()

    fast = dfx.schedule(f, strategy="sequential", backend="torch", compiler="inductor")
    torch.testing.assert_close(fast(X), f(X), rtol=1e-5, atol=1e-5)
    assert counted


def test_a_library_that_only_pytorch_can_run_is_refused(tmp_path: Any) -> None:
    from dynaflow_xla.frontends.torch._compat import compiling
    from dynaflow_xla.frontends.torch.native.compiling import worker

    made = tmp_path / "made.so"
    made.write_bytes(b"code")
    made.with_suffix(".json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "aot_compile", lambda *_: made)
        with pytest.raises(dfx.UnsupportedError, match=r"region 'here'.*no code for"):
            worker.compile_aoti(None, [], {}, str(tmp_path / "note.json"), "region 'here'")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def other_settings() -> Any:
    return torch._inductor.config.patch(shape_padding=not torch._inductor.config.shape_padding)


def own_pass() -> Any:
    return torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None)


@pytest.mark.parametrize("around", [deterministic, other_settings, own_pass])
def test_what_is_compiled_is_for_the_settings_of_its_process(
    around: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same structure is compiled again where a setting of the whole process is another one."""
    from dynaflow_xla.frontends.torch._compat import compiling
    from dynaflow_xla.frontends.torch.native.compiling import compilers, worker as compile_worker

    made: list[Any] = []
    monkeypatch.setattr(compiling, "inductor", lambda gm, *_: made.append(gm) or gm)
    monkeypatch.setattr(compile_worker, "compile_all", lambda *_: None)
    monkeypatch.setattr(compilers, "_compiled", {})
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def compiled() -> int:
        made.clear()
        fast = dfx.schedule(model, strategy=dfx.Sequential(), lanes=1, compiler="inductor")
        with torch.no_grad():
            torch.testing.assert_close(fast(X), model(X))
        return len(made)

    assert compiled() == 1 and compiled() == 0
    with around():
        assert compiled() == 1
    assert compiled() == 0


def test_settings_of_the_process_reach_those_that_compile_for_it() -> None:
    """They are sent pickled; what cannot be sent is compiled where it is set."""
    from dynaflow_xla.frontends.torch._compat import compiling

    here = compiling.surroundings_key()
    with deterministic(), other_settings():
        there = compiling.surroundings_key()
        sent = pickle.dumps(compiling.surroundings())
    assert here != there and compiling.surroundings_key() == here
    before = compiling.surroundings()
    try:
        compiling.surround(pickle.loads(sent))
        assert compiling.surroundings_key() == there
    finally:
        compiling.surround(before)
    assert compiling.surroundings_key() == here
    with own_pass(), pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(compiling.surroundings())


@pytest.mark.parametrize("compiler", ["aoti", "inductor"])
def test_a_folder_that_is_full(
    compiler: str, counted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from dynaflow_xla.caches import private_files
    from dynaflow_xla.frontends.torch.native.compiling import compilers

    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilers, "_unwritable", set())
    real = private_files.write

    def write(path: Any, data: bytes) -> None:
        if path.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(private_files, "write", write)
    model = Layers().eval()
    fast = dfx.schedule(model, dfx.Branches(), rules=RULES, compiler=compiler, lanes=2)
    with torch.no_grad():
        with pytest.warns(dfx.FallbackWarning, match="cannot be kept in .*No space left") as told:
            torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
        assert sum("cannot be kept" in str(w.message) for w in told) == 1
        torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", ["inductor", "aoti"])
def test_a_masked_assignment_behind_a_write_that_accumulates(compiler: str) -> None:
    """Inductor computes something else where both are in one program."""
    index, more = torch.tensor([0, 2]), torch.randn(50, 2, 8)

    def f(h: Any) -> Any:
        h = torch.sin(torch.cos(h) * 2) + 1
        h.index_add_(1, index, more)
        h[h > 1] = 0
        return torch.exp(torch.sin(h))

    fast = dfx.schedule(f, "branches", compiler=compiler, lanes=2)
    x = torch.randn(50, 6, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), f(x))

"""What the forward of nano-batches keeps comes to the backward in parts, and lives as autograd says."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


class Net(nn.Module):
    """Two results, dropout, a buffer, a frozen parameter and views of what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)
        self.first.bias.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Any) -> Any:
        h = self.drop(torch.tanh(self.first(x))) * self.scale
        heads = h.view(x.shape[0], 2, 4).transpose(0, 1)
        return self.second(h), (heads.softmax(-1) * heads).sum(0)


def pair(strategy: Any = None) -> tuple[Any, Any]:
    model = Net()
    fast = dfx.schedule(copy.deepcopy(model), strategy or dfx.NanoBatch([2, 4]), in_axes=0)
    return model, fast


def entries(fast: Any, kind: str) -> Any:
    for graph in fast._dfx_core.entries:
        if graph.kind == kind:
            return next(reversed(graph._plans.values())).entry
    raise AssertionError(kind)


def both(model: Any, fast: Any, use: Any, x: Any) -> None:
    """Runs ``use(model, x)``, which calls backward, on both, and compares the gradients."""
    found = []
    for m in (model, fast):
        m.zero_grad()
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        use(m, given)
        found.append([given.grad, *(p.grad for p in m.parameters())])
    for want, got in zip(*found, strict=True):
        if want is None:  # of a parameter that only an unused result needs
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, want)


def test_nothing_is_put_together_but_results() -> None:
    model, fast = pair()
    both(
        model, fast, lambda m, x: sum(y.square().sum() for y in m(x)).backward(), torch.randn(6, 5)
    )
    forward, backward = entries(fast, "forward"), entries(fast, "backward")
    assert len(forward.captured.graph.joins) == 2  # the results
    views = backward.captured.graph.views
    names = {backward.captured.graph.input_names[v.input] for v in views}
    assert all(name.startswith(("tangents", "primals")) for name in names), names
    assert not any(r.merge and "concat" in forward.captured.graph.ops[r.ops[0]].kind
                   for r in forward.pg.regions)  # fmt: skip


USES = {
    "both results": lambda m, x: sum(y.square().sum() for y in m(x)).backward(),
    "one result": lambda m, x: m(x)[1].square().sum().backward(),
    "a result twice": lambda m, x: (lambda y: (y[0] * y[0] + y[0].exp()).sum().backward())(m(x)),
}


def _twice(m: Any, x: Any) -> None:
    loss = m(x)[0].square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _crossed(m: Any, x: Any) -> None:
    """Two forwards of different sizes, then their backwards."""
    a, b = m(x)[0].square().sum(), m(x[:4])[0].square().sum()
    a.backward()
    b.backward()


def _checkpoint(m: Any, x: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    checkpoint(m, x, use_reentrant=False)[0].square().sum().backward()


def _offloaded(m: Any, x: Any) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        y = m(x)
    sum(part.square().sum() for part in y).backward()


USES |= {"twice": _twice, "crossed": _crossed, "checkpoint": _checkpoint, "offloaded": _offloaded}


@pytest.mark.parametrize("name", USES)
def test_gradients(name: str) -> None:
    model, fast = pair(dfx.NanoBatch(2) if name == "crossed" else None)
    for _ in range(2):
        both(model, fast, USES[name], torch.randn(6, 5))


def test_hooks_see_whole_values() -> None:
    model, fast = pair()
    seen: list[Any] = []
    for m in (model, fast):
        shapes: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t
        ):
            m(torch.randn(6, 5))
        seen.append(shapes)
    assert not any(shape[:1] in ((2,), (4,)) and shape[1:] == (8,) for shape in seen[1])
    assert any(shape[:1] == (6,) for shape in seen[1])


def _parts_of(loss: Any) -> list[Any]:
    """The parts of nano-batches behind the first that hang on what autograd keeps."""
    found, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        nodes += [n for n, _ in node.next_functions if n is not None]
        for kept in getattr(node, "saved_tensors", ()):
            if isinstance(kept, torch.Tensor):
                others = vars(kept).get("_dynaflow_xla_parts")
                found += [] if others is None else others.parts
        for kept in getattr(node, "_tensors_no_vc_check", None) or ():
            others = vars(kept).get("_dynaflow_xla_parts")
            found += [] if others is None else others.parts
    return found


@pytest.mark.parametrize("how", ["backward", "dropped", "failed"])
def test_parts_are_freed_with_the_graph(how: str) -> None:
    _, fast = pair()
    x = torch.randn(6, 5, requires_grad=True)
    fast(x)[0].square().sum().backward()
    loss = fast(x)[0].square().sum()
    parts = [weakref.ref(part) for part in _parts_of(loss)]
    assert parts and all(part() is not None for part in parts)
    if how == "backward":
        loss.backward()
        assert all(part() is None for part in parts)  # although the loss is still there
    elif how == "failed":

        def fail(_: Any) -> None:
            raise ValueError("in the backward")

        handle = x.register_hook(fail)
        with pytest.raises(ValueError, match="in the backward"):
            loss.backward()
        handle.remove()
    del loss
    assert all(part() is None for part in parts)
    model, fast = pair()
    both(model, fast, USES["both results"], torch.randn(6, 5))


def test_a_result_that_is_kept_must_not_be_written() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.layer(x))

    model = Last()
    for m in (model, dfx.schedule(model, dfx.NanoBatch(2), in_axes=0)):
        y = m(torch.randn(4, 4))
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        x = torch.randn(4, 4)
        y = m(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_on_a_node_that_lose_parts_are_refused() -> None:
    _, fast = pair()
    loss = fast(torch.randn(6, 5, requires_grad=True))[1].square().sum()
    nodes, hooked = [loss.grad_fn], 0
    while nodes:
        node = nodes.pop()
        nodes += [n for n, _ in node.next_functions if n is not None]
        if type(node).__name__ == "CompiledFunctionBackward":
            for kept in node._raw_saved_tensors:
                kept.register_hooks(lambda t: t.clone(), lambda t: t)
                hooked += 1
            if getattr(node, "_tensors_no_vc_check", None):
                node._tensors_no_vc_check = [t.clone() for t in node._tensors_no_vc_check]
    assert hooked
    with pytest.raises(UnsupportedError, match="saved_tensors_hooks around the forward"):
        loss.backward()


def test_another_split_of_the_forward_is_taken_whole() -> None:
    from dynaflow_xla.frontends.torch.batch import handed
    from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, StridedLayout

    whole = torch.randn(3, 6).t()  # [6, 3], strides (1, 6)
    layout = StridedLayout.of(whole, Evaluator({}))
    how = handed.Joined(layout, 0, 1, ())
    kept = handed.keep([whole[:4].clone(), whole[4:].clone()], (4, 2), how)
    assert kept.shape == (4, 3) and handed.size(kept, 0) == 6
    torch.testing.assert_close(handed.whole(kept), whole, rtol=0, atol=0)
    layouts = tuple(StridedLayout.of(torch.empty(n, 3), Evaluator({})) for n in (1, 5))
    for given in (kept, whole):
        parts = handed.Taken("kept", how, layouts).parts(given, (1, 5))
        assert [part.stride() for part in parts] == [(3, 1), (3, 1)]
        torch.testing.assert_close(torch.cat(list(parts)), whole, rtol=0, atol=0)


def test_compiled_autograd() -> None:
    """It takes the values that the forward kept; enabled too late, it is refused."""
    compiled = getattr(torch._dynamo.compiled_autograd, "_enable", None)
    if compiled is None:
        pytest.skip("this PyTorch calls it by another name")
    model, fast = pair()
    with pytest.raises(UnsupportedError, match="around the forward"):
        loss = fast(torch.randn(6, 5))[0].sum()
        with compiled(lambda gm: gm):
            loss.backward()

    def enabled(m: Any, x: Any) -> None:
        with compiled(lambda gm: gm):
            m(x)[0].square().sum().backward()

    both(model, fast, enabled, torch.randn(6, 5))


@pytest.mark.filterwarnings("ignore:.* is split although it is not proved")
@pytest.mark.parametrize("sizes", [[2, 4], [5, 1]])
def test_an_expanded_mask_is_kept(sizes: list[int]) -> None:
    """Its rows lie on the same memory along a dimension, which can be written once only."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Linear(1, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = self.embed(x[..., None])
            mask = (x > 0)[..., None].expand_as(y)
            return self.last(y.masked_scatter(mask, torch.sin(y)))

    model = Masked()
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch(sizes), in_axes=0)
    x = torch.randn(6, 5).abs()  # as many are taken in every row
    both(model, fast, lambda m, given: m(given).square().sum().backward(), x)


@pytest.mark.parametrize("sizes", [2, [5, 1]])
@pytest.mark.parametrize("inside", [False, True])
def test_rows_of_expanded_values(sizes: Any, inside: bool) -> None:
    """Rows along the second dimension are copied, to lie as operators expect: all on the same memory."""
    w = torch.randn(5, 5)

    def f(x: Any) -> Any:
        if inside:
            x = x.sum(-1, keepdim=True).expand(-1, -1, 5)
        return torch.tanh(x @ w).sort(-1)[0]

    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=1, out_axes=1)
    grads = []
    x = torch.randn(3, 6, 1).expand(3, 6, 5)
    torch.testing.assert_close(fast(x), f(x))
    for call in (fast, f):
        given = x.clone().requires_grad_()
        call(given).square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)

"""Every kind of rule: what it matches, how matches are grouped, what bad ones say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import RuleError
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.rules import Rule, check_matches

Make = Callable[..., Graph]


def groups(rule: Rule, graph: Graph) -> list[tuple[str, list[int]]]:
    return check_matches(rule, graph)


def at(path: str, calls: str = "", depths: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Fields of an operator under a scope and in calls."""
    scope = tuple(path.split("/")) if path else ()
    inside = depths if depths is not None else (0,) * len(scope)
    return {"scope": scope, "call_path": tuple(calls.split()), "scope_calls": inside}


# -- Scope ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("enc", [0, 1, 2]),
        ("enc/attn", [0]),
        ("*/attn", [0]),
        ("**/attn", [0, 3, 4]),
        ("**/at?n", [0, 3, 4]),
        ("dec/**", [3]),
        ("dec/*/attn", [3]),
        ("enc/*", [0, 1]),
        ("**", [0, 1, 2, 3, 4]),
    ],
)
def test_scope_patterns(make: Make, pattern: str, matched: list[int]) -> None:
    graph = make(
        "a = f x; b = f a; c = f b; d = f c; e = f d; g = f e", "g",
        a=at("enc/attn"), b=at("enc/mlp"), c=at("enc"), d=at("dec/l0/attn"), e=at("attn"),
    )  # fmt: skip
    assert sorted(i for _, ops in groups(dfx.Scope(pattern), graph) for i in ops) == matched


def test_scope_dots_are_no_wildcards(make: Make) -> None:
    graph = make("a = f x", "a", a=at("layerX0"))
    with pytest.raises(RuleError, match="layerX0"):
        groups(dfx.Scope("layer.0"), graph)


def test_a_call_inside_a_scope_belongs_to_it(make: Make) -> None:
    """Library functions that are jitted (relu, where) must not cut a scope into pieces."""
    graph = make(
        "a = dot x; b = max a; c = exp b; d = max c", "d",
        a=at("attn"), b=at("attn", "relu#0"), c=at("attn"), d=at("attn", "relu#1"),
    )  # fmt: skip
    assert groups(dfx.Scope("attn"), graph) == [("attn", [0, 1, 2, 3])]
    assert len(partition(graph, [dfx.Scope("attn")]).regions) == 1


def test_a_scope_inside_two_calls_is_two(make: Make) -> None:
    graph = make(
        "a = dot x; b = max a; c = dot b; d = max c", "d",
        a=at("attn", "block#0", (1,)), b=at("attn", "block#0 relu#0", (1,)),
        c=at("attn", "block#1", (1,)), d=at("attn", "block#1 relu#1", (1,)),
    )  # fmt: skip
    assert groups(dfx.Scope("attn"), graph) == [("attn", [0, 1]), ("attn", [2, 3])]
    cut = partition(graph, [dfx.Scope("attn", tags={"t"})])
    assert [(r.name, r.ops) for r in cut.regions] == [("attn", (0, 1)), ("attn_1", (2, 3))]


def test_repeated_modules_are_matched_without_their_number(make: Make) -> None:
    graph = make("a = f x; b = f a", "b", a=at("m/cell"), b=at("m/cell@1"))
    assert groups(dfx.Scope("**/cell"), graph) == [("cell", [0]), ("cell@1", [1])]
    assert groups(dfx.Scope("**/cell@1"), graph) == [("cell@1", [1])]


# -- Op, Call, Module -----------------------------------------------------------------------------


def test_op_takes_globs_and_alternatives(make: Make) -> None:
    graph = make("a = sort x; b = reduce_sum a; c = reduce_max b; d = add c", "d")
    assert groups(dfx.Op("sort | reduce_*"), graph) == [
        ("sort", [0]), ("reduce_sum", [1]), ("reduce_max", [2])
    ]  # fmt: skip
    with pytest.raises(RuleError, match=r"Op\('sor'\) matches nothing in 'f'.* sort"):
        groups(dfx.Op("sor"), graph)
    with pytest.raises(RuleError, match="matches nothing"):
        groups(dfx.Op("SORT"), graph)


def test_one_region_a_call(make: Make) -> None:
    graph = make(
        "a = f x; b = f a; c = f b; d = f c", "d",
        a=at("", "block#0"), b=at("", "block#0 relu#0"), c=at("", "block#1"), d=at("", "relu#1"),
    )  # fmt: skip
    assert groups(dfx.Call("block"), graph) == [("block", [0, 1]), ("block", [2])]
    assert groups(dfx.Call("re*"), graph) == [("relu", [1]), ("relu", [3])]
    with pytest.raises(RuleError, match="The graph has: block"):
        groups(dfx.Call("blok"), graph)


def test_modules_by_class(make: Make) -> None:
    class Attention:
        pass

    plain = make("a = f x", "a", a=at("m/attn"))
    with pytest.raises(RuleError, match=r"carries no module classes; use dfx\.Scope"):
        groups(dfx.Module(Attention), plain)
    fields = {"classes": ("Model", "Attention")}
    graph = make("a = f x; b = f a", "b", a=at("m/x") | fields, b=at("m/y") | fields)
    assert groups(dfx.Module(Attention), graph) == [("x", [0]), ("y", [1])]
    assert groups(dfx.Module("m/y"), graph) == [("y", [1])]
    with pytest.raises(RuleError, match="class or a path glob"):
        dfx.Module(3)


# -- Where, Seq -----------------------------------------------------------------------------------


def test_where_connects(make: Make) -> None:
    text = "a = k x; b = k x; c = no a; d = k b; e = k d a; g = add c e"
    rule = dfx.Where(lambda op: op.kind == "k")
    # e reads d and a: the two pieces become one; c lies between a and nothing of them.
    assert groups(rule, make(text, "g")) == [("where", [0, 1, 3, 4])]
    apart = "a = k x; b = no a; c = k b; d = k x; e = add c d"
    assert groups(rule, make(apart, "e")) == [("where", [0]), ("where", [2]), ("where", [3])]
    with pytest.raises(RuleError, match="matches nothing"):
        groups(dfx.Where(lambda op: False), make(text, "g"))
    with pytest.raises(RuleError, match="function of an operator"):
        dfx.Where("sort")  # type: ignore[arg-type]


def test_an_error_in_a_predicate_is_the_users(make: Make) -> None:
    with pytest.raises(ZeroDivisionError):
        groups(dfx.Where(lambda op: op.index / 0 > 1), make("a = k x", "a"))


def test_seq_follows_what_is_read(make: Make) -> None:
    rule = dfx.Seq(dfx.Op("dot"), dfx.Op("add"), dfx.Op("max|exp"))
    graph = make("a = dot x; b = dot a; c = add b; d = add a; e = exp c; g = max d e", "g")
    assert groups(rule, graph) == [("dot_add_max", [0, 3, 5]), ("dot_add_exp", [1, 2, 4])]
    where = dfx.Seq(dfx.Op("dot"), dfx.Where(lambda op: op.index == 2))
    assert groups(where, graph) == [("dot_add", [1, 2])]


def test_seq_looks_at_every_reader(make: Make) -> None:
    """The first reader that fits may lead nowhere while the second does."""
    rule = dfx.Seq(dfx.Op("dot"), dfx.Op("add"), dfx.Op("exp"))
    graph = make("a = dot x; b = add a; c = add a; d = exp c; e = max b d", "e")
    assert groups(rule, graph) == [("dot_add_exp", [0, 2, 3])]


def test_seq_takes_an_operator_once(make: Make) -> None:
    rule = dfx.Seq(dfx.Op("k"), dfx.Op("k"))
    graph = make("a = k x; b = k a; c = k b; d = k c; e = k d", "e")
    assert groups(rule, graph) == [("k_k", [0, 1]), ("k_k", [2, 3])]
    for bad in ((), (dfx.Op("k"),), (dfx.Op("k"), dfx.Scope("s"))):
        with pytest.raises(RuleError, match="two or more Op or Where"):
            dfx.Seq(*bad)  # type: ignore[arg-type]


# -- labels and lists of rules --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ({"name": ""}, "name must be a non-empty string"),
        ({"name": 3}, "name must be"),
        ({"resource": "gpu"}, "resource must be one of compute, memory, network, host"),
        ({"tags": "slow"}, "tags must be a collection of strings; got 'slow'"),
        ({"tags": 3}, "tags must be a collection"),
        ({"tags": [["slow"]]}, "tags must be a collection"),
        ({"tags": {1}}, "tags must be a collection"),
    ],
)
def test_bad_labels(labels: dict[str, Any], what: str) -> None:
    makers = [
        lambda **given: dfx.Op("sort", **given),
        lambda **given: dfx.Scope("a", **given),
        lambda **given: dfx.Where(lambda op: True, **given),
        lambda **given: dfx.mark(given.pop("name", "m"), **given),
    ]
    for maker in makers:
        if "name" in labels and maker is makers[-1]:
            what = "a mark's name must be"
        with pytest.raises(RuleError, match=re.escape(what)):
            maker(**labels)


@pytest.mark.parametrize("pattern", ["", None, 3])
@pytest.mark.parametrize("kind", [dfx.Op, dfx.Scope, dfx.Call])
def test_bad_patterns(kind: Any, pattern: Any) -> None:
    with pytest.raises(RuleError, match=f"{kind.__name__} takes a non-empty pattern"):
        kind(pattern)


def test_tags_from_any_collection(make: Make) -> None:
    graph = make("a = sort x; b = add a", "b")
    for tags in (["t", "u"], ("t", "u"), {"t", "u"}, {"t": 1, "u": 2}, (c for c in "tu")):
        cut = partition(graph, [dfx.Op("sort", tags=tags, resource="network", name="mine")])
        region = cut.regions[0]
        assert (region.name, region.tags, region.resource) == ("mine", {"t", "u"}, "network")


@pytest.mark.parametrize("given", [3, "sort", [3], [dfx.Op("sort"), None], dfx.Op])
def test_what_is_no_rule(make: Make, given: Any) -> None:
    with pytest.raises(RuleError, match=r"rules must be dfx\.Scope"):
        partition(make("a = sort x", "a"), given)


def test_a_mark_on_what_runs_after_its_call() -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def later() -> None: ...

    for fn in (rows, later):
        with pytest.raises(RuleError, match=r"runs after the call.*with dfx\.mark\('gen'\)"):
            dfx.mark("gen")(fn)
    assert dfx.mark("gen")(lambda x: x + 1)(1) == 2


def test_a_mark_on_what_is_no_function() -> None:
    class Computes:
        def __call__(self, x: int) -> int:
            return x + 1

    @dataclasses.dataclass
    class Layer(Computes):
        weight: float = 1.0

    for given, name in ((3, "int"), (Computes, "the class Computes"), (Layer(), "Layer")):
        with pytest.raises(
            RuleError, match=rf"decorates functions; got {name}.*with dfx\.mark\('m'\)"
        ):
            dfx.mark("m")(given)  # type: ignore[type-var]
    assert dfx.mark("m")(Computes())(1) == 2
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(RuleError, match="got Linear"):
        dfx.mark("m")(torch.nn.Linear(2, 2))


def test_the_text_of_a_rule() -> None:
    assert repr([dfx.Op("sort"), dfx.Scope("**layer")]) == "[Op('sort'), Scope('**layer')]"
    with pytest.raises(RuleError, match="got 'sort'"):
        dfx.schedule(lambda x: x, rules="sort")


@pytest.mark.parametrize("option", ["only", "join"])
def test_the_option_that_holds_no_rule_is_named(option: str) -> None:
    with pytest.raises(RuleError, match=rf"^{option} must be dfx\.Scope"):
        dfx.NanoBatch(2, **{option: 3})


def test_one_rule_needs_no_list(make: Make) -> None:
    graph = make("a = sort x; b = add a", "b")
    assert partition(graph, dfx.Op("sort")) == partition(graph, [dfx.Op("sort")])  # type: ignore[arg-type]


def test_the_first_rule_wins_and_the_other_says_so(make: Make) -> None:
    graph = make("a = sort x; b = add a; unused = sort x", "b", cost_ns=1e6)
    cut = partition(graph, [dfx.Op("*", tags={"all"}), dfx.Op("sort", tags={"slow"})])
    assert all(region.tags == {"all"} for region in cut.regions)
    assert [n for n in cut.notes if "Op('sort') has no effect" in n]
    cut = partition(graph, [dfx.Op("sort", tags={"slow"}), dfx.Op("*", tags={"all"})])
    assert [region.tags for region in cut.regions] == [{"slow"}, {"all"}]
    assert not [n for n in cut.notes if "no effect" in n]


def test_a_rule_that_matches_nothing_is_an_error_with_what_there_is(make: Make) -> None:
    graph = make("a = sort x; b = add a", "b", a=at("enc/attn"))
    for rule in (dfx.Scope("enc/atn"), dfx.Op("sorted"), dfx.Call("g"), dfx.Module("enc/x")):
        with pytest.raises(RuleError, match=re.escape(f"rule {rule.text()} matches nothing")):
            partition(graph, [rule])
    with pytest.raises(RuleError, match="enc/attn"):
        partition(graph, [dfx.Scope("enc/atn")])
    empty = make("", "x")
    with pytest.raises(RuleError, match="matches nothing"):
        partition(empty, [dfx.Op("*")])

"""Reading compiled programs back: every instruction that XLA writes is read, or reading fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from dynaflow_xla.frontends.jax.readback import hlo_text, xla_dump  # noqa: E402

X = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)


def a_loop_with_many_values(*xs: Any) -> Any:
    def body(c: Any) -> Any:
        return (c[0] + 1, *(jnp.sin(v) * 1.5 for v in c[1:]))

    return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, *xs))


def many_kinds(x: Any, key: Any) -> Any:
    values, places = jax.lax.top_k(x, 3)
    return (
        values,
        jax.lax.sort((x, x * 2, x + 1, x - 1, x * 3, x * 4), num_keys=1),
        jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"),
        jnp.linalg.cholesky(x @ x.T + jnp.eye(8) * 9),
        jnp.fft.fft(x),
        x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
        jax.random.normal(key, x.shape),
        jax.lax.switch(places[0, 0] % 3, [jnp.sin, jnp.cos, jnp.tanh], x),
        jax.lax.scan(lambda c, y: (c + y.sum(), jnp.tanh(y)), 0.0, x),
        jax.ops.segment_sum(x, jnp.arange(8) % 3, 3),
        jax.lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    )


@pytest.mark.parametrize("which", ["loop", "kinds"])
def test_every_instruction_of_a_compiled_program_is_read(which: str) -> None:
    if which == "loop":
        lowered = jax.jit(a_loop_with_many_values).lower(*[X + i for i in range(8)])
    else:
        lowered = jax.jit(many_kinds).lower(X, jax.random.key(0))
    text = lowered.compile().as_text()
    assert "/*index=5*/" in text
    written = re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", text, re.M)
    found = xla_dump.read_instructions(text)
    assert set(found) == set(written)
    for made in found.values():
        assert set(made.operands) <= set(found), made
        assert made.bytes >= 0
    longest = max(found.values(), key=lambda made: len(made.operands))
    assert len(longest.operands) >= 6 and "index" not in longest.shape
    if which == "loop":
        loop = next(made for made in found.values() if made.opcode == "while")
        assert loop.bytes == 4 + 8 * X.nbytes, "the counter and eight arrays"


def test_donated_arguments() -> None:
    text = (
        jax.jit(lambda a, b: (a * 2, b + 1), donate_argnums=(0, 1)).lower(X, X).compile().as_text()
    )
    assert xla_dump.read_aliases(text) == {0: 0, 1: 1}
    with pytest.raises(hlo_text.DumpError, match="cannot be read"):
        xla_dump.read_aliases(text.replace("(0, {}, ", "(0, {1}, "))


LINE = (
    "  ROOT %w.1 = (f32[2,3]{1,0:T(8,128)}, (s32[], /*index=5*/pred[<=4]), token[]) fusion("
    "(f32[2]{0}, s32[]) %a.1, f32[8]{0} %b, /*index=2*/c), kind=kCustom, calls=%fused, "
    'metadata={op_name="jit(f)/a \\"quoted) {name" source_file="x.py"}'
)


def test_one_line() -> None:
    made = hlo_text.instruction(LINE)
    assert made is not None
    assert (made.root, made.name, made.opcode) == (True, "w.1", "fusion")
    assert made.operands == ("a.1", "b", "c")
    assert made.shape == "(f32[2,3]{1,0:T(8,128)}, (s32[], pred[<=4]), token[])"
    assert hlo_text.shape_bytes(made.shape) == 24 + 4 + 4
    assert made.op_name == 'jit(f)/a "quoted) {name'
    assert list(made.computations("calls", "to_apply")) == ["fused"]


@pytest.mark.parametrize(
    ("shape", "size"),
    [("s4[3]", 2), ("f8e5m2[3]", 3), ("bf16[2,2]", 8), ("c128[]", 16), ("token[]", 0), ("()", 0)],
)
def test_sizes(shape: str, size: int) -> None:
    assert hlo_text.shape_bytes(shape) == size


@pytest.mark.parametrize(
    "line",
    ["  %x = f32[2] add(%a, %b", "  something else", "  %y = f32[2]{0}", "  %z = (f32[2] add(%a)"],
)
def test_a_line_that_cannot_be_read_is_an_error_and_not_passed_over(line: str) -> None:
    text = f"HloModule m\n\nENTRY %main (a: f32[2]) -> f32[2] {{\n{line}\n}}\n"
    with pytest.raises(hlo_text.DumpError, match="line 4 of a compiled program"):
        xla_dump.read_instructions(text)


def test_an_element_type_that_is_not_known_is_an_error() -> None:
    with pytest.raises(hlo_text.DumpError, match="'z9'"):
        hlo_text.shape_bytes("z9[4]")

"""Which of a region's kernels count in the order of a compiled program."""

from __future__ import annotations

from dynaflow_xla.frontends.jax.readback.compiled_order import that_compute
from dynaflow_xla.frontends.jax.readback.xla_dump import Instruction


def test_what_only_hands_a_result_on_does_not_count() -> None:
    reads = {1: set[int](), 2: {1}, 3: {1, 2}, 9: {1, 2, 3}}
    assert that_compute({1, 2, 3}, {2, 3}, reads) == {1}, "9 is another region's"
    assert that_compute({1, 2, 3}, {2}, reads) == {1, 2, 3}, "3 computes with it"
    assert that_compute({1, 2}, set(), reads) == {1, 2}
    assert that_compute({9}, {9}, reads) == {9}, "nobody reads it: a result of the program"
    assert that_compute({2}, {2}, reads) == {2}, "the region does nothing else"


def test_what_lays_out() -> None:
    def fusion(*body: str, opcode: str = "fusion") -> Instruction:
        nothing = frozenset[str]()
        return Instruction("f", opcode, "", "r", nothing, nothing, frozenset(body), "")

    assert fusion("parameter", "slice", "bitcast", "transpose").is_layout
    assert fusion("parameter", "convert").is_layout
    assert not fusion("parameter", "add", "transpose").is_layout
    assert not fusion("parameter", "transpose", opcode="custom-call").is_layout

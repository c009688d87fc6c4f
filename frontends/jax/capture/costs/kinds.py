"""Kinds of primitives, by name: the lists that costs and fusion share."""

from __future__ import annotations

TRANSCENDENTAL = {
    "exp": 0.4, "exp2": 0.4, "log": 0.6, "log1p": 1.2, "expm1": 1.1, "tanh": 0.35, "logistic": 0.4,
    "sin": 4.6, "cos": 4.8, "tan": 12.0, "erf": 0.3, "erf_inv": 2.3, "erfc": 1.1, "pow": 5.8,
    "sqrt": 0.15, "rsqrt": 0.4, "cbrt": 15.0, "atan2": 12.0, "asin": 14.0, "acos": 23.0, "atan": 12.0,
    "sinh": 2.2, "cosh": 0.8, "asinh": 2.2, "acosh": 1.9, "atanh": 2.2, "lgamma": 12.0,
    "digamma": 12.0, "bessel_i0e": 1.9, "bessel_i1e": 1.9, "igamma": 100.0,
    "igammac": 100.0, "igamma_grad_a": 100.0, "regularized_incomplete_beta": 200.0,
    "zeta": 55.0, "polygamma": 60.0,
}  # fmt: skip
"""Nanoseconds for a float32. XLA has polynomials of its own for some, and calls the C library for others."""

FREE = frozenset(
    "reshape squeeze expand_dims stop_gradient copy_p bitcast_convert_type random_wrap random_unwrap "
    "optimization_barrier".split()
)

GENERATORS = frozenset(
    "iota broadcast_in_dim eq ne ge gt le lt and or not xor add sub mul neg abs sign max min rem div "
    "select_n convert_element_type reshape squeeze expand_dims transpose slice rev".split()
)
"""Element-wise and shape operators that XLA fuses into their reader, if all they read is generated."""

_LOOPS_OF_THEIR_OWN = (
    "igammac", "igamma_grad_a", "regularized_incomplete_beta", "zeta", "polygamma",
)  # fmt: skip

ELEMENTWISE = GENERATORS.union(
    TRANSCENDENTAL.keys() - set(_LOOPS_OF_THEIR_OWN),
    "square one_minus_square integer_pow clamp floor ceil round is_finite nextafter real imag complex "
    "conj population_count clz shift_left shift_right_logical shift_right_arithmetic add_any copy copy_p "
    "bitcast_convert_type stop_gradient".split(),
)
"""Loops over elements, and what gives elements another shape, type or place."""

"""Rules of activations and of their gradients, which are linear in the gradient that comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import nonlinear, product
from dynaflow_xla.batch.states import SAME, Refuse, Rows, State
from dynaflow_xla.frontends.torch.batch.rules.contractions import _by_shape
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site, axis_in


def gradient(site: Site, grad: Any, others: Sequence[Any]) -> State:
    """Element by element, linear in ``grad`` and anything in the others."""
    rest = [site.aligned(other) for other in others]
    return product(site.aligned(grad), nonlinear(rest) if rest else SAME)


@rule("elu_backward", "leaky_relu_backward", "hardswish_backward", "hardtanh_backward",
      "hardsigmoid_backward", "log_sigmoid_backward", "mish_backward", "silu_backward",
      "softplus_backward", "softshrink_backward", "hardshrink_backward", "threshold_backward",
      "gelu_backward", "tanh_backward", "sigmoid_backward", "logit_backward",
      "rrelu_with_noise_backward", "_prelu_kernel_backward")  # fmt: skip
def _activation_backward(site: Site) -> list[State]:
    grad, *others = site.tensors()
    if site.op.kind == "log_sigmoid_backward":
        # The buffer is empty on some devices, and not looked at.
        others = [other for other in others if site.shape(other) != (0,)]
    return site.each(gradient(site, grad, others))


@rule("hardswish", "_prelu_kernel", "polar", "complex")
def _activation(site: Site) -> State:
    return nonlinear([site.aligned(tensor) for tensor in site.tensors()])


@rule("rrelu_with_noise", "rrelu_with_noise_functional")
def _leaky(site: Site) -> list[State]:
    """Outside training: with the mean of the slopes, and the noise as it was."""
    made = nonlinear([site.state(site.args["self"])])
    return [made, site.state(site.args["noise"])][: len(site.op.payload.outputs)]


@rule("log_sigmoid_forward")
def _log_sigmoid(site: Site) -> list[State]:
    return _by_shape(site, nonlinear([site.state(site.args["self"])]))


@rule("glu_backward")
def _glu_backward(site: Site) -> State:
    given = site.args["self"]
    if axis_in(site.state(given), [site.args["dim"]], len(site.shape(given))):
        raise Refuse("halves the batch")
    return product(site.state(site.args["grad_output"]), nonlinear([site.state(given)]))


@rule("_weight_norm_interface_backward")
def _weight_norm_backward(site: Site) -> list[State]:
    states = site.states("grad_w", "saved_v", "saved_g", "saved_norms")
    if any(isinstance(state, Rows) for state in states):
        raise Refuse("takes norms over the batch")
    return site.each(product(states[0], nonlinear(states[1:])))

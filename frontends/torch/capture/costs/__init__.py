"""Estimated work of aten operators: operations, bytes moved, nanoseconds on one core."""

from dynaflow_xla.frontends.torch.capture.costs.estimates import (
    estimate as estimate,
    example as example,
)
from dynaflow_xla.frontends.torch.capture.costs.gpu import least_ns as least_ns
from dynaflow_xla.frontends.torch.capture.costs.hints import (
    NoNumber as NoNumber,
    hint as hint,
    shape_of as shape_of,
    strides_of as strides_of,
    tensor_bytes as tensor_bytes,
)

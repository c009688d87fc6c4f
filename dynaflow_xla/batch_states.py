"""Names of ``dynaflow_xla.batch`` under which rules that are still to be moved import them."""

from dynaflow_xla.batch.algebra import (
    common_power as common_power,
    homogeneous as homogeneous,
    join as join,
    linear as linear,
    nonlinear as nonlinear,
    product as product,
    quotient as quotient,
    rows_of as rows_of,
)
from dynaflow_xla.batch.axes import reshaped as reshaped, summed_rows as reduced_over_batch  # noqa: F401
from dynaflow_xla.batch.states import *  # noqa: F403

"""Published strategies, each written on the public interface of this package: read, copy, change them."""

from dynaflow_xla.published import arguments
from dynaflow_xla.published.fused import Fused as Fused
from dynaflow_xla.published.ios import IOS as IOS
from dynaflow_xla.published.lanes_by_resource import LanesByResource as LanesByResource
from dynaflow_xla.published.nanoflow import NanoFlow as NanoFlow
from dynaflow_xla.published.nimble import Nimble as Nimble
from dynaflow_xla.published.opara import Opara as Opara
from dynaflow_xla.published.optimizer_beside_backward import (
    OptimizerBesideBackward as OptimizerBesideBackward,
)
from dynaflow_xla.published.pod_attention import PODAttention as PODAttention
from dynaflow_xla.published.single_batch_overlap import SingleBatchOverlap as SingleBatchOverlap
from dynaflow_xla.published.token_weave import TokenWeave as TokenWeave
from dynaflow_xla.published.two_batch_overlap import TwoBatchOverlap as TwoBatchOverlap

arguments.checked(Fused, kernel=arguments.kernel)
arguments.checked(IOS, most=arguments.at_least(0))
arguments.checked(LanesByResource, compute=arguments.at_least(0))
arguments.checked(NanoFlow, n=arguments.at_least(1))
arguments.checked(PODAttention, prefill=arguments.text("the name of a function"))
arguments.checked(SingleBatchOverlap, aside=arguments.text("a tag"))
arguments.checked(
    TokenWeave,
    kernel=arguments.optional(arguments.kernel),
    first=arguments.optional(arguments.at_least(0)),
)
arguments.checked(TwoBatchOverlap, rows=arguments.at_least(0))

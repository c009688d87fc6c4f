"""Published strategies, each written on the public interface of this package: read, copy, change them."""

from dynaflow_xla.library.fused import Fused as Fused
from dynaflow_xla.library.ios import IOS as IOS
from dynaflow_xla.library.lanes_by_resource import LanesByResource as LanesByResource
from dynaflow_xla.library.nanoflow import NanoFlow as NanoFlow
from dynaflow_xla.library.nimble import Nimble as Nimble
from dynaflow_xla.library.opara import Opara as Opara
from dynaflow_xla.library.optimizer_beside_backward import (
    OptimizerBesideBackward as OptimizerBesideBackward,
)
from dynaflow_xla.library.pod_attention import PODAttention as PODAttention
from dynaflow_xla.library.single_batch_overlap import SingleBatchOverlap as SingleBatchOverlap
from dynaflow_xla.library.token_weave import TokenWeave as TokenWeave
from dynaflow_xla.library.two_batch_overlap import TwoBatchOverlap as TwoBatchOverlap

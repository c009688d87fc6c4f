"""dynaflow_xla: the schedule of a model as a separate, programmable, checkable object."""

import types as _types
import typing as _typing

from dynaflow_xla._version import __version__ as __version__
from dynaflow_xla.api import (
    bucketed as bucketed,
    check_determinism as check_determinism,
    compile as compile,
    compiler_options as compiler_options,
    debug as debug,
    explain as explain,
    graph as graph,
    plan as plan,
    profile as profile,
    schedule as schedule,
    simulate as simulate,
    stats as stats,
    together as together,
    tune as tune,
    verify as verify,
    why as why,
)
from dynaflow_xla.batch.proof import Mean as Mean, Sum as Sum
from dynaflow_xla.calibration import measure_machine as measure_machine
from dynaflow_xla.combined import Arguments as Arguments
from dynaflow_xla.errors import (
    DynaflowError as DynaflowError,
    EngineError as EngineError,
    FallbackWarning as FallbackWarning,
    PlanError as PlanError,
    RuleError as RuleError,
    SeparabilityError as SeparabilityError,
    UnsupportedError as UnsupportedError,
    VerificationError as VerificationError,
)
from dynaflow_xla.ir.graph import Graph as Graph
from dynaflow_xla.ir.marks import mark as mark
from dynaflow_xla.ir.partitioned import PartitionedGraph as PartitionedGraph
from dynaflow_xla.ir.rules import (
    Call as Call,
    Module as Module,
    Op as Op,
    Scope as Scope,
    Seq as Seq,
    Where as Where,
)
from dynaflow_xla.kernels import CudaKernel as CudaKernel, Lanes as Lanes
from dynaflow_xla.machine.memory import keep_memory as keep_memory
from dynaflow_xla.planning.plan import Plan as Plan
from dynaflow_xla.strategies.auto import Auto as Auto
from dynaflow_xla.strategies.base import (
    Context as Context,
    Handle as Handle,
    Recorder as Recorder,
    Split as Split,
    Strategy as Strategy,
)
from dynaflow_xla.strategies.branches import Branches as Branches
from dynaflow_xla.strategies.dual_batch import DualBatch as DualBatch
from dynaflow_xla.strategies.nano_batch import NanoBatch as NanoBatch
from dynaflow_xla.strategies.search import Search as Search
from dynaflow_xla.strategies.sequential import Sequential as Sequential
from dynaflow_xla.timelines.timeline import Timeline as Timeline

if _typing.TYPE_CHECKING:
    published: _types.ModuleType  # importing it here would be a circle
else:

    def __getattr__(name: str) -> object:
        """``dynaflow_xla.published`` is written with the names above: it is loaded when it is asked for."""
        if name != "published":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f"{__name__}.{name}")

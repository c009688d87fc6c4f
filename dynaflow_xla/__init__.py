"""dynaflow_xla: the schedule of a model as a separate, programmable, checkable object."""

from dynaflow_xla._api import (
    explain as explain,
)
from dynaflow_xla._api import (
    graph as graph,
)
from dynaflow_xla._api import (
    plan as plan,
)
from dynaflow_xla._api import (
    profile as profile,
)
from dynaflow_xla._api import (
    schedule as schedule,
)
from dynaflow_xla._api import (
    simulate as simulate,
)
from dynaflow_xla._api import (
    tune as tune,
)
from dynaflow_xla._api import (
    verify as verify,
)
from dynaflow_xla._version import __version__ as __version__
from dynaflow_xla.errors import DynaflowError as DynaflowError
from dynaflow_xla.errors import EngineError as EngineError
from dynaflow_xla.errors import FallbackWarning as FallbackWarning
from dynaflow_xla.errors import PlanError as PlanError
from dynaflow_xla.errors import RuleError as RuleError
from dynaflow_xla.errors import SeparabilityError as SeparabilityError
from dynaflow_xla.errors import UnsupportedError as UnsupportedError
from dynaflow_xla.errors import VerificationError as VerificationError
from dynaflow_xla.ir import PartitionedGraph as PartitionedGraph
from dynaflow_xla.plan import Plan as Plan
from dynaflow_xla.rules import Call as Call
from dynaflow_xla.rules import Module as Module
from dynaflow_xla.rules import Op as Op
from dynaflow_xla.rules import Scope as Scope
from dynaflow_xla.rules import Seq as Seq
from dynaflow_xla.rules import Where as Where
from dynaflow_xla.rules import mark as mark
from dynaflow_xla.strategies.auto import Auto as Auto
from dynaflow_xla.strategies.base import Split as Split
from dynaflow_xla.strategies.base import Strategy as Strategy
from dynaflow_xla.strategies.branches import Branches as Branches
from dynaflow_xla.strategies.sequential import Sequential as Sequential

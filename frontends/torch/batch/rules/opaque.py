"""Calls that are made as they are: nothing is known of what they do with rows, so these are put together."""

from __future__ import annotations

from dynaflow_xla.batch.states import Refuse, State
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site
from dynaflow_xla.frontends.torch.opaque import regions


@rule(*regions.KINDS)
def _opaque(site: Site) -> State:
    raise Refuse(regions.site(site.args["number"]).told())

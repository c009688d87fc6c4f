"""Collectives of two processes as regions: their order, their overlap with compute, equal values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no distributed package", allow_module_level=True)

LIMIT = 360

# One of two processes of a tensor-parallel layer: each has half of the hidden units.
WORKER = """
import copy, datetime, faulthandler, os, sys
faulthandler.dump_traceback_later({limit} - 10, exit=True)
rank, path = int(sys.argv[1]), sys.argv[2]
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
import dynaflow_xla as dfx
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{{path}}", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=300),
)

class Parallel(nn.Module):
    def __init__(self, heads=2, width=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width // 2), nn.Linear(width // 2, width, bias=False)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width, bias=False)
        self.norm, self.last, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads // 2

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        a = self.out(a.transpose(1, 2).reshape(b, t, -1))
        x = x + fc.all_reduce(a, "sum", dist.group.WORLD)
        h = self.down(torch.relu(self.up(self.last(x))))
        return x + fc.all_reduce(h, "sum", dist.group.WORLD)

def assert_trains_alike(model, fast, x):
    results = []
    for m in (model, fast):
        m.zero_grad()
        given = x.clone().requires_grad_()
        out = m(given)
        out.square().mean().backward()
        results.append([out.detach(), given.grad, *(p.grad.clone() for p in m.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)

torch.manual_seed(rank)
model = Parallel()
torch.manual_seed(7)
x = torch.randn(4, 3, 8)
{body}
dist.barrier()
dist.destroy_process_group()
print("done", rank)
"""


def both(body: str, tmp_path: Path) -> list[str]:
    """Runs the body in two processes; what each printed. Both are killed if one hangs."""
    text = WORKER.format(limit=LIMIT, body=body)
    command = [sys.executable, "-P", "-c", text]
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outs = [run.communicate(timeout=LIMIT)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for rank, (run, out) in enumerate(zip(runs, outs, strict=True)):
        assert run.returncode == 0 and f"done {rank}" in out, out
    return outs


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What both processes say. They run all parts: most of their time is PyTorch's import."""
    return both(VALUES + ORDER + EXPERTS, tmp_path_factory.mktemp("distributed"))


VALUES = """
for strategy in (dfx.Sequential(), dfx.Branches(), dfx.NanoBatch(2), dfx.DualBatch()):
    torch._dynamo.reset()
    fast = dfx.schedule(copy.deepcopy(model), strategy, in_axes=0, lanes=2)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert_trains_alike(model, fast, x)
    print("equal", strategy)
"""

# With the last of the strategies, DualBatch.
ORDER = """
from dynaflow_xla.planning.instructions import Launch, Wait
with torch.no_grad():
    plan, pg = dfx.plan(fast, x), dfx.graph(fast, x)
    launches = [i for i in plan.instructions if isinstance(i, Launch)]
    network = [i for i in launches if pg.regions[i.region].resource == "network"]
    assert {i.lane for i in network} == {1}, plan
    assert {i.lane for i in launches} == {0, 1}
    # Compute of the other nano-batch stands between a collective and who waits for it.
    order = [(i.nano, pg.regions[i.region].resource == "network") for i in launches]
    first = order.index((0, True))
    assert (1, False) in order[first + 1 : order.index((1, True))], order
    print("order", [i.name for i in network])
    for _ in range(20):
        torch.testing.assert_close(fast(x), model(x))
"""

# An expert a process, a fixed number of places for each row's tokens: all-to-alls before and behind it. The
# strategy is the very object that tests/gpu_compile has XLA's programs for eight devices made by.
EXPERTS = """
class Experts(nn.Module):
    def __init__(self, width=8, places=6):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 2)
        self.up, self.down, self.places = nn.Linear(width, 16), nn.Linear(16, width), places

    def forward(self, x):
        h = self.norm(x)
        share = torch.softmax(self.router(h), -1)
        chosen = nn.functional.one_hot(share.argmax(-1), 2)
        place = chosen.cumsum(1) * chosen - 1
        places = (place[..., None] == torch.arange(self.places)).to(x.dtype)
        sent = torch.einsum("btec,btd->ebcd", places, h).contiguous()  # torch 2.11 takes no other
        got = fc.all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
        made = self.down(torch.relu(self.up(got)))
        back = fc.all_to_all_single_autograd(made, None, None, dist.group.WORLD)
        return x + torch.einsum("btec,ebcd->btd", places * share[..., None], back)

torch.manual_seed(3)  # the router is the same in both processes
model = Experts()
torch.manual_seed(rank)
for layer in (model.up, model.down):
    nn.init.normal_(layer.weight)
x = torch.randn(6, 6, 8)
for strategy in (dfx.published.TwoBatchOverlap(), dfx.DualBatch()):
    torch._dynamo.reset()
    fast = dfx.schedule(copy.deepcopy(model), strategy, in_axes=0, lanes=2)
    assert_trains_alike(model, fast, x)
    for entry in fast._dfx_core.all_planned((x.clone().requires_grad_(),), {}):
        for made in (entry, entry.later() if entry.later else None):
            if made is None:
                continue
            launches = [i for i in made.plan.instructions if isinstance(i, Launch)]
            talks = [made.pg.regions[i.region].resource == "network" for i in launches]
            beside = 0
            for at in (n for n, talk in enumerate(talks) if talk):
                # From its launch to the next one on its lane: what the other lane does meanwhile.
                later = [n for n in range(at + 1, len(launches)) if talks[n]]
                window = range(at + 1, later[0] if later else len(launches))
                beside += any(launches[n].nano == 1 - launches[at].nano for n in window)
            print("experts", type(strategy).__name__, made.kind, sum(talks), beside)
"""


def test_the_two_batch_strategy_on_an_expert_parallel_layer(outs: list[str]) -> None:
    """Values and gradients; behind each all-to-all stands compute of the other nano-batch."""
    for out in outs:
        lines = [line.split() for line in out.splitlines() if line.startswith("experts")]
        assert lines == [
            ["experts", strategy, kind, "4", "4"]
            for strategy in ("TwoBatchOverlap", "DualBatch")
            for kind in ("forward", "backward")
        ], out


def test_values_and_gradients_of_a_tensor_parallel_block(outs: list[str]) -> None:
    """Under every strategy; ``DualBatch`` has communication on a lane of its own."""
    for out in outs:
        assert out.count("equal ") == 4, out


def test_communication_has_a_lane_and_an_order(outs: list[str]) -> None:
    lines = [next(line for line in out.splitlines() if line.startswith("order")) for out in outs]
    assert lines[0] == lines[1]
    assert "all_reduce@0" in lines[0] and "all_reduce_1@1" in lines[0]

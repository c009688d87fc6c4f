"""torch FSDP, two processes with gloo: blocks are scheduled, then sharded; its hooks are called as before."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynaflow_xla as dfx  # +


class Towers(nn.Module):
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.GRU(8, 8), nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [T, B, 8]."""
        return self.left(x)[0] * self.right(x.flip(0))[0]


def weights_after(scheduled: bool, rank: int) -> list[torch.Tensor]:
    """Of three steps, each process on rows of its own; put together again from the shards."""
    torch.manual_seed(0)
    blocks = [Towers(), Towers()]
    if scheduled:
        blocks = [dfx.schedule(block, "branches") for block in blocks]  # +
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all(p.to_local().numel() < p.numel() for p in model.parameters())
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def work(rank: int, file: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    plain, fast = weights_after(False, rank), weights_after(True, rank)
    assert len(plain) == len(fast)
    for a, b in zip(plain, fast, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    if rank == 0:
        print(f"{len(fast)} sharded parameters as without, plans: {dfx.stats().plans}")
    dist.destroy_process_group()


def main() -> None:
    """Starts both processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "meet"),), nprocs=2)


if __name__ == "__main__":
    main()

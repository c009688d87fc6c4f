"""accelerate: a training loop whose model ``prepare`` wraps after it was scheduled."""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynaflow_xla as dfx  # +


def losses(model: nn.Module) -> list[float]:
    """Of one epoch."""
    drawn = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(16, 8, generator=drawn), torch.randn(16, 1, generator=drawn))
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    found = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    """Trains twice from the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    plain = losses(copy.deepcopy(model))

    model = dfx.schedule(model, "branches")  # +

    fast = losses(model)
    print("losses", [round(x, 4) for x in plain], [round(x, 4) for x in fast])
    assert all(abs(a - b) < 1e-4 for a, b in zip(plain, fast, strict=True))


if __name__ == "__main__":
    main()

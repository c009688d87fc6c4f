"""A PyTorch module: the same parameters, the same results, its parts side by side."""

import torch
from torch import nn

import dynaflow_xla as dfx


class Towers(nn.Module):
    """A recurrent tower for each direction of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = nn.GRU(32, 32), nn.GRU(32, 32)
        self.out = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [T, B, 32]."""
        a, b = self.forwards(x)[0], self.backwards(x.flip(0))[0].flip(0)
        return self.out(torch.cat([a, b], -1))


def main() -> None:
    """Takes a training step through the scheduled module; the original's weights change."""
    torch.manual_seed(0)
    model, x = Towers(), torch.randn(12, 4, 32)
    fast = dfx.schedule(model, strategy="branches", rules=[dfx.Module(nn.GRU)])
    print(dfx.explain(fast, x))
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    before = model.out.weight.clone()
    fast(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.out.weight)
    print(dfx.verify(fast, x))


if __name__ == "__main__":
    main()

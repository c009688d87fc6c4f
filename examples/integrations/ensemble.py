"""An ensemble: several models on the same input, as one plan."""

import torch
from torch import nn

import dynaflow_xla as dfx  # +


def main() -> None:
    """Four networks that vote."""
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)) for _ in range(4)]
    x = torch.randn(8, 16)
    plain = torch.stack([member(x) for member in members]).mean(0)

    together = dfx.together(*members, strategy="branches")  # +
    votes = together(*[x] * len(members))  # +

    fast = torch.stack(votes).mean(0)
    print(dfx.explain(together, *[x] * len(members)))
    assert torch.allclose(plain, fast, atol=1e-6)
    fast.sum().backward()
    assert all(p.grad is not None for member in members for p in member.parameters())


if __name__ == "__main__":
    main()

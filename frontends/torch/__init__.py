"""PyTorch frontend: Dynamo, AOTAutograd and torch.export to the graph IR, native execution on lanes."""

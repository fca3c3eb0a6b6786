"""PyTorch files: torch.save in its three containers, TorchScript, torch.export; and what all of them hold."""

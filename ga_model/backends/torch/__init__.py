"""PyTorch: functions of the core run eagerly. Also hooks, `torch.optim` and several processes."""

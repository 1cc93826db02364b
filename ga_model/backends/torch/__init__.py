"""PyTorch: calls of layers by microbatches, whether that is exact, and what a step divides by."""

"""TensorFlow: an adapter of the core."""

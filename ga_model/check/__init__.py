"""`check_equivalence`: train with plain Keras and with accumulation, compare, explain."""

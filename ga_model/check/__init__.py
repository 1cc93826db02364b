"""`check_equivalence`: train with plain Keras and with accumulation, compare, explain differences.

May import the modules at the top level of the package, and what those may import.
"""

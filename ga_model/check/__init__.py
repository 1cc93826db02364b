"""`check_equivalence`: train as plain Keras and with accumulation, compare, say why they differ.

May import the first level of the package and what stands below it.
"""

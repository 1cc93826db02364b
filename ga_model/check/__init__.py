"""`check_equivalence`: train with plain Keras and with accumulation, compare, explain differences.

May import the first level of the package and the rooms below it.
"""

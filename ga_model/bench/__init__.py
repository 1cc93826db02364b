"""`python -m ga_model bench`: compare time and memory of every way to train.

May import the modules at the top level of the package, and what those may import.
"""

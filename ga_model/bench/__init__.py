"""`python -m ga_model bench`: time and memory of every way to train, side by side.

May import the first level of the package and the rooms below it.
"""

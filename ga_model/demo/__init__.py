"""`python -m ga_model demo`: the demonstration, its report and its figure.

May import the first level of the package and the rooms below it.
"""

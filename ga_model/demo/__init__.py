"""`python -m ga_model demo`: train a small network four ways, and report whether they agree.

May import the modules at the top level of the package, and what those may import.
"""

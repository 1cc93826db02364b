"""Shared by the check, the benchmark and the demonstration: processes, their memory, tables.

May import nothing of the package.
"""

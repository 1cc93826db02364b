"""Tools of the check, the benchmark and the demonstration: processes, memory, tables.

May import nothing else of the package.
"""

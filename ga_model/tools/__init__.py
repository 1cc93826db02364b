"""What the check, the benchmark and the demonstration share: processes, their memory, tables.

May import nothing of the package.
"""

"""Tools of the check, the benchmark and the demonstration: processes, memory, tables."""

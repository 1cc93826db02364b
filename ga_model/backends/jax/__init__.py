"""JAX: functions of the core become pure functions, compiled by XLA.

A step on JAX takes the values of all variables and returns new ones. So `adapter` holds these
values during `fit`, and passes each program those that it reads.
"""

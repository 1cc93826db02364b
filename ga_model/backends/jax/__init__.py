"""JAX: functions of the core become pure functions, compiled by XLA.

On JAX a step is a function: it takes the values of all variables and returns new ones. So `adapter`
holds these values while `fit` runs, and passes to each program those that it reads.
"""

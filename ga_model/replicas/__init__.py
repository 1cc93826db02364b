"""Devices and machines: everything that depends on `tf.distribute`, and updates on all replicas.

May import `graphs` and `base`.
"""

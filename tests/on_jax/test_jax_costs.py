"""What accumulation costs on JAX is measured by a script of the documents."""

import importlib.util

from helpers import ROOT


def test_the_script_of_the_documents_measures_each_way(monkeypatch):
    spec = importlib.util.spec_from_file_location("measure_jax", ROOT / "docs/measure_jax.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in (("ROWS", 4), ("BATCHES", 4), ("ROUNDS", 1)):
        monkeypatch.setattr(script, name, value)
    found = script.ratios(script.tiny)
    assert list(found) == list(script.WAYS)
    assert found["plain Keras"] == 1.0
    assert min(found.values()) > 0.0

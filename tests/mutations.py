"""Break the package in one place at a time, and see which test notices. For maintainers, by hand.

    python tests/mutations.py                  # all mutations, about fifteen minutes on two cores
    python tests/mutations.py replica noise    # those whose names have one of these words
    python tests/mutations.py --named          # only by the test that should notice
    python tests/mutations.py -m "not sweep"   # what the quick tests let through: with the gate

Each mutation is tried in a copy of the tree: first by the test that is named beside it, as the gate
runs it, then, if that passes, by all quick tests. All have to be caught.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
_SECONDS = 1800  # after which a run counts as hung
# Bytecode knows a file by its size and time, which may be the same.
_ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "PYTHONDONTWRITEBYTECODE": "1"}


class Mutation(NamedTuple):
    """A defect.

    Attributes:
        name: what is wrong then.
        file: in `ga_model`.
        before: text that stands there once.
        after: what stands in its place.
        test: in `tests`, the test that is to notice: a file, or one test of it.
    """

    name: str
    file: str
    before: str
    after: str
    test: str = "conformance/test_conformance.py"


# Name and file, the test where it is another, and as in a patch what is taken out and put in.
_TABLE = """\
a sum beside a mean is not scaled by the microbatches of the window: core/weights.py
-(term.value, _numbers.float64(steps) * parts)
+(term.value, parts)

terms of different weights have one weight in a split batch: core/weights.py
-factors.append((term.value, share * parts))
+factors.append((term.value, parts))

a regularizer beside a sum counts once per microbatch: core/weights.py
-loss = loss - repeated * _numbers.like(loss, value)
+pass

a window stays open at an epoch's end: _callbacks.py
-warn_of_no_effect()
-        self._accumulating.close_window()
+warn_of_no_effect()

a window stays open for validation: _callbacks.py
conformance/test_callbacks_everywhere.py
-on_test_begin(self, logs: Logs | None = None) -> None:
-        self._accumulating.close_window()
+on_test_begin(self, logs: Logs | None = None) -> None:

fit goes on with the window that a loop has left: _callbacks.py
conformance/test_around_updates.py::test_a_fit_begins_with_an_empty_window
-on_train_begin(self, logs: Logs | None = None) -> None:
-        self._accumulating._accumulation.discard_window()
+on_train_begin(self, logs: Logs | None = None) -> None:
+        pass

an open window is forgotten where accumulation_steps becomes 1: core/model_state.py
conformance/test_around_updates.py::test_a_window_begun_before_a_change_to_1_is_finished
-return self.settings.accumulation_steps > 1 or self.has_open_window()
+return self.settings.accumulation_steps > 1

a schedule is one epoch late: _callbacks.py
conformance/test_scheduler_everywhere.py::test_updates_are_those_of_the_scheduled_windows
-self.model.accumulation_steps = self._steps_at(epoch)
+self.model.accumulation_steps = self._steps_at(max(epoch - 1, 0))

the loss is tracked once per microbatch: core/metric_calls.py
-calls is None or not (_is_scalar(values) and _is_scalar(sample_weight))
+True

a check leaves the Python state of a model as its trainings have made it: check/_compare.py
check/test_check.py::test_state_that_keras_does_not_track_is_as_before
-        self._python.restore()
-        attributes
+        attributes

settings are not saved: _model.py
conformance/test_around_updates.py::test_copies_and_clones_train_alike
-return {**config, **dataclasses.asdict(self._accumulation.settings)}
+return config

None leaves a setting as it is: _settings.py
interface/test_settings.py::test_none_switches_a_setting_off_and_the_others_stay
-if v is not UNCHANGED}
+if v is not UNCHANGED and v is not None}

the same warning comes again and again: core/model_state.py
-elif message not in self.warnings:
+else:

the check's limit is too wide: check/_equivalence_report.py
check/test_check.py::test_a_variable_is_equal_up_to_rounding
-"float32": 1e-4
+"float32": 5e-3

an interrupted check leaves a model trained: check/_compare.py
check/test_check.py::test_an_interrupted_check_leaves_the_model_as_it_was
-        finally:
-            state.restore()
+        finally:
+            pass

the check lets dropout draw other masks: check/_randomness.py
check/test_check.py::test_models_are_checked_as_they_are_compiled
-np.random.default_rng(seed)
+np.random.default_rng()

the command's exit status does not tell that a model differs: cli/_commands.py
conformance/test_check_everywhere.py::test_the_command_checks_a_script
-"different": 1,
+"different": 0,

the demonstration takes its control for a proof: demo/_report.py
commands/test_demo.py::test_settings_that_can_not_tell_the_runs_apart_prove_nothing
-    if any(equal for equal, r in zip(is_equal, others) if r.run.is_control):
-
+    if False:
+

a window without weight has no gradients of regularizers: core/losses.py
-if not (regularization and self.compiled) or terms.weight is None:
+if True:

what is saved within a window is not told: _model.py
interface/test_faults.py::test_a_backup_inside_a_window_has_the_weights_of_the_last_update
-        self._accumulation.warn_of_saving()
-
+

the benchmark divides by the fastest round: bench/_report.py
commands/test_bench.py::test_ratios_are_medians_over_rounds_of_the_same_round
-[seconds / of_reference for
+[seconds / min(reference.seconds_per_sample) for

a later microbatch does not shrink the sums in an earlier unit: core/window.py
-    return _numbers.where(unit == 0, 1.0, _numbers.divide_or_zero(unit, later))
+    return _numbers.where(unit == 0, 1.0, 1.0)

a graph takes every microbatch for one as heavy as those before: base/_numbers.py
-pred=tf.equal(shrink, 1.0)
+pred=tf.equal(shrink, shrink)

windows do not close with what they have: core/driver.py
-                while not self._update(window, is_end=True):
+                while False:

a microbatch without weight is multiplied: core/window.py
-            counts = other.total != 0  # not
+            counts = other.total == other.total  # not

the first window of a step of one's own is not tried: core/driver.py
-        if self.has_own_step:
-            return True
-        model = self._model
+        if self.has_own_step:
+            return False
+        model = self._model

what is not exact is not told: core/driver.py
-            model._warn_once(known.warning)
-
+

layers that combine samples are taken to treat them one by one: core/proof/own_code.py
-    if any(combines_samples(*part) for layer in layers for part in operations_in(layer)):
+    if False:

running averages move by the last microbatch: core/statistics.py
-        return Moments(count, self.mean + step * share, variance)
+        return Moments(count, other.mean, other.variance)

metrics get the numbers of microbatches twice: core/updates.py
-ops.cast((total - earlier_total) * share, metric.total.dtype)
+ops.cast(total * share, metric.total.dtype)

replicas divide by what they weigh themselves: backends/tensorflow/replicas.py
replicas/test_strategy.py
-    of_window = tf.reduce_sum(total * tf.math.divide_no_nan(unit, largest))
+    of_window = tf.reduce_max(total * tf.math.divide_no_nan(unit, largest))

the moments of replicas are not pooled: backends/tensorflow/replicas.py
replicas/test_strategy.py
-moments=[Moments.of_stacked(Moments._make(map(_stacked, m))) for m in sums.moments],
+moments=sums.moments,

positions count once per microbatch: backends/tensorflow/sparse.py
equivalence/test_positions.py
-    if all(isinstance(part, Positions) for part in rows):
+    if False:

an optimizer in a branch is taken for one that is always applied: backends/tensorflow/adapter.py
interface/test_own_steps.py::test_an_update_in_a_branch_of_the_steps_own_is_refused
-        if is_branch(graph_being_made()):
+        if False:
"""


def _mutation(entry):
    first, *lines = entry.splitlines()
    before, after = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
    return Mutation(*first.split(": "), before, after, *(x for x in lines if x[0] not in "-+"))


MUTATIONS = [_mutation(entry) for entry in _TABLE.split("\n\n")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="of the mutations' names; all without")
    parser.add_argument("--named", action="store_true", help="run the named tests only")
    parser.add_argument("-m", dest="marks", help="run the tests of these marks, not quick ones")
    parser.add_argument("-n", dest="processes", default="2", help="for more than a named test")
    options = parser.parse_args()
    chosen = [
        m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)
    ]
    sources = {m: (ROOT / "ga_model" / m.file).read_text() for m in chosen}
    for mutation, source in sources.items():
        if (number := source.count(mutation.before)) != 1:
            sys.exit(f"{mutation.file} has the text of {mutation.name!r} {number} times, not once.")
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        print("| mutation | caught by | s |\n|---|---|---|", flush=True)
        for mutation, source in sources.items():
            file = copy / "ga_model" / mutation.file
            file.write_text(source.replace(mutation.before, mutation.after))
            start = time.monotonic()
            caught_by = _caught_by(copy, mutation, options)
            file.write_text(source)
            caught += caught_by is not None
            seconds = time.monotonic() - start
            print(f"| {mutation.name} | {caught_by or '**nothing**'} | {seconds:.0f} |", flush=True)
    print(f"\n{caught} of {len(chosen)} caught")
    return caught < len(chosen)


def _caught_by(copy, mutation, options):
    """Return the test that fails, or None."""
    found = None
    if options.marks is None:
        found = _failing(copy, [f"tests/{mutation.test}", "-m", "not sweep"])
    if found is None and not options.named:
        marks = [] if options.marks is None else ["-m", options.marks]
        found = _failing(copy, [*marks, "-n", options.processes])
    return found


def _failing(copy, arguments):
    """Run tests up to the first one that fails, and return its name, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(copy)}
    given = {"cwd": copy, "env": environment, "timeout": _SECONDS}
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    except subprocess.TimeoutExpired:
        return "one that hung"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", result.stdout, re.MULTILINE)
    if result.returncode not in (0, 1) or (result.returncode and failed is None):
        text = result.stdout[-3000:] + result.stderr[-3000:]
        sys.exit(f"The tests did not run: {' '.join(arguments)}\n{text}")
    return failed[1].partition("[")[0] if failed else None


if __name__ == "__main__":
    sys.exit(main())

"""Break the package in one place at a time, and see which test notices. For maintainers, by hand.

    python tests/mutations.py                  # all mutations, about ten minutes on two cores
    python tests/mutations.py replica noise    # those whose names have one of these words
    python tests/mutations.py --named          # only by the test that should notice
    python tests/mutations.py -m "not deep"    # what the quick tests let through: all but deep

Each mutation is tried in a copy of the tree: first by the quick test that is named beside it, then,
if that passes, by all quick tests. Nine in ten have to be caught by these, and all by the gate's.
"""

import argparse
import importlib
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import pytest

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
sys.dont_write_bytecode = True  # it knows a file by its size and time, which may be the same
ROOT = pathlib.Path(__file__).resolve().parent.parent
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
_SECONDS = 1800  # after which a run counts as hung


class Mutation(NamedTuple):
    """A defect.

    Attributes:
        name: what is wrong then.
        file: in `ga_model`.
        before: text that stands there once.
        after: what stands in its place.
        test: in `tests`, the quick test that is to notice: a file, or one test of it.
    """

    name: str
    file: str
    before: str
    after: str
    test: str


MUTATIONS = [
    # Weights and sums.
    Mutation(
        "single numbers of compiled losses count as means over samples",
        "recording/_observed_loss.py",
        "        if found is not None:\n            value, term",
        "        if found is None and found:\n            value, term",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "numbers that change with the number of samples are taken for literals",
        "reading/_numbers_in_code.py",
        "                is_unlike = not number.counts",
        "                is_unlike = False",
        "reading/test_numbers_in_code.py::test_numbers_that_follow_from_that_of_samples_are_told",
    ),
    Mutation(
        "a literal that is the number of samples is taken for it without a word",
        "reading/_numbers_in_code.py",
        "number.counts and number.value * times not in values",
        "False",
        "reading/test_numbers_in_code.py::test_a_literal_that_is_their_number_is_told",
    ),
    Mutation(
        "an optimizer's own apply_gradients is passed by",
        "replicas/_optimizers.py",
        "    if in_pairs:\n",
        "    if in_pairs is None:\n",
        "equivalence/test_optimizer_clock.py::test_the_method_that_a_step_calls_makes_the_update",
    ),
    Mutation(
        "a loop is read with what it begins with alone",
        "reading/_reading.py",
        "        while op.type in LOOPS and readings:",
        "        while op.type not in LOOPS and not readings:",
        "reading/test_loss_reading.py::test_what_an_iteration_gives_the_next_one_begins_with",
    ),
    Mutation(
        "a branch by the number of samples counts as one for all",
        "reading/_inner_graphs.py",
        "if kinds[0] in _OF_SEVERAL or is_by_number:",
        "if kinds[0] in _OF_SEVERAL:",
        "reading/test_loss_reading.py::test_the_number_of_samples_chooses",
    ),
    Mutation(
        "metrics that count batches are not told of",
        "recording/_metric_values.py",
        "loss.denominators == [] and number_of(added):",
        "loss.denominators is None and number_of(added):",
        "recording/test_metric_values.py::test_a_count_of_batches_is_told_of",
    ),
    Mutation(
        "metrics that keep a number of the last batch are not told of",
        "recording/_metric_values.py",
        "        if kinds and not is_added and not adds_to_variable(value):",
        "        if kinds and is_added and not adds_to_variable(value):",
        "recording/test_metric_values.py::test_a_metric_that_keeps_its_last_batch_is_told_of",
    ),
    Mutation(
        "what is divided is lost where nothing is counted",
        "reading/_denominators.py",
        "        count = _numbers.not_zero(count, 1)",
        "        count = _numbers.not_zero(count, 0)",
        "reading/test_step_loss.py::test_losses_of_one_divisor_match_however_it_is_written",
    ),
    Mutation(
        "sample weights of several samples are not told of",
        "recording/_losses.py",
        "        if obstacle is not None:\n            subject",
        "        if obstacle is None:\n            subject",
        "equivalence/test_weights.py::test_sample_weights_of_a_loss_are_told_of_that_follow_from_several_samples",
    ),
    Mutation(
        "updates of metrics by code of Keras's are read like those of the user's",
        "recording/_logs.py",
        "        self.of_keras.append(range(first, len(graph.get_operations())))",
        "        self.of_keras.append(range(first, first))",
        "recording/test_metric_values.py::test_metrics_that_are_made_of_keras_own_are_not_told_of",
    ),
    Mutation(
        "what a step gives to metrics is not looked at",
        "recording/_metric_values.py",
        "        if place is not None:\n            yield",
        "        if place is None:\n            yield",
        "recording/test_metric_values.py::test_what_a_step_gives_to_metrics_follows_sample_by_sample_or_is_told_of",
    ),
    Mutation(
        "integers among the logs are those of the last microbatch",
        "recording/_logs.py",
        "        return bool(numbers.is_sum(leaf))",
        "        return False",
        "recording/test_metric_values.py::test_logs_that_are_no_means_over_samples_are_told_of",
    ),
    Mutation(
        "sums of one mask are taken for sums of several masks",
        "reading/_alike.py",
        'if not op.op_def.is_stateful and op.type != "Placeholder":',
        'if op.op_def.is_stateful and op.type != "Placeholder":',
        "reading/test_step_loss.py::test_losses_of_one_divisor_match_however_it_is_written",
    ),
    Mutation(
        "what a nested function divides by is not read",
        "reading/_step_loss.py",
        "is_loss = kind == MIXED and bool(inner)",
        "is_loss = kind is None and bool(inner)",
        "reading/test_step_loss.py::test_losses_of_one_divisor_match_however_it_is_written",
    ),
    Mutation(
        "microbatches count alike, whatever their losses average over",
        "recording/_recorder.py",
        "        weight = self._in_unit(optimizer, terms.weight)\n        self._folded",
        "        weight = self._in_unit(optimizer, terms.weight if terms.weight is None else 1.0)\n"
        "        self._folded",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "gradients of a step that does not call scale_loss are not weighted",
        "recording/_recorder.py",
        "scale = not (is_folded or is_sum)",
        "scale = False",
        "hearing/test_steps.py::test_a_train_step_of_the_users_own_matches_the_whole_batch",
    ),
    Mutation(
        "a mask is ignored",
        "recording/_observed_loss.py",
        "valid, added = tf.math.count_nonzero(mask, dtype=tf.float64), added_to_valid_entries()",
        "valid, added = tf.cast(tf.size(mask), tf.float64), added_to_valid_entries()",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "sample weights do not count in a mean over them",
        "recording/_observed_loss.py",
        'by_sample_weight = reduction == "mean_with_sample_weight" and sample_weight is not None',
        "by_sample_weight = False",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "a sum beside a mean is not scaled by the microbatches of the window",
        "hearing/_weights.py",
        "(term.value, _numbers.float64(steps) * parts)",
        "(term.value, parts)",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "terms of different weights have one weight in a split batch",
        "hearing/_weights.py",
        "factors.append((term.value, share * parts))",
        "factors.append((term.value, parts))",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "a regularizer beside a sum counts once per microbatch",
        "hearing/_weights.py",
        "loss = loss - repeated * _numbers.like(loss, value)",
        "pass",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "the unit does not grow with a heavier microbatch",
        "sums/_sums.py",
        "grown = unit * power_of_two(tf.maximum(ratio, 1.0))",
        "grown = unit",
        "equivalence/test_positions.py::test_batches_of_a_window_may_have_different_lengths",
    ),
    Mutation(
        "the sum so far does not shrink where the unit grows",
        "sums/_sums.py",
        "lambda: [added(multiplied(a, shrink, v), b, v) for a, b, v in terms],",
        "lambda: [added(a, b, v) for a, b, v in terms],",
        "interface/test_accumulator.py"
        "::test_no_gradient_is_scaled_up_and_weights_that_grow_are_exact",
    ),
    Mutation(
        "float16 gradients are summed in float16",
        "sums/_rows.py",
        "return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype",
        "return dtype",
        "conformance/test_accumulator_everywhere.py",
    ),
    Mutation(
        "what overwrites a variable is summed",
        "sums/_sums.py",
        'return bool(getattr(variable, "overwrite_with_gradient", False))',
        "return False",
        "interface/test_accumulator.py"
        "::test_gradients_that_overwrite_their_variable_are_neither_weighted_nor_summed",
    ),
    # Sparse gradients.
    Mutation(
        "rows of equal ids are summed from the first on",
        "sums/_rows.py",
        "return self.count > num_rows + num_rows // 4",
        "return self.count > 0",
        "equivalence/test_summed_rows.py::test_an_update_that_does_not_differ_is_not_told_of",
    ),
    Mutation(
        "rows of positions come once per microbatch",
        "sums/_places.py",
        "return not (any(dependence_of(ids)) or is_made_for_rows(ids))",
        "return False",
        "equivalence/test_positions.py::test_positions_of_a_transformer_match_the_full_batch",
    ),
    Mutation(
        "positions are matched by their number and not by their ids",
        "sums/_rows.py",
        "is_same = is_same_count & tf.reduce_all(tf.equal(ids[:least], more[:least]))",
        "is_same = is_same_count",
        "equivalence/test_positions.py::test_places_are_known_by_their_ids",
    ),
    # Windows.
    Mutation(
        "a partial window is divided by the microbatches of a full one",
        "batch/_window.py",
        "        elif self.is_open():\n",
        "        elif self.is_open():\n"
        "            for _, whole in self._sums.values():\n"
        "                number = self.steps.numpy() / self.num_batches()\n"
        "                whole._total.assign(whole._total * number)\n",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "a window stays open at an epoch's end",
        "_callbacks.py",
        "warn_of_no_effect(has_updated)\n        self._accumulating.close_window()",
        "warn_of_no_effect(has_updated)",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "a window stays open for validation",
        "_callbacks.py",
        "on_test_begin(self, logs: Any = None) -> None:\n        self._accumulating.close_window()",
        "on_test_begin(self, logs: Any = None) -> None:",
        "batch/test_window.py::test_the_window_closes_before_validation_and_before_callbacks",
    ),
    Mutation(
        "fit goes on with the window that a loop has left",
        "_callbacks.py",
        "on_train_begin(self, logs: Any = None) -> None:\n"
        "        self._accumulating._accumulation.discard_window()",
        "on_train_begin(self, logs: Any = None) -> None:\n        pass",
        "interface/test_faults.py::test_fit_knows_nothing_of_a_loop_that_broke_off",
    ),
    Mutation(
        "an error leaves its window open",
        "_train_function.py",
        "            model._accumulation.discard_window()\n",
        "",
        "interface/test_faults.py::test_a_batch_that_fails_in_a_loop_empties_the_window",
    ),
    Mutation(
        "a new accumulation_steps changes the open window",
        "batch/_window.py",
        "        if not self.is_open():\n            self._begin()",
        "        self._begin()",
        "batch/test_window.py::test_a_changed_setting_takes_effect_at_the_next_window",
    ),
    Mutation(
        "an open window is forgotten where accumulation_steps becomes 1",
        "_kept.py",
        "return self.settings.accumulation_steps > 1 or self.has_open_window()",
        "return self.settings.accumulation_steps > 1",
        "batch/test_window.py::test_a_window_begun_before_a_change_to_1_is_finished",
    ),
    Mutation(
        "on_update is called once per batch",
        "batch/_step.py",
        "            window.end_batch(accumulation.measured_noise",
        "            _strategy.run_once_if(True, model._on_update)\n"
        "            window.end_batch(accumulation.measured_noise",
        "reading/test_writes.py::test_what_happens_on_update_happens_once_per_update",
    ),
    Mutation(
        "a schedule is one epoch late",
        "_callbacks.py",
        "self.model.accumulation_steps = self._steps_at(epoch)",
        "self.model.accumulation_steps = self._steps_at(max(epoch - 1, 0))",
        "interface/test_scheduler.py::test_updates_are_those_of_the_scheduled_windows",
    ),
    # One batch.
    Mutation(
        "the last microbatch of a batch is dropped where it is smaller",
        "graphs/_microbatch.py",
        "tf.maximum((self.rows + size - 1) // size, 1)",
        "tf.maximum(self.rows // size, 1)",
        "batch/test_microbatch_size.py::test_rows_keep_their_order",
    ),
    Mutation(
        "a term that is divided by zero counts as lost if there was nothing to divide",
        "recording/_observed_loss.py",
        "tf.equal(divisor, 0) & tf.reduce_any(tf.not_equal(weight, 0))",
        "tf.equal(divisor, 0)",
        "reading/test_step_loss.py::test_a_term_that_is_divided_by_zero_is_told_of_if_it_was_not_zero",
    ),
    Mutation(
        "skip_nonfinite counts the microbatches that it keeps",
        "batch/_step.py",
        "accumulation.count_skipped(batch.num_microbatches - part.num_counted)",
        "accumulation.count_skipped(part.num_counted)",
        "batch/test_nonfinite.py::test_what_was_left_out_is_reported_once_and_counted_from_compile_on",
    ),
    Mutation(
        "skip_nonfinite looks at the first gradient only",
        "sums/_sums.py",
        "tf.reduce_all(tf.math.is_finite(value)) for value in present]",
        "tf.reduce_all(tf.math.is_finite(value)) for value in present[:1]]",
        "batch/test_nonfinite.py::test_one_entry_that_is_not_finite_is_enough",
    ),
    Mutation(
        "a microbatch that is left out stays in metrics and statistics",
        "batch/_nonfinite.py",
        "_strategy.run_if(tf.equal(part.num_counted, 0), undo)",
        "_strategy.run_if(tf.constant(False), undo)",
        "batch/test_nonfinite.py"
        "::test_running_statistics_and_random_state_are_as_if_the_microbatch_had_not_been",
    ),
    Mutation(
        "a step of one's own on a full batch updates at its end",
        "recording/_recorder.py",
        'self.applies_at_once = position.is_update and not is_of_keras(model, "train_step")',
        "self.applies_at_once = False",
        "calls/test_split_calls.py::test_a_batch_that_is_not_finite_is_left_out_whole",
    ),
    Mutation(
        "what it has updated stays in optimizers where the batch is left out",
        "batch/_nonfinite.py",
        "zip([*variables, *updated()], [*before, *part.before])",
        "zip(variables, before)",
        "calls/test_split_calls.py::test_a_batch_that_is_not_finite_is_left_out_whole",
    ),
    Mutation(
        "the loss is tracked once per microbatch",
        "hearing/_metric_calls.py",
        "return _is_scalar(values) and _is_scalar(sample_weight)",
        "return False",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "numbers that a step logs are not weighted",
        "recording/_logs.py",
        "mean = recording.mean_of(leaf)",
        "mean = recording.mean_of(leaf)._replace(numerator=leaf, denominator=tf.ones_like(leaf))",
        "batch/test_microbatch_size.py::test_logs_of_a_step_of_ones_own_are_those_of_the_whole_batch",
    ),
    Mutation(
        "running averages move once per microbatch",
        "recording/_normalization.py",
        "                raw(variable).assign(value)",
        "                pass",
        "recording/test_batch_normalization.py::test_they_are_those_of_the_full_batch",
    ),
    Mutation(
        "the variance of parts leaves out how far their means are apart",
        "sums/_moments.py",
        " + (step * share) * (step * rest),",
        ",",
        "recording/test_batch_normalization.py::test_moments_of_parts_are_those_of_all",
    ),
    # Replicas.
    Mutation(
        "a replica divides by its own weights",
        "sums/_sums.py",
        "weight = _strategy.mean_over_replicas(self.total * self.unit)",
        "weight = self.total * self.unit",
        "replicas/test_strategy.py::test_every_setting_matches_the_whole_batch",
    ),
    Mutation(
        "a replica's gradients are left out where an optimizer clips",
        "replicas/_optimizers.py",
        'context.all_reduce("SUM", present)',
        "present",
        "replicas/test_strategy.py::test_every_setting_matches_the_whole_batch",
    ),
    Mutation(
        "a loss scale optimizer sees one replica's overflow only",
        "replicas/_optimizers.py",
        "if _strategy.num_replicas() > 1 and (is_scaled or clips(optimizer)):",
        "if _strategy.num_replicas() > 1 and clips(optimizer):",
        "replicas/test_strategy.py::test_a_loss_scale_optimizer_sees_an_overflow_on_any_replica",
    ),
    # Calls of layers by microbatches.
    Mutation(
        "the second pass draws other numbers than the first",
        "calls/_second_pass.py",
        "        write(zip(changed, found))\n",
        "",
        "calls/test_loss_over.py::test_both_passes_draw_the_same_numbers",
    ),
    Mutation(
        "the second pass sees what the step has written to variables since",
        "calls/_second_pass.py",
        "targets = self._targets(leaves, [*self._kept, *weights], shared)",
        "targets = self._targets(leaves, weights, shared)",
        "calls/test_loss_over.py::test_the_second_pass_sees_what_the_first_one_saw",
    ),
    Mutation(
        "losses that layers add count alike in microbatches of different sizes",
        "calls/_microbatch_call.py",
        "tf.reduce_sum(loss) if adds else loss * tf.cast(share, loss.dtype)",
        "tf.reduce_sum(loss) if adds else loss / tf.cast(self.num_microbatches, loss.dtype)",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "what TensorFlow knows of a list is of the call before",
        "base/_internals.py",
        "        value._update_snapshot()",
        "        pass",
        "calls/test_split_calls.py::test_a_step_that_adds_losses_matches_in_a_second_graph",
    ),
    Mutation(
        "losses that a layer adds while it is built stay",
        "base/_internals.py",
        "            del part._losses[numbers.get(id(part), 0) :]",
        "            pass",
        "calls/test_split_calls.py::test_a_call_of_a_model_that_adds_a_loss_and_is_not_built_matches",
    ),
    Mutation(
        "a loss that a layer adds to that of Keras in a step of the user's own counts as a mean",
        "recording/_losses.py",
        '            is_sum = kinds == {"sum"}',
        "            is_sum = False",
        "reading/test_step_loss.py::test_losses_of_layers_in_the_loss_of_keras_are_exact_or_told_of",
    ),
    Mutation(
        "an input that all samples share has the gradient of the last microbatch",
        "calls/_second_pass.py",
        "sums = [a + b for a, b in zip(sums, of_shared)]",
        "sums = list(of_shared)",
        "calls/test_split_calls.py::test_calls_match_the_full_batch",
    ),
    Mutation(
        "a call that mixes samples is split",
        "calls/_call_checks.py",
        "    if (reason := why_mixed(outputs, layer)) is not None:\n        raise",
        "    if (reason := why_mixed(outputs, layer)) == 1:\n        raise",
        "calls/test_split_calls.py::test_calls_that_cannot_be_split_are_exact_and_named_once",
    ),
    # What is read of a step.
    Mutation(
        "every loss is taken to add up",
        "reading/_loss_reading.py",
        "return len(graph.outputs) == 1 and Reading(graph).proves(graph.outputs[0])",
        "return len(graph.outputs) == 1",
        "reading/test_loss_reading.py::test_what_adds_up_is_told_from_what_does_not",
    ),
    Mutation(
        "a shape without axis 0 is taken to depend on samples",
        "reading/_dependence.py",
        "return 0 not in range(rank)[first : last : stride[0]]",
        "return False",
        "reading/test_dependence.py",
    ),
    Mutation(
        "a mean that a step makes is taken for a sum",
        "reading/_step_loss.py",
        "        if kind == SUM and power == 1.0:\n",
        "        if kind == SUM and power == 1.0:\n            return\n        if False:\n",
        "reading/test_step_loss.py::test_gradients_of_parts_are_put_together_by_what_is_read",
    ),
    Mutation(
        "a step that clips gradients is not told of",
        "recording/_recorder.py",
        "if work.breaks is not None:",
        "if False:",
        "reading/test_step_loss.py::test_gradients_that_are_clipped_are_told_of_once",
    ),
    Mutation(
        "a step that writes to variables is not told of",
        "reading/_writes.py",
        "        return _captured(graph, {id(handle) for *_, handle in self._written})\n",
        "        return set()\n",
        "reading/test_writes.py::test_a_step_that_writes_to_variables_is_told_of_once",
    ),
    # Automatic size, noise, settings, files.
    Mutation(
        "a size that did not fit is not halved",
        "automatic/_search.py",
        "self.size = (size + 1) // 2",
        "self.size = size - 1",
        "automatic/test_auto.py::test_a_size_that_does_not_fit_any_more_is_halved",
    ),
    Mutation(
        "the search stops at powers of two",
        "automatic/_search.py",
        "while size - fitting > 1:",
        "while False:",
        "automatic/test_auto.py::test_the_largest_size_that_fits_is_found",
    ),
    Mutation(
        "the search leaves weights as its trials have them",
        "automatic/_trials.py",
        "            variables.put_back()\n",
        "",
        "automatic/test_auto.py::test_the_search_leaves_everything_as_it_was",
    ),
    Mutation(
        "what a search makes outside the model begins with what its trials have left",
        "replicas/_all_variables.py",
        "            self._note(variable := next_creator(**settings))",
        "            variable = next_creator(**settings)",
        "automatic/test_auto_state.py",
    ),
    Mutation(
        "a search leaves the Python state of a model as trials have made it",
        "automatic/_trials.py",
        "            before.put_back_changed(state)",
        "            pass",
        "automatic/test_auto_state.py",
    ),
    Mutation(
        "a check leaves the Python state of a model as its trainings have made it",
        "check/_check.py",
        "        python.put_back()\n        attributes",
        "        attributes",
        "check/test_check.py::test_state_that_keras_does_not_track_is_as_before",
    ),
    Mutation(
        "the noise estimate is biased",
        "sums/_noise.py",
        "(count - 1.0)",
        "count",
        "conformance/test_noise.py",
    ),
    Mutation(
        "the noise of replicas is off by their number",
        "sums/_gradient_noise.py",
        "whole.unit * replicas**2",
        "whole.unit * replicas",
        "interface/test_noise_scale.py::test_the_estimates_are_those_of_the_formula",
    ),
    Mutation(
        "settings are not saved",
        "_model.py",
        "return {**config, **self._accumulation.settings.config()}",
        "return config",
        "interface/test_saving.py"
        "::test_a_subclass_round_trips_with_its_settings_and_optimizer_state",
    ),
    Mutation(
        "None leaves a setting as it is",
        "_settings.py",
        "if value is not UNCHANGED}",
        "if value is not UNCHANGED and value is not None}",
        "interface/test_settings.py::test_none_switches_a_setting_off_and_the_others_stay",
    ),
    Mutation(
        "the same warning comes again and again",
        "_kept.py",
        "elif message not in self.warnings:",
        "else:",
        "equivalence/test_weights.py::test_terms_that_one_weight_can_not_serve_are_named_once",
    ),
    # The check and the command line.
    Mutation(
        "the check's limit is too wide",
        "check/_equivalence_report.py",
        '"float32": 1e-4}',
        '"float32": 5e-3}',
        "check/test_check.py::test_a_variable_is_equal_up_to_rounding",
    ),
    Mutation(
        "an interrupted check leaves a model trained",
        "check/_check.py",
        "                state.restore()\n                random.setstate",
        "                random.setstate",
        "check/test_check.py::test_an_interrupted_check_leaves_the_model_as_it_was",
    ),
    Mutation(
        "the check lets dropout draw other masks",
        "check/_randomness.py",
        "noise_shape=(1, *others), seed=seed)",
        "noise_shape=None, seed=seed)",
        "check/test_check.py::test_float64_is_held_to_a_closer_tolerance",
    ),
    Mutation(
        "the command's exit status does not tell that a model differs",
        "cli/_commands.py",
        '"different": 1,',
        '"different": 0,',
        "check/test_check.py::test_the_command_checks_a_script",
    ),
    Mutation(
        "the demonstration takes its control for a proof",
        "demo/_report.py",
        "    if any(equal for equal, r in zip(is_equal, others) if r.run.is_control):\n",
        "    if False:\n",
        "commands/test_demo.py::test_settings_that_can_not_tell_the_runs_apart_prove_nothing",
    ),
    Mutation(
        "a window without weight has no gradients of regularizers",
        "hearing/_step_terms.py",
        "if not (regularization and self._terms) or terms.weight is None:",
        "if True:",
        "conformance/test_conformance.py",
    ),
    Mutation(
        "metrics that average a number per batch are not looked at",
        "recording/_recorder.py",
        "            tell_of_numbers(self, self._writes.values_for)\n",
        "            pass\n",
        "recording/test_metric_values.py",
    ),
    Mutation(
        "a metric keeps what it had of its window before",
        "recording/_logs.py",
        "metric.total.assign_add(tf.cast(total - known, metric.dtype))",
        "metric.total.assign_add(tf.cast(total, metric.dtype))",
        "conformance/test_window_logs_everywhere.py",
    ),
    Mutation(
        "a batch without weight has the gradients of 0 / 0",
        "sums/_one_gradient.py",
        "    return tf.math.multiply_no_nan(term, tf.cast(has_weight, term.dtype))",
        "    return term",
        "batch/test_microbatch_size.py::test_a_batch_in_which_nothing_counts_changes_nothing",
    ),
    Mutation(
        "an optimizer of the model may be applied past the recording",
        "reading/_writes.py",
        "past = [] if may_apply else",
        "past = [] if True else",
        "reading/test_writes.py::test_an_attribute_that_is_reached_by_a_global_is_refused",
    ),
    Mutation(
        "groups of samples may cross the border of two views",
        "reading/_parts.py",
        "        return bool(least % (int(after[1:].num_elements()) or 1) != 0)",
        "        return False",
        "reading/test_step_loss.py::test_views_are_followed_and_their_border_is_told_of",
    ),
    Mutation(
        "an update with sparse gradients is not compiled",
        "sums/_window_sum.py",
        "if is_compiled and (not has_rows or _optimizers.is_of_keras(optimizer)):",
        "if is_compiled and not has_rows:",
        "equivalence/test_rows_under_xla.py::test_an_update_with_rows_is_compiled",
    ),
    Mutation(
        "XLA compiles for every number of rows",
        "sums/_one_gradient.py",
        "    missing = -count % step\n",
        "    missing = 0 * step\n",
        "equivalence/test_rows_under_xla.py::test_few_numbers_of_rows_are_compiled_for",
    ),
    Mutation(
        "logs of a window begin with those of the window before",
        "batch/_window.py",
        "        self.logs.reset()\n",
        "",
        "conformance/test_window_logs_everywhere.py",
    ),
    Mutation(
        "operations that are not known are trusted in layers",
        "reading/_reading.py",
        "        if not self._keeps_apart(op, kinds):\n",
        "        if False:\n",
        "reading/test_loss_reading.py::test_operations_that_may_mix_samples_get_the_full_batch",
    ),
    Mutation(
        "samples on another axis are not followed through slices",
        "reading/_reading.py",
        "        if (axis := axes[place]) and chooses(op, axis):\n",
        "        if False:\n",
        "reading/test_loss_reading.py::test_layers_that_compute_with_other_samples_are_told",
    ),
    Mutation(
        "a loss that the optimizer has got is logged with its weight",
        "recording/_recorder.py",
        "tf.stop_gradient(loss - folded) + folded",
        "folded",
        "recording/test_metric_values.py"
        "::test_losses_that_were_passed_through_the_optimizer_are_logged_as_they_are",
    ),
    Mutation(
        "numbers that mix samples are not seen in metrics",
        "recording/_metric_values.py",
        "_BREAKS = (NOT_LINEAR, SEVERAL, UNKNOWN)",
        "_BREAKS = ()",
        "recording/test_metric_values.py",
    ),
    Mutation(
        "what is saved within a window is not told",
        "_model.py",
        "        self._accumulation.warn_of_saving()\n",
        "",
        "interface/test_saving.py::test_a_file_that_is_written_within_a_window_is_told_of",
    ),
    Mutation(
        "float8 layers in partial windows are not told of",
        "sums/_window_sum.py",
        "            self._is_rescaled.assign(self._is_rescaled | is_other)\n",
        "",
        "equivalence/test_variables.py::test_float8_layers_are_told_of_in_partial_windows",
    ),
    Mutation(
        "the benchmark divides by the fastest round",
        "bench/_bench_report.py",
        "np.array(times.seconds[REFERENCE, 1])",
        "np.min(times.seconds[REFERENCE, 1])",
        "commands/test_bench.py::test_ratios_are_medians_over_rounds_of_the_same_round",
    ),
    Mutation(
        "the limit of a group of processes is not seen",
        "tools/_memory.py",
        "return max(0, min(left))",
        "return max(0, left[0])",
        "automatic/test_auto.py::test_a_group_of_processes_may_have_less_memory",
    ),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="of the mutations' names; all without")
    parser.add_argument("--named", action="store_true", help="run the named tests only")
    parser.add_argument("-m", dest="marks", help="run the tests of these marks, not quick ones")
    parser.add_argument("-n", dest="processes", default="2", help="for more than a named test")
    options = parser.parse_args()
    importlib.import_module("keras")  # which takes long, and what is forked has it
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
        found = _failing(copy, [f"tests/{mutation.test}"])
    if found is None and not options.named:
        marks = [] if options.marks is None else ["-m", options.marks]
        found = _failing(copy, [*marks, "-n", options.processes])
    return found


def _failing(copy, arguments):
    """Run tests up to the first one that fails, and return its name, or None.

    They run in a copy of this process, which has imported what takes long.
    """
    log = copy.parent / "log"
    if (child := os.fork()) == 0:
        code = 3  # that of an error which is none of the tests
        try:
            os.setsid()
            with log.open("wb") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
            sys.stdout.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + _SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "one that hung"
        time.sleep(0.1)
    code, text = os.waitstatus_to_exitcode(ended[1]), log.read_text()
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", text, re.MULTILINE)
    if code not in (0, 1) or (code and failed is None):
        sys.exit(f"The tests did not run: {' '.join(arguments)}\n{text[-3000:]}")
    return failed[1].partition("[")[0] if failed else None


if __name__ == "__main__":
    sys.exit(main())

"""Private names of Keras, each behind a function that says what it is for.

A release that renames one of them breaks this module, or one of those beside it: those of the
backends are in `_internals_tf`, `_internals_torch` and `_internals_jax`. Read in Keras 3.8.0 to
3.15.1, TensorFlow 2.18 to 2.21, PyTorch 2.13 and JAX 0.6 to 0.12. `tests/base/test_internals.py`
finds private names elsewhere.

Differences between releases are here, too: one function for each, which names the last release
that has it.

These names are used where they are overridden, in `backends/hooks.py` and engines:

* `Trainer._compile_loss` is a property of the model class, which answers with a copy while a step
  is recorded. `tests/equivalence/test_weights.py`.
* `Trainer._aggregate_additional_loss` is the one place where the losses that layers add meet.
  `tests/equivalence/test_weights.py`.
* `Trainer._maybe_symbolic_build` and `Trainer._make_function` are what Keras does with several
  replicas before and after a step. `tests/replicas`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.losses.loss import (
    scale_loss_for_distribution,
    squeeze_or_expand_to_same_rank,
    unscale_loss_for_distribution,
)

# The name of the `global_seed` in Keras; only newer releases have a constant for it.
_GLOBAL_SEED = "global_seed_generator"

# Layers.


def layers_in(layer: Any, include_self: bool = True) -> list[Any]:
    """Return the layers in a layer, at any depth. The layers of a layer follow it."""
    return list(layer._flatten_layers(include_self=include_self))


def operations_in(layer: Any) -> list[tuple[Any, Any, Any]]:
    """Return the operations of a functional model that are no layers, with symbolic arguments."""
    found = [o for o in getattr(layer, "operations", []) if not isinstance(o, keras.layers.Layer)]
    nodes = [(operation, operation._inbound_nodes[0].arguments) for operation in found]
    return [(operation, node.args, node.kwargs) for operation, node in nodes]


def takes_training(layer: Any) -> bool:
    """Return whether a layer's `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def training_of_call(layer: Any) -> Any:
    """Return the `training` argument of the call that runs, or None if it is unknown."""
    context = layer._get_call_context()
    if hasattr(context, "get_value"):
        return context.get_value("training")
    return context.training  # up to Keras 3.9


def call_scopes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function whose contexts have the scopes of the layer call that runs here."""
    names = ("current_call_ctx", "autocast_scope")
    inside = [(name, global_state.get_global_attribute(name)) for name in names]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        outside = [(name, global_state.get_global_attribute(name)) for name in names]
        for name, value in inside:
            global_state.set_global_attribute(name, value)
        try:
            yield
        finally:
            for name, value in outside:
                global_state.set_global_attribute(name, value)

    return again


def is_rematerialized(layer: Any) -> bool:
    """Return whether a layer keeps no activations, by `keras.RematScope`."""
    scope = getattr(layer, "_remat_mode", None)  # missing up to Keras 3.8
    if scope is None or scope.mode is None:
        return False
    return scope.mode != "list_of_layers" or layer.name in (scope.layer_names or ())


def is_built(layer: Any, others: Iterable[Any] = ()) -> bool:
    """Return whether a layer, those in it, and metrics or optimizers have their variables."""
    states = [*layers_in(layer), *others]  # some metrics say so in `_built`
    return all(getattr(s, "built", True) and getattr(s, "_built", True) for s in states)


def own_state(layer: Any) -> list[Any]:
    """Return the non-trainable variables of a layer itself."""
    if (states := vars(layer).get("states")) is None:
        return list(layer._non_trainable_variables)
    # Keras does not track the states of a stateful recurrent layer.
    untracked = [state for state in keras.tree.flatten(states) if hasattr(state, "assign")]
    return [*layer._non_trainable_variables, *untracked]


def read_in_float16(layer: Any) -> list[Any]:
    """Return the trainable variables of a layer itself that its calls read in float16."""
    is_half = layer.autocast and layer.compute_dtype == "float16" != layer.variable_dtype
    return [v for v in layer._trainable_variables if v._autocast] if is_half else []


@contextlib.contextmanager
def forgetting_losses(model: Any) -> Iterator[None]:
    """If a step fails in a block, remove the layers' losses that Keras has stored in the model."""
    try:
        yield
    except BaseException:
        if hasattr(model, "_losses_override"):  # of stateless calls
            vars(model)["_losses_override"] = []
        raise


def seeds(layer: Any) -> list[Any]:
    """Return the states of the `keras.random.SeedGenerator` of a layer itself."""
    return [generator.state for generator in layer._seed_generators]


def ids_of_seeds(layer: Any) -> set[int]:
    """Return the ids of these of a layer and of all layers in it."""
    return {id(state) for part in layers_in(layer) for state in seeds(part)}


def unwrapped(value: Any) -> Any:
    """Return the dict or list inside a wrapper of TensorFlow's that tracks it."""
    if not type(value).__module__.startswith("tensorflow."):
        return value
    for name in ("__wrapped__", "_storage"):
        if isinstance(value, (dict, list)):
            value = getattr(value, name, value)
    return value


def global_seed() -> Any:
    """Return the `SeedGenerator` of random operations without a seed, or None if none was made."""
    return global_state.get_global_attribute(_GLOBAL_SEED)


def set_global_seed(generator: Any) -> None:
    """Set the `SeedGenerator` of random operations without a seed."""
    global_state.set_global_attribute(_GLOBAL_SEED, generator)


# The method with which BatchNormalization computes mean and variance of `inputs` with a `mask`.
MOMENTS = "_moments"


def reduction_axes(layer: Any) -> list[int]:
    """Return the axes that a BatchNormalization layer averages over."""
    return list(layer._reduction_axes)


def move_renormalization(layer: Any, mean: Any, variance: Any) -> None:
    """Update all averages of a BatchNormalization layer with `renorm=True`."""
    layer._update_renorm_statistics(mean, variance)


# Models and optimizers.


def build(model: Any, data: Any) -> None:
    """Create the variables of a model, its metrics and its optimizer for a batch."""
    model._symbolic_build(data_batch=data)


def compiled_loss(model: Any) -> Any:
    """Return a model's compiled loss itself, and no copy, or None."""
    return vars(model).get("_compile_loss")


def loss_tracker(model: Any) -> Any:
    """Return Keras's own metric for a model's loss, or None."""
    return vars(model).get("_loss_tracker")


def unpickling(model_class: Any) -> Callable[..., Any]:
    """Return the function that reads pickled models of a class."""
    return model_class._unpickle_model  # type: ignore[no-any-return]


def strategy_of_model(model: Any) -> Any:
    """Return the strategy in whose scope a model was made, or None."""
    return model._distribute_strategy


def strategy_of_optimizer(optimizer: Any) -> Any:
    """Return the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def variables_to_train(optimizer: Any) -> Any:
    """Return the variables that an optimizer was built for."""
    # Up to Keras 3.11 a LossScaleOptimizer does not know them, but the one inside it does.
    return getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables


def num_updates(optimizer: Any) -> Any:
    """Return the number of updates that an optimizer has made."""
    # Up to Keras 3.8 a LossScaleOptimizer does not count, but the one inside it does.
    return getattr(optimizer, "inner_optimizer", optimizer).iterations


def counter_of(optimizer: Any) -> Any:
    """Return the variable that counts how often an optimizer was applied, also without update."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return optimizer._iterations if hasattr(optimizer, "_iterations") else optimizer.iterations


def overwrites(variable: Any) -> bool:
    """Return whether an optimizer replaces a variable by its gradient."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def metrics_exchange() -> bool:
    """Return whether replicas communicate when a metric is updated, which a loop cannot contain."""
    # They do up to Keras 3.9. Since then they communicate when it is read.
    return "synchronization" not in inspect.signature(keras.Variable.__init__).parameters


# Losses.


def arguments_of_loss(loss: Any) -> dict[str, Any]:
    """Return the arguments with which one of Keras's losses or metrics calls its function."""
    return getattr(loss, "_fn_kwargs", {})


def is_along_samples(loss: Any) -> bool:
    """Return whether one of Keras's losses or metrics is made to compute along axis 0."""
    if isinstance(loss, keras.metrics.FBetaScore):  # its axis is one that it sums along
        return False
    axis = arguments_of_loss(loss).get("axis", getattr(loss, "axis", None))
    return 0 in (axis if isinstance(axis, (list, tuple)) else [axis])


def losses_in(compiled: Any) -> list[Any]:
    """Return the losses in a compiled loss that is built, named tuples with a field `loss`."""
    return list(compiled._flat_losses)


def set_losses(compiled: Any, losses: list[Any]) -> None:
    """Replace the losses of a compiled loss."""
    vars(compiled)["_flat_losses"] = losses


# Returns a mask and sample weights with the same rank, where one of them has an axis of length 1.
same_rank: Callable[[Any, Any], tuple[Any, Any]] = squeeze_or_expand_to_same_rank

# Divide a loss by the number of replicas as Keras does, and undo it.
scaled_for_replicas: Callable[[Any], Any] = scale_loss_for_distribution
unscaled_for_replicas: Callable[[Any], Any] = unscale_loss_for_distribution

# Variables, and scopes in which they have other values.

# Returns the innermost `keras.StatelessScope` that the code here runs in, or None.
stateless_scope: Callable[[], Any] = get_stateless_scope


def raw(variable: Any) -> Any:
    """Return the backend's variable inside a variable of Keras; others are returned as they are."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def losses_of_scope(scope: Any) -> list[Any]:
    """Return the losses that layers added in a `keras.StatelessScope`, in their order."""
    added, found = list(scope.losses), []  # an added list of n losses n times, up to Keras 3.9
    while added:
        losses = added[0] if isinstance(added[0], list) else added[:1]
        found += losses
        del added[: len(losses)]
    return found


def adder_of(loss: Any, layer: Any) -> Any:
    """Return the layer, this one or one in it, that added a loss in a stateless scope.

    None for the loss of a weight regularizer.
    """
    return next((part for part in layers_in(layer) if id(loss) in part._loss_ids), None)


def scope_of(variables: Iterable[Any], values: Iterable[Any]) -> Any:
    """Return a `keras.StatelessScope` in which variables have values, which are not autocast."""
    scope = keras.StatelessScope(collect_losses=True)
    scope.state_mapping.update((id(variable), v) for variable, v in zip(variables, values))
    return scope


def value_in(scope: Any, variable: Any) -> Any:
    """Return the value of a variable in a scope, if any, or else its own; it is not autocast."""
    value = None if scope is None else scope.get_current_value(variable)
    if value is not None:
        return value
    with AutocastScope(None):
        value = variable.value
    return value.read_value() if hasattr(value, "read_value") else value  # of TensorFlow's


def copy_of(variable: Any) -> Any:
    """Return a copy of the value of a variable in the present scope; it is not autocast."""
    return keras.ops.copy(value_in(stateless_scope(), variable))


def is_symbolic() -> bool:
    """Return whether Keras is inferring shapes."""
    return bool(in_symbolic_scope())


# Tensors. Keras keeps an output's mask, or None, in an attribute, where its losses find it.
mask_of: Callable[[Any], Any] = get_keras_mask
set_mask: Callable[[Any, Any], None] = set_keras_mask


def logits_of(tensor: Any) -> Any:
    """Return the logits of a tensor that a softmax or sigmoid returned, or None."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Set the logits of a tensor."""
    tensor._keras_logits = logits


# Errors.


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, or a line to its message up to Python 3.10, which has no notes."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif hasattr(error, "_message"):  # of TensorFlow's
        error._message = f"{error._message}\n{text}"
    else:
        error.args = (f"{error}\n{text}",)

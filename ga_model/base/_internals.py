"""Private names of Keras, each behind a function that says what it is for.

If a release renames one, only this module breaks, or that of the backend: `_internals_tf`,
`_internals_torch` or `_internals_jax`. Checked with Keras 3.8.0 to 3.15.1, TensorFlow 2.18 to 2.21,
PyTorch 2.13 and JAX 0.6 to 0.12. `tests/base/test_internals.py` finds private names elsewhere.

Differences between releases are handled here, too, in one function each, which names the last
release with the old behavior.

These names are used only where they are overridden, in `backends/hooks.py` and the engines:

* `Trainer._compile_loss` becomes a property of the model class, which returns a copy while a step
  is recorded. `tests/equivalence/test_weights.py`.
* `Trainer._aggregate_additional_loss` is the one place where Keras sums the losses that layers add.
  `tests/equivalence/test_weights.py`.
* `Trainer._maybe_symbolic_build` and `Trainer._make_function` run before and after a step on
  several replicas. `tests/replicas`.
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

from ga_model.base._types import Nest, Scalar, Tensor

# The name of the `global_seed` in Keras; only newer releases have a constant for it.
_GLOBAL_SEED = "global_seed_generator"

# Layers.


def layers_in(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer and those in it, at any depth. A layer precedes its sublayers."""
    return list(layer._flatten_layers())


def operations_in(
    layer: keras.Layer,
) -> list[tuple[keras.Operation, tuple[Any, ...], dict[str, Any]]]:
    """Return the non-layer operations of a functional model, with symbolic args and kwargs."""
    operations = [o for o in getattr(layer, "operations", []) if not isinstance(o, keras.Layer)]
    nodes = [(operation, operation._inbound_nodes[0].arguments) for operation in operations]
    return [(operation, node.args, node.kwargs) for operation, node in nodes]


def takes_training(layer: keras.Layer) -> bool:
    """Return whether a layer's `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def training_of_call(layer: keras.Layer) -> Scalar | None:
    """Return the `training` argument of the current call, or None if it is unknown."""
    context = layer._get_call_context()
    if hasattr(context, "get_value"):
        return context.get_value("training")
    return context.training  # up to Keras 3.9


def saved_call_scopes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function whose contexts restore the scopes of the current layer call."""
    names = ("current_call_ctx", "autocast_scope")
    saved = [(name, global_state.get_global_attribute(name)) for name in names]

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        outer = [(name, global_state.get_global_attribute(name)) for name in names]
        for name, value in saved:
            global_state.set_global_attribute(name, value)
        try:
            yield
        finally:
            for name, value in outer:
                global_state.set_global_attribute(name, value)

    return restored


def is_rematerialized(layer: keras.Layer) -> bool:
    """Return whether a `keras.RematScope` makes a layer recompute its activations."""
    scope = getattr(layer, "_remat_mode", None)  # missing up to Keras 3.8
    if scope is None or scope.mode is None:
        return False
    return scope.mode != "list_of_layers" or layer.name in (scope.layer_names or ())


def is_built(
    layer: keras.Layer,
    others: Iterable[keras.Metric | keras.optimizers.Optimizer | keras.losses.Loss] = (),
) -> bool:
    """Return whether a layer, its sublayers, and other metrics, optimizers or losses are built."""
    states = [*layers_in(layer), *others]  # some metrics have only `_built`
    return all(getattr(s, "built", True) and getattr(s, "_built", True) for s in states)


def layer_state(layer: keras.Layer) -> list[keras.Variable]:
    """Return the non-trainable variables of a layer, without those of sublayers."""
    if (states := vars(layer).get("states")) is None:
        return list(layer._non_trainable_variables)
    # Keras does not track the states of a stateful recurrent layer.
    untracked = [state for state in keras.tree.flatten(states) if hasattr(state, "assign")]
    return [*layer._non_trainable_variables, *untracked]


def read_in_float16(layer: keras.Layer) -> list[keras.Variable]:
    """Return the trainable variables of a layer, not of sublayers, that it reads in float16."""
    is_half = layer.autocast and layer.compute_dtype == "float16" != layer.variable_dtype
    return [v for v in layer._trainable_variables if v._autocast] if is_half else []


@contextlib.contextmanager
def forgetting_losses(model: keras.Model) -> Iterator[None]:
    """If a step fails in the block, remove the layers' losses that Keras stored in the model."""
    try:
        yield
    except BaseException:
        if hasattr(model, "_losses_override"):  # set by stateless calls
            vars(model)["_losses_override"] = []
        raise


def seeds(layer: keras.Layer) -> list[keras.Variable]:
    """Return the state variables of a layer's own `keras.random.SeedGenerator` objects."""
    return [generator.state for generator in layer._seed_generators]


def seed_ids(layer: keras.Layer) -> set[int]:
    """Return the ids of the seed variables of a layer and its sublayers."""
    return {id(state) for part in layers_in(layer) for state in seeds(part)}


def unwrapped(value: Any) -> Any:
    """Return the dict or list inside TensorFlow's tracking wrapper, or the value itself."""
    if not type(value).__module__.startswith("tensorflow."):
        return value
    for name in ("__wrapped__", "_storage"):
        if isinstance(value, (dict, list)):
            value = getattr(value, name, value)
    return value


def global_seed() -> keras.random.SeedGenerator | None:
    """Return Keras's global `SeedGenerator`, or None if no operation has needed it yet."""
    return global_state.get_global_attribute(_GLOBAL_SEED)


def set_global_seed(generator: keras.random.SeedGenerator | None) -> None:
    """Set Keras's global `SeedGenerator`, used by random operations without a seed."""
    global_state.set_global_attribute(_GLOBAL_SEED, generator)


# The method of BatchNormalization that computes mean and variance of `inputs` with a `mask`.
MOMENTS = "_moments"


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Return the axes that a BatchNormalization layer averages over."""
    return list(layer._reduction_axes)


def move_renormalization(
    layer: keras.layers.BatchNormalization, mean: Tensor, variance: Tensor
) -> None:
    """Update all running averages of a BatchNormalization layer with `renorm=True`."""
    layer._update_renorm_statistics(mean, variance)


# Models and optimizers.


def build(model: keras.Model, data: Nest) -> None:
    """Create the variables of a model, its metrics and its optimizer for a batch."""
    model._symbolic_build(data_batch=data)


def compiled_loss(model: keras.Model) -> keras.losses.Loss | None:
    """Return a model's compiled loss, never the copy of a recorded step, or None."""
    return vars(model).get("_compile_loss")


def loss_tracker(model: keras.Model) -> keras.Metric | None:
    """Return Keras's metric for the loss of a model, or None."""
    return vars(model).get("_loss_tracker")


def unpickling(model_class: type[keras.Model]) -> Callable[..., keras.Model]:
    """Return the function that unpickles models of a class."""
    return model_class._unpickle_model  # type: ignore[no-any-return]


def strategy_of_model(model: keras.Model) -> Any:
    """Return the strategy in whose scope a model was created, or None."""
    return model._distribute_strategy


def strategy_of_optimizer(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def variables_to_train(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for."""
    # Up to Keras 3.11 a LossScaleOptimizer does not know them, but its inner optimizer does.
    return getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables  # type: ignore[no-any-return]


def num_updates(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the number of updates that an optimizer has made."""
    # Up to Keras 3.8 a LossScaleOptimizer does not count, but its inner optimizer does.
    return getattr(optimizer, "inner_optimizer", optimizer).iterations


def iterations_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the variable that counts the calls of `apply`, also those without an update."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return optimizer._iterations if hasattr(optimizer, "_iterations") else optimizer.iterations


def overwrites(variable: keras.Variable) -> bool:
    """Return whether optimizers replace a variable by its gradient, as for float8 scales."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def metrics_exchange() -> bool:
    """Return whether updating a metric makes replicas communicate, which a loop cannot contain."""
    # Up to Keras 3.9. Since then, reading a metric does.
    return "synchronization" not in inspect.signature(keras.Variable.__init__).parameters


# Losses.


def arguments_of_loss(loss: keras.losses.Loss | keras.Metric) -> dict[str, Any]:
    """Return the keyword arguments that a loss or metric of Keras passes to its function."""
    return getattr(loss, "_fn_kwargs", {})


def is_along_samples(loss: keras.losses.Loss | keras.Metric) -> bool:
    """Return whether a loss or metric of Keras is configured to compute along axis 0."""
    if isinstance(loss, keras.metrics.FBetaScore):  # whose `axis` is one it sums over
        return False
    axis = arguments_of_loss(loss).get("axis", getattr(loss, "axis", None))
    return 0 in (axis if isinstance(axis, (list, tuple)) else [axis])


def losses_in(compiled: keras.losses.Loss) -> list[Any]:
    """Return the losses of a built compiled loss: named tuples with a field `loss`."""
    return list(compiled._flat_losses)


def set_losses(compiled: keras.losses.Loss, losses: list[Any]) -> None:
    """Replace the losses of a compiled loss."""
    vars(compiled)["_flat_losses"] = losses


# Return a mask and sample weights with equal rank, if one of them has an extra axis of length 1.
same_rank: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = squeeze_or_expand_to_same_rank

# Divide a loss by the number of replicas as Keras does, and undo it.
scale_for_replicas: Callable[[Tensor], Tensor] = scale_loss_for_distribution
unscale_for_replicas: Callable[[Tensor], Tensor] = unscale_loss_for_distribution

# Variables, and scopes in which they have other values.

# Return the innermost `keras.StatelessScope` of the running code, or None.
stateless_scope: Callable[[], keras.StatelessScope] = get_stateless_scope

# Return whether Keras is inferring shapes.
is_symbolic: Callable[[], bool] = in_symbolic_scope


def raw(variable: keras.Variable | Tensor) -> Tensor:
    """Return the backend's variable inside a Keras variable, or the variable itself."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def losses_of_scope(scope: keras.StatelessScope) -> list[Tensor]:
    """Return the losses that layers added in a `keras.StatelessScope`, in order."""
    # Up to Keras 3.9, an added list of n losses is in it n times.
    added, losses = list(scope.losses), []
    while added:
        group = added[0] if isinstance(added[0], list) else added[:1]
        losses += group
        del added[: len(group)]
    return losses


def layer_of_loss(loss: Tensor, layer: keras.Layer) -> keras.Layer | None:
    """Return the layer or sublayer that added a loss in a stateless scope.

    None if the loss is that of a weight regularizer.
    """
    return next((part for part in layers_in(layer) if id(loss) in part._loss_ids), None)


def stateless_scope_with(
    variables: Iterable[keras.Variable], values: Iterable[Tensor]
) -> keras.StatelessScope:
    """Return a `keras.StatelessScope` in which variables have the values, without autocast."""
    scope = keras.StatelessScope(collect_losses=True)
    scope.state_mapping.update((id(variable), v) for variable, v in zip(variables, values))
    return scope


def value_in(scope: keras.StatelessScope | None, variable: keras.Variable) -> Tensor:
    """Return the value of a variable in a scope, or else its own, without autocast."""
    value = None if scope is None else scope.get_current_value(variable)
    if value is not None:
        return value
    with AutocastScope(None):
        value = variable.value
    return value.read_value() if hasattr(value, "read_value") else value  # a `tf.Variable`


def copy_of(variable: keras.Variable) -> Tensor:
    """Return a copy of the value of a variable in the current scope, without autocast."""
    return keras.ops.copy(value_in(stateless_scope(), variable))


# Tensors. Keras stores the mask of an output, or None, in an attribute, where its losses read it.
mask_of: Callable[[Tensor], Tensor | None] = get_keras_mask
set_mask: Callable[[Tensor, Tensor | None], None] = set_keras_mask


def logits_of(tensor: Tensor) -> Tensor | None:
    """Return the logits that Keras stored on the result of a softmax or sigmoid, or None."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Tensor, logits: Tensor) -> None:
    """Store logits on a tensor, for Keras's losses."""
    tensor._keras_logits = logits


# Errors.


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error. On Python 3.10, which has no notes, add a line to its message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif hasattr(error, "_message"):  # an error of TensorFlow
        error._message = f"{error._message}\n{text}"
    else:
        error.args = (f"{error}\n{text}",)

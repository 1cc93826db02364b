"""Record the scalars that code divides by while it is traced or runs, and choose its random
numbers. Unknown operations run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from ga_model.base._context import is_package_code
from ga_model.base._internals_tf import observing_operations
from ga_model.base._types import Nest, Scalar
from ga_model.core.proof.noted import Draws, Noted

# Indices of the inputs that operations divide by, or bound a divisor with: `x / maximum(n, 1)`.
_DIVIDING: dict[str, Sequence[int]] = {
    **dict.fromkeys(("RealDiv", "DivNoNan", "Div", "Xdivy"), (1,)),
    **dict.fromkeys(("Reciprocal", "Inv", "Pow", "ClipByValue"), (0,)),
    **dict.fromkeys(("Maximum", "Minimum"), (0, 1)),
    **dict.fromkeys(("SelectV2", "Select"), (1, 2)),
}
_BOUNDING = {"Maximum", "Minimum", "ClipByValue", "SelectV2", "Select", "Relu"}
_DECIDING = {"SelectV2", "Select", "If", "StatelessIf"}
_OF_SHAPES = {"Shape", "ShapeN", "Size"}  # operations that use only the shape of their input
# Operations that draw each entry of their result, stateful or stateless, in any version.
_DRAWING: dict[str, Callable[..., tf.Tensor]] = {
    "RandomStandardNormal": tf.random.stateless_normal,
    "RandomNormal": tf.random.stateless_normal,
    "RandomUniform": tf.random.stateless_uniform,
    "RandomUniformInt": tf.random.stateless_uniform,
    "TruncatedNormal": tf.random.stateless_truncated_normal,
}


class Noting(Noted):
    """Sees the operations of a function in a callback, and records scalars."""

    def __init__(self, draws: Draws | None) -> None:
        super().__init__(draws)
        # Graph tensors that follow from shapes, by id.
        self._of_shapes: dict[int, tf.Tensor] = {}

    def run(self, function: Callable[..., Nest], arguments: tuple[Nest, ...]) -> Nest:
        with observing_operations(self._see):
            return function(*arguments)

    def _see(
        self, name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor] | None:
        """Record scalars of an operation. Return outputs to replace its own, or None."""
        if self._draws is not None and (drawn := self._drawn(name, inputs, outputs)) is not None:
            return [drawn]
        if name in _OF_SHAPES or (inputs and all(map(self._follows_from_shapes, inputs))):
            self._of_shapes |= {id(output): output for output in outputs}
        for value in () if is_package_code.get() else _scalars_of(name, inputs, outputs):
            is_count = name == "Maximum" and value.dtype.is_integer
            if value.shape.rank == 0 and (
                value.dtype.is_floating or value.dtype.is_bool or is_count
            ):
                self.note(name, tf.cast(value, tf.float64), self._follows_from_shapes(value))
        return None

    def _follows_from_shapes(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor of a graph is a constant, or computed from shapes alone."""
        is_constant = tf.is_symbolic_tensor(tensor) and tensor.op.type == "Const"
        return is_constant or id(tensor) in self._of_shapes

    def _drawn(
        self, name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> tf.Tensor | None:
        """Return the random numbers of a trial, for a sample the same in all parts; or None."""
        name = name.removeprefix("Stateless").removesuffix("V2")
        if name in ("RandomShuffle", "Shuffle"):
            return tf.roll(inputs[0], 1, 0)
        if name == "Multinomial":
            likeliest = tf.argmax(inputs[0], -1, outputs[0].dtype)
            return tf.broadcast_to(likeliest[:, None], tf.shape(outputs[0]))
        if name not in _DRAWING or self._draws is None:
            return None
        output, draws, seed = outputs[0], self._draws, self._draws.next_seed()
        shape = output.shape
        is_any = shape.rank and shape[0] is None  # in a graph for any number of samples
        if shape.rank and (is_any or draws.kind_of(tuple(shape)) != "by batch"):
            sizes = tf.shape(output)
            every_shape = tf.concat([[draws.total], sizes[1:]], 0)
            every = _draw(name, every_shape, output.dtype, [seed, 0], inputs)
            is_by_sample, places = sizes[0] == draws.rows, tf.range(sizes[0])
            return tf.gather(every, tf.where(is_by_sample, draws.begin + places, 0))
        return _draw(name, tf.shape(output), output.dtype, [seed, 1 + draws.run], inputs)


def _draw(
    name: str, shape: tf.Tensor, dtype: tf.DType, seed: list[Scalar], inputs: Sequence[tf.Tensor]
) -> tf.Tensor:
    limits = [value for value in inputs if value.dtype == dtype][-2:] if "Int" in name else []
    return _DRAWING[name](shape, seed, *limits, dtype=dtype)


def _scalars_of(
    name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
) -> Iterator[tf.Tensor]:
    if name in _DECIDING:
        yield inputs[0]
    for place in _DIVIDING.get(name, ()):
        yield inputs[place]
    if name in _BOUNDING:
        yield outputs[0]

"""What is told of the custom gradients of a step."""

from __future__ import annotations

from typing import Any

from ga_model.hearing import _messages
from ga_model.reading._custom_gradients import not_additive
from ga_model.reading._place import place_of


def messages_of_custom_gradients(graph: Any, model: str) -> list[str]:
    """Return what to tell of those in a graph that are not known to add up, one message or none."""
    op = not_additive(graph)
    if op is None:
        return []
    return [_messages.own_gradient_message(model, f"a `tf.custom_gradient`, {place_of(op)}")]

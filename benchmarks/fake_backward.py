"""The backward pass of tensors without data, in Python: torch's engine asks CUDA for a context.

A gradient reaches the same nodes in the same order as in the engine, with the same additions.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

OF_A_NODE = ("_input_metadata", "_sequence_nr")  # names that torch does not promise
Gradients = Sequence[Tensor | None]


class Hooks:
    """The hooks of tensors, by node and number of its output; counts passes."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.of = defaultdict[tuple[Any, int], list[Any]](list)

    def register(self, tensor: Tensor, hook: Any) -> None:
        self.of[tensor.grad_fn, tensor.output_nr].append(hook)

    def call(self, node: Any, number: int, grad: Tensor | None) -> Tensor | None:
        for hook in self.of.get((node, number), ()) if grad is not None else ():
            grad = hook(grad)
        return grad

    def backward(self, output: Tensor) -> None:
        """Do what `Tensor.backward` does."""
        Backward(output, torch.ones_like(output), self).run()

    def grad(self, output: Tensor, leaf: Tensor, grad: Tensor) -> tuple[Tensor | None]:
        """Do what `torch.autograd.grad` does for a leaf."""
        backward = Backward(output, grad, self, leaf=leaf)
        backward.run()
        return (backward.found,)


class Backward:
    """One pass, which adds gradients to `.grad` of the leaves, or finds that of one leaf."""

    def __init__(
        self, output: Any, grad: Tensor, hooks: Hooks, *, leaf: Tensor | None = None
    ) -> None:
        hooks.num_passes += 1
        self.hooks, self.leaf, self.found = hooks, leaf, None
        self.waiting = edges_behind(output.grad_fn)  # node -> gradients that are still to come
        self.held = defaultdict[Any, dict[int, Tensor]](dict)
        self.order, self.ready = itertools.count(), list[Any]()
        self.held[output.grad_fn][output.output_nr] = grad
        self.queue(output.grad_fn)

    @torch.no_grad()
    def run(self) -> None:
        while self.ready:
            node = heapq.heappop(self.ready)[2]
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            results = self.results_of(node) or [None] * len(edges)
            for (following, number), grad in zip(edges, results):
                self.add(following, number, grad)
                self.waiting[following] -= 1
                if not self.waiting[following]:
                    self.queue(following)

    def queue(self, node: Any) -> None:
        """Queue leaves first, then the node that was made last."""
        rank = -math.inf if is_leaf(node) else -node._sequence_nr()
        heapq.heappush(self.ready, (rank, next(self.order), node))

    def add(self, node: Any, number: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        expected = node._input_metadata[number]
        if grad.shape != expected.shape:
            grad = grad.sum_to_size(tuple(expected.shape))
        grad, held = grad.to(expected.dtype), self.held[node]
        held[number] = held[number] + grad if number in held else grad

    def results_of(self, node: Any) -> Gradients:
        """Return a node's gradients of the inputs that need one; none of a leaf."""
        got = self.held.pop(node, {})
        numbers = range(len(node._input_metadata))
        grads = [self.hooks.call(node, number, got.get(number)) for number in numbers]
        if all(grad is None for grad in grads):
            return []
        if not is_leaf(node):
            return results_in_python(node, grads) if is_python(node) else results(node, grads)
        if self.leaf is None:
            accumulate(node.variable, grads[0])
        elif self.leaf is node.variable:
            self.found = grads[0]
        return []


def edges_behind(node: Any) -> Counter[Any]:
    """Return the number of edges into every node behind this one."""
    count, stack, seen = Counter[Any](), [node], set[Any]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            after = [following for following, _ in node.next_functions if following is not None]
            count.update(after)
            stack += after
    return count


def is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def is_python(node: Any) -> bool:
    return hasattr(node, "_forward_cls")


def results(node: Any, grads: Gradients) -> Gradients:
    found = node(*grads)
    found = found if isinstance(found, tuple) else (found,)
    return [grad for grad, (following, _) in zip(found, node.next_functions) if following]


def results_in_python(node: Any, grads: Gradients) -> Gradients:
    """Return those of an `autograd.Function`, which may have None for inputs of any type."""
    if getattr(node, "fills_grads", True):
        device = next(grad.device for grad in grads if grad is not None)
        pairs = zip(grads, node._input_metadata)
        grads = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=device) if grad is None else grad
            for grad, meta in pairs
        ]
    found = node.apply(*grads)
    found = found if isinstance(found, tuple) else (found,)
    return [grad for grad, is_needed in zip(found, node.needs_input_grad) if is_needed]


def set_materialize_grads(node: Any, value: bool) -> None:
    """Note for `results_in_python` what torch does not let read."""
    node.fills_grads = value


def accumulate(leaf: Any, grad: Any) -> None:
    """Add to `.grad`; the first gradient is taken as it is if its layout is the leaf's."""
    if leaf.grad is not None:
        leaf.grad.add_(grad)
    elif grad.stride() == leaf.stride():
        leaf.grad = grad
    else:
        leaf.grad = torch.empty_like(leaf).copy_(grad)

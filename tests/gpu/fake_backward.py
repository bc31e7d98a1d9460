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
        output = (tensor.grad_fn, tensor.output_nr)
        self.of[output].append(hook)

    def call(self, node: Any, number: int, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        for hook in self.of.get((node, number), ()):
            grad = hook(grad)
        return grad

    def backward(self, output: Tensor) -> None:
        """Do what `Tensor.backward` does."""
        ones = torch.ones_like(output)
        Backward(output, ones, self).run()

    def grad(
        self,
        output: Tensor,
        leaf: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor | None]:
        """Do what `torch.autograd.grad` does for a leaf."""
        backward = Backward(output, grad, self, leaf=leaf)
        backward.run()
        return (backward.leaf_grad,)


class Backward:
    """One pass, which adds gradients to `.grad` of the leaves, or finds that of one leaf."""

    def __init__(
        self,
        output: Any,
        grad: Tensor,
        hooks: Hooks,
        *,
        leaf: Tensor | None = None,
    ) -> None:
        hooks.num_passes += 1
        self.hooks = hooks
        self.leaf = leaf
        self.leaf_grad: Tensor | None = None
        # Node -> number of gradients that are still to come.
        self.num_awaited = edges_behind(output.grad_fn)
        # Node -> number of its output -> the sum of gradients so far.
        self.sums = defaultdict[Any, dict[int, Tensor]](dict)
        self.order = itertools.count()
        self.ready = list[Any]()
        sums_of_output = self.sums[output.grad_fn]
        sums_of_output[output.output_nr] = grad
        self.queue(output.grad_fn)

    @torch.no_grad()
    def run(self) -> None:
        while self.ready:
            _, _, node = heapq.heappop(self.ready)
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            results = self.results_of(node) or [None] * len(edges)
            for (following, number), grad in zip(edges, results):
                self.add(following, number, grad)
                self.num_awaited[following] -= 1
                if not self.num_awaited[following]:
                    self.queue(following)

    def queue(self, node: Any) -> None:
        """Queue leaves first, then the node that was made last."""
        rank = -math.inf if is_leaf(node) else -node._sequence_nr()
        # The counter keeps the order of arrival among equal ranks; nodes have no order.
        entry = (rank, next(self.order), node)
        heapq.heappush(self.ready, entry)

    def add(self, node: Any, number: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        expected = node._input_metadata[number]
        if grad.shape != expected.shape:
            grad = grad.sum_to_size(tuple(expected.shape))
        grad = grad.to(expected.dtype)
        sums = self.sums[node]
        if number in sums:
            grad = sums[number] + grad
        sums[number] = grad

    def results_of(self, node: Any) -> Gradients:
        """Return a node's gradients of the inputs that need one; none of a leaf."""
        sums = self.sums.pop(node, {})
        grads = []
        for number in range(len(node._input_metadata)):
            grad = sums.get(number)
            grads.append(self.hooks.call(node, number, grad))
        if all(grad is None for grad in grads):
            return []
        if is_python(node):
            return results_in_python(node, grads)
        if not is_leaf(node):
            return results(node, grads)
        if self.leaf is None:
            accumulate(node.variable, grads[0])
        elif self.leaf is node.variable:
            self.leaf_grad = grads[0]
        return []


def edges_behind(node: Any) -> Counter[Any]:
    """Return the number of edges into every node behind this one."""
    count = Counter[Any]()
    stack = [node]
    seen = set[Any]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                if following is not None:
                    count[following] += 1
                    stack.append(following)
    return count


def is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def is_python(node: Any) -> bool:
    return hasattr(node, "_forward_cls")


def results(node: Any, grads: Gradients) -> Gradients:
    results = as_tuple(node(*grads))
    needed_results = []
    for grad, (following, _) in zip(results, node.next_functions):
        if following:
            needed_results.append(grad)
    return needed_results


def results_in_python(node: Any, grads: Gradients) -> Gradients:
    """Return those of an `autograd.Function`, which may have None for inputs of any type."""
    if getattr(node, "fills_grads", True):
        device = next(grad.device for grad in grads if grad is not None)
        filled = []
        for grad, meta in zip(grads, node._input_metadata):
            if grad is None:
                grad = torch.zeros(
                    meta.shape,
                    dtype=meta.dtype,
                    device=device,
                )
            filled.append(grad)
        grads = filled
    results = as_tuple(node.apply(*grads))
    needed_results = []
    for grad, needed in zip(results, node.needs_input_grad):
        if needed:
            needed_results.append(grad)
    return needed_results


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
        copied = torch.empty_like(leaf)
        leaf.grad = copied.copy_(grad)

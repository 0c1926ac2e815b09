"""Whether autograd adds the gradients of a tensor in another order where a block that uses it runs as a graph.

Backward runs nodes from the newest to the oldest and adds a tensor's gradients in this order. A block that runs as a
graph is one node, which adds the gradients of the block's own uses first. If the block uses a tensor twice, and another
node uses it later, `(later + second) + first` becomes `later + (second + first)`. Earlier uses change no order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next node of autograd in this thread."""
MOST_CALLS = 10_000
"""Calls that are kept until a backward comes."""
MOST_SEEN = 1000
"""Structures of losses that are remembered."""
_OF_LEAVES = 2**64 - 1
"""The number of every node that stands for a leaf."""
_Place = tuple[int, int]
"""A tensor in the graph: the numbers of its node and of the node's output. A leaf: its identity and -1."""


_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Summed(NamedTuple):
    """The inputs of a block's node whose gradients are sums.

    Attributes:
        once: places among the node's inputs. The block alone uses what its node gets.
        handed_on: places of inputs that are outputs too, which later blocks use instead.
        first_output: the number of the first such output.
    """

    block: Any
    once: list[int]
    handed_on: list[int]
    first_output: int


class _Use(NamedTuple):
    block: Any
    place: _Place
    start: int
    end: int
    """The nodes of the call have numbers from `start` to `end`, which is excluded."""
    is_handed_on: bool
    is_graph: bool


class UseOrder:
    """The calls of blocks, and the tensors that eager ones used, until the first forward after a backward."""

    def __init__(self, summed: Callable[[Any], Summed | None]) -> None:
        """`summed(node)`: of a block that runs as a graph; None for other nodes."""
        self._summed = summed
        self._seen: set[Any] = set()
        self.clear()

    def clear(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._uses: list[_Use] = []
        self._num_between, self._had_backward = 0, False
        self._uses_between: list[tuple[int, ...]] = []

    def begin(self) -> None:
        """A forward begins."""
        if self._had_backward or len(self._ends) > MOST_CALLS:  # the latter in an evaluation with gradients
            self.clear()
        if not self._ends:
            self._num_between = -next_node()

    def ran(self, start: int, tensors: Iterable[torch.Tensor]) -> None:
        """A call with these tensors made the nodes from number `start` on."""
        end = next_node()
        for each in filter(_requires_grad, tensors if self._ends else ()):
            if each.grad_fn is not None and each.grad_fn._sequence_nr() >= self._ends[-1]:
                self._uses_between += self._older(each)
        self._num_between += start - (self._ends[-1] if self._ends else 0)
        self._starts.append(start)
        self._ends.append(end)

    def used(self, block: Any, tensors: Iterable[torch.Tensor], *, is_handed_on: bool) -> None:
        """The call that ran last used `tensors` eagerly. `is_handed_on`: a graph would hand them on."""
        for each in filter(_requires_grad, tensors):
            node: Any = each.grad_fn
            place = (id(each), -1) if node is None else (node._sequence_nr(), each.output_nr)
            self._uses.append(_Use(block, place, self._starts[-1], self._ends[-1], is_handed_on, is_graph=False))

    def waits_for(self, block: Any) -> bool:
        """Whether the backward of an eager call of `block` has not come."""
        return any(each.block is block for each in self._uses)

    def used_after(self, loss: torch.Tensor) -> dict[Any, bool]:
        """The blocks whose graphs change the order in the backward of `loss`, and whether they ran as graphs.

        Looks at the nodes that are newer than the last call. Looks at all nodes if a block ran eagerly that may run as
        a graph, or if the number of nodes between calls, or uses of older nodes, are new.
        """
        found, self._had_backward = {}, True
        if self._ends and loss.grad_fn is not None:
            uses = self._num_between, tuple(self._uses_between), frozenset(self._older(loss))
            if self._uses or uses not in self._seen:
                if len(self._seen) >= MOST_SEEN:
                    self._seen.clear()
                self._seen.add(uses)
                found = {each.block: each.is_graph for each in self._in_other_order(loss)}
        return found

    def _older(self, tensor: torch.Tensor) -> Iterator[tuple[int, ...]]:
        """The outputs of older nodes that are used by nodes newer than the last call, and the number of leaves."""
        ends, num_leaves = self._ends, 0
        for _, _, at, number in edges([tensor], ends[-1]):
            if at == _OF_LEAVES:
                num_leaves += 1
            elif at < ends[-1]:
                call = bisect_right(ends, at)
                yield call, at - ends[call], number
        yield (num_leaves,)

    def _in_other_order(self, loss: torch.Tensor) -> Iterator[_Use]:
        users, uses, graphs = defaultdict[_Place, list[int]](list), [*self._uses], set[int]()
        for node, following, at, number in edges([loss], self._starts[0]):
            user = node._sequence_nr()
            users[self._place(following, at, number)].append(user)
            if user not in graphs and (summed := self._summed(node)) is not None:
                graphs.add(user)
                for places, is_handed_on in ((summed.once, False), (summed.handed_on, True)):
                    for other, its_number in map(node.next_functions.__getitem__, places):
                        place = self._place(other, other._sequence_nr(), its_number)
                        uses.append(_Use(summed.block, place, user, user + 1, is_handed_on, is_graph=True))
        for use in uses:
            own = [each for each in users[use.place] if use.start <= each < use.end]
            later = [each for each in users[use.place] if each >= use.end]
            if use.is_handed_on:
                later = [each for each in later if not self._is_in_call(each)]
            if later and len(own) > (not (use.is_handed_on or use.is_graph)):
                yield use

    def _place(self, node: Any, at: int, number: int) -> _Place:
        """The place of this output, or of the tensor that it hands on."""
        while (summed := self._summed(node)) is not None and number >= summed.first_output:
            node, number = node.next_functions[summed.handed_on[number - summed.first_output]]
            at = node._sequence_nr()
        return (at, number) if at < _OF_LEAVES else (id(node.variable), -1)

    def _is_in_call(self, at: int) -> bool:
        call = bisect_right(self._ends, at)
        return call < len(self._ends) and self._starts[call] <= at


def edges(tensors: Iterable[torch.Tensor], oldest: int = 0) -> Iterator[tuple[Any, Any, int, int]]:
    """(node, the node that it gives a gradient, the latter's number, number of its output) in the graph of `tensors`,
    for all nodes from number `oldest` on.
    """
    waiting: list[Any] = [*dict.fromkeys(each.grad_fn for each in tensors if each.grad_fn is not None)]
    known = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, number in node.next_functions:
            if following is not None:
                at = following._sequence_nr()
                yield node, following, at, number
                if oldest <= at < _OF_LEAVES and following not in known:
                    known.add(following)
                    waiting.append(following)

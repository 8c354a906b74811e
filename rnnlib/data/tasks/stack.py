"""Several last-in-first-out stacks."""

import dataclasses
from typing import Annotated

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import PositiveInteger, Range

_PAD, _PUSH, _POP = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Pushes onto and pops from independent stacks (KLA paper, section 5.3; Kimi Linear, section 5.1).

    Each operation is three tokens: `PUSH stack element` or `POP stack element`; the element that a POP takes, the one
    most recently pushed onto that stack and not yet taken, is to be predicted at the stack's id. A push goes to any
    stack, a pop to any stack that is not empty, uniformly; the papers give 64 stacks and nothing more, so the number
    of elements and the share of pushes are our choice.

    Token ids: 0 padding, 1 PUSH, 2 POP, then the stacks' ids, then the elements.

    Attributes:
        sequence_length: T; the last one or two tokens are padding where 3 does not divide it.
        num_stacks: number of stacks.
        num_elements: number of elements.
        push_probability: of a push where a stack is not empty; the first operation always is one. Below 1, or nothing
            would be asked.
    """

    sequence_length: Annotated[int, Range(at_least=6)] = 256
    num_stacks: PositiveInteger = 64
    num_elements: PositiveInteger = 64
    push_probability: Annotated[float, Range(at_least=0, below=1)] = 0.5

    @property
    def vocabulary_size(self) -> int:
        """Padding, two operations, stacks and elements."""
        return 3 + self.num_stacks + self.num_elements

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the operations one by one."""
        operations = self.sequence_length // 3
        pushes = rng.random(operations) < self.push_probability
        choices = rng.random(operations)
        elements = rng.integers(self.num_elements, size=operations) + 3 + self.num_stacks
        stacks: dict[int, list[int]] = {}
        filled: list[int] = []  # ids of the stacks that are not empty
        text = np.full((operations, 3), _PAD, np.int32)
        popped = np.zeros(operations, bool)
        for i in range(operations):
            if pushes[i] or not filled:
                stack = int(choices[i] * self.num_stacks)
                element = int(elements[i])
                pile = stacks.setdefault(stack, [])
                if not pile:
                    filled.append(stack)
                pile.append(element)
            else:
                position = int(choices[i] * len(filled))
                stack = filled[position]
                element = stacks[stack].pop()
                if not stacks[stack]:
                    filled[position] = filled[-1]
                    filled.pop()
                popped[i] = True
            text[i] = _POP if popped[i] else _PUSH, 3 + stack, element
        inputs = text.ravel()
        targets = np.append(inputs[1:], _PAD)
        query_ids = np.zeros((operations, 3), np.int32)
        query_ids[popped, 1] = np.arange(1, popped.sum() + 1)
        return self._finish(inputs, targets, query_ids.ravel())

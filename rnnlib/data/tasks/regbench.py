"""In-context learning of random regular languages."""

import dataclasses
import hashlib
from typing import Annotated

import numpy as np

from rnnlib.data.tasks.base import Example, Task, TaskSplit
from rnnlib.fields import PositiveInteger, Range

# Where one in 2000 belongs to the split (held_out_fraction=0.001) none does in so many with probability 1e-11.
_MOST_DRAWS = 50_000


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A probabilistic finite automaton: state 0 begins, all states accept, outgoing symbols are equally likely.

    Attributes:
        transitions: for each state, its symbols and the states they lead to.
    """

    transitions: tuple[dict[int, int], ...]

    def sample(self, rng: np.random.Generator, length: int) -> list[int]:
        """A random string of `length` symbols."""
        choices = [list(edges.items()) for edges in self.transitions]
        state, string = 0, []
        for draw in rng.random(length).tolist():
            edges = choices[state]
            symbol, state = edges[int(draw * len(edges))]
            string.append(symbol)
        return string

    def canonical(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The minimal automaton with states numbered in the order of first reaching them; equal for equal languages."""
        blocks = [0] * len(self.transitions)
        while True:  # Moore's refinement: states stay together while their edges lead to the same blocks
            edges = [tuple(sorted((symbol, blocks[to]) for symbol, to in e.items())) for e in self.transitions]
            numbers = {signature: i for i, signature in enumerate(dict.fromkeys(edges))}
            refined = [numbers[signature] for signature in edges]
            if len(numbers) == len(set(blocks)):
                break
            blocks = refined
        members = {block: state for state, block in enumerate(blocks)}
        order = {blocks[0]: 0}
        queue = [blocks[0]]
        for block in queue:
            for _, to in sorted(self.transitions[members[block]].items()):
                if blocks[to] not in order:
                    order[blocks[to]] = len(order)
                    queue.append(blocks[to])
        return tuple(
            tuple((symbol, order[blocks[to]]) for symbol, to in sorted(self.transitions[members[block]].items()))
            for block in queue
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegBench(Task):
    """Strings of one random automaton, joined by separators; each example has its own (DeltaNet paper, section 4.1).

    RegBench is from Akyürek et al. 2024, "In-context language learning". The number of states, the alphabet, the edges
    of each state, their symbols (without replacement) and where they lead (without replacement, never to
    the state itself) are uniform. The next symbol is to be predicted, separators excepted; it is right when the
    automaton allows it (`allowed_targets`), which is that paper's accuracy. Their code draws its upper bounds
    exclusively (1 to 3 edges, 10 to 19 strings of 1 to 49 symbols); ours are inclusive.

    A language belongs to one split by a hash of its minimal automaton, so test languages never occur in training.

    Attributes:
        sequence_length: T; an example is cut there.
        num_symbols: symbols 0 ... num_symbols - 1; then come the separator and the padding.
        min_states: fewest states, at least 2.
        max_states: most states.
        min_alphabet: fewest symbols of a language; at least `max_edges`.
        max_edges: most edges of a state (and not more than there are other states).
        min_strings: fewest strings.
        max_strings: most strings.
        max_string_length: longest string; the shortest has one symbol.
        held_out_fraction: share of languages held out, half for validation and half for test.
    """

    sequence_length: Annotated[int, Range(at_least=2)] = 1024
    num_symbols: int = 18
    min_states: Annotated[int, Range(at_least=2)] = 4
    max_states: int = 12
    min_alphabet: int = 4
    max_edges: PositiveInteger = 4
    min_strings: PositiveInteger = 10
    max_strings: int = 20
    max_string_length: PositiveInteger = 50
    held_out_fraction: Annotated[float, Range(above=0, below=1)] = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (
            ("min_states", "max_states"),
            ("min_alphabet", "num_symbols"),
            ("min_strings", "max_strings"),
            ("max_edges", "min_alphabet"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} must not be above {high}={getattr(self, high)}")
        if self.max_strings == self.max_string_length == 1:
            raise ValueError("max_strings and max_string_length must not both be 1: one symbol has no next one")

    @property
    def vocabulary_size(self) -> int:
        """The symbols, the separator and the padding."""
        return self.num_symbols + 2

    @property
    def extra_arrays(self) -> tuple[str, ...]:
        """More than one symbol may be right."""
        return ("allowed_targets",)

    @property
    def separator(self) -> int:
        """The token between strings."""
        return self.num_symbols

    def split_of(self, automaton: Automaton) -> TaskSplit:
        """The split that an automaton's language belongs to."""
        digest = hashlib.blake2b(repr(automaton.canonical()).encode(), digest_size=8).digest()
        share = int.from_bytes(digest, "big") / 2**64
        if share >= self.held_out_fraction:
            return "train"
        return "validation" if share < self.held_out_fraction / 2 else "test"

    def automaton(self, rng: np.random.Generator, split: TaskSplit) -> Automaton:
        """Draws automata until one belongs to the split.

        Raises:
            ValueError: none of very many does.
        """
        for _ in range(_MOST_DRAWS):
            num_states = int(rng.integers(self.min_states, self.max_states + 1))
            alphabet = rng.choice(
                self.num_symbols, rng.integers(self.min_alphabet, self.num_symbols + 1), replace=False
            )
            transitions = []
            for state in range(num_states):
                edges = int(rng.integers(1, min(self.max_edges, num_states - 1) + 1))
                symbols = rng.choice(alphabet, edges, replace=False)
                states = rng.choice(num_states - 1, edges, replace=False)
                states += states >= state  # every state but this one
                transitions.append(dict(zip(symbols.tolist(), states.tolist())))
            automaton = Automaton(tuple(transitions))
            if self.split_of(automaton) == split:
                return automaton
        raise ValueError(
            f"none of {_MOST_DRAWS} automata that were drawn belongs to split {split!r}: expected another "
            f"held_out_fraction or more languages; got {self}"
        )

    def generate(self, rng: np.random.Generator, split: TaskSplit) -> Example:
        """Draws the automaton and its strings."""
        automaton = self.automaton(rng, split)
        text: list[int] = []
        for _ in range(rng.integers(self.min_strings, self.max_strings + 1)):
            text += automaton.sample(rng, int(rng.integers(1, self.max_string_length + 1)))
            text.append(self.separator)
        text = text[:-1][: self.sequence_length + 1]
        inputs, targets = np.array(text[:-1]), np.array(text[1:])
        state, states = 0, []
        for symbol in text[:-1]:
            state = 0 if symbol == self.separator else automaton.transitions[state][symbol]
            states.append(state)
        outgoing = np.zeros((len(automaton.transitions), self.vocabulary_size), bool)
        for state, edges in enumerate(automaton.transitions):
            outgoing[state, list(edges)] = True
        allowed = outgoing[states]
        asked = targets != self.separator
        padding = np.full(self.sequence_length, self.num_symbols + 1, np.int32)
        example = self._finish(inputs, targets, np.cumsum(asked) * asked, allowed_targets=allowed)
        example["inputs"] = np.where(example["segment_ids"] > 0, example["inputs"], padding).astype(np.int32)
        return example

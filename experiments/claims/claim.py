"""A claim and its parts."""

import dataclasses
from collections.abc import Callable

from experiments.harness.verdicts import Interval, Region, Verdict, combined


@dataclasses.dataclass(frozen=True)
class Part:
    """One comparison that a claim makes.

    Attributes:
        says: what the claim says of it.
        measure: our difference, from the tables; None while there are no results.
        region: where the claim puts it.
    """

    says: str
    measure: Callable[[], Interval | None]
    region: Region

    def verdict(self) -> Verdict:
        """By where our interval lies."""
        interval = self.measure()
        return Verdict.UNDECIDED if interval is None else self.region.judge(interval)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        title: its heading on the page.
        study: whose page it is on.
        source: paper and place.
        theirs: the paper's number.
        ours: ours, in short.
        parts: comparisons; none where there is nothing to compare with.
        untested: conditions of the paper that our runs did not have, which leave a claim partly right at most and
            undecided where no part agrees; "" where there are none.
    """

    title: str
    study: str
    source: str
    theirs: str
    ours: str
    parts: tuple[Part, ...] = ()
    untested: str = ""

    def verdict(self) -> Verdict:
        """New without parts; otherwise by its parts, and by what was not tested."""
        if not self.parts:
            return Verdict.NEW
        found = combined([part.verdict() for part in self.parts])
        if not self.untested:
            return found
        return Verdict.PARTLY if found in (Verdict.AGREES, Verdict.PARTLY) else Verdict.UNDECIDED

    @property
    def anchor(self) -> str:
        """Of its heading, as a link has it."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -")
        return kept.replace(" ", "-")

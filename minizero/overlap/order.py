"""The order in which units are needed, predicted from passes that were seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..zero.flat import Unit


class Order:
    """Predicts the order in which units are needed, one pass at a time.

    A pass is a forward or a backward. A forward is expected to be like the
    one before, at first in the order of the units. A backward is expected to
    be as it was after a forward like this one; if there was none, it is
    expected to be the reverse of this forward.

    `running`: "forward", "backward", or "" outside of both.
    `left`: the units in the order in which a forward leaves them.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self.running = ""
        self.left: list[Unit] = []
        self._expected: Sequence[Unit] = ()
        self._place = 0  # in `_expected`: everything before it is past
        self._seen: list[Unit] = []
        self._forward: Sequence[Unit] = units
        self._backward: tuple[list[Unit], list[Unit]] = ([], [])

    def begin(self, running: str) -> None:
        """A pass begins; predict its order."""
        self.end()
        left, followed = self._backward
        backward = followed if left == self.left else self.left[::-1]
        self.running = running
        self._expected = self._forward if running == "forward" else backward

    def end(self) -> None:
        """The pass has ended; remember the order in which it needed units."""
        if self.running == "forward":
            self._forward = self._seen
        elif self.running == "backward":
            self._backward, self.left = (self.left, self._seen), []
        self.running, self._expected, self._place, self._seen = "", (), 0, []

    def upcoming(self) -> list[Unit]:
        """The units that are expected from here on, next one first."""
        return list(self._expected[self._place :])

    def note(self, unit: Unit) -> list[Unit]:
        """Record that `unit` is needed now; returns the units left out.

        If the unit is expected later, the pass continues behind it. A unit
        that is not expected any more leaves the prediction as it is.
        """
        self._seen.append(unit)
        try:
            found = self._expected.index(unit, self._place)
        except ValueError:
            return []
        skipped = self._expected[self._place : found]
        self._place = found + 1
        return [u for u in skipped if u not in self._expected[self._place :]]

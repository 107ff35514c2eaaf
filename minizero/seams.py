"""What later chapters pass in: a precision, a schedule, a home."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minizero.flat import Flat, Unit

if TYPE_CHECKING:
    from minizero.ddp import DataParallel


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere."""

    def attach(self, flat: Flat) -> None:
        """Called once, when the buffer has been made."""

    def masters(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer updates, for each owned row."""
        return owned

    def gradients(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer gets as gradients, for each owned row."""
        return owned

    def written(self, flat: Flat) -> None:
        """Called after the optimizer has updated the masters of `flat`."""


class Schedule:
    """When a collective is launched and when it is waited for: here, at once."""

    def gather(self, net: DataParallel, unit: Unit) -> None:
        for work in net.gather(unit):
            work.wait()

    def release(self, net: DataParallel, unit: Unit) -> None:
        net.release(unit)

    def reduce(self, net: DataParallel, unit: Unit) -> None:
        for work in net.reduce(unit):
            work.wait()
        net.reduced(unit)

    def drain(self, net: DataParallel) -> None:
        """Wait for every reduction that is still under way."""


class Home:
    """Where shards rest between steps: here, where they are."""

    def rounds(self, units: list[Unit]) -> list[list[Unit]]:
        """The units that are updated together, round by round."""
        return [units]

    def fetch(self, units: list[Unit]) -> None:
        """Bring the optimizer's tensors of these units to where they are updated."""

    def store(self, units: list[Unit]) -> None:
        """Send them back."""

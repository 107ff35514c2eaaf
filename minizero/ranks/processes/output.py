"""What the ranks print, made ready for the parent to show."""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Iterable


class Printer:
    """Puts "[rank r] " before each line that a rank prints.

    After a carriage return a progress bar writes its line anew; so does the prefix.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._prefix = f"[rank {rank}] "
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._text = ""
        self._fresh = True  # the next character starts at the left edge
        self._blank = True  # nothing is written on the line yet

    def feed(self, data: bytes) -> None:
        """Takes what the rank has written, cut anywhere."""
        for piece in re.findall(r"[^\r\n]+|\r|\n", self._decode(data)):
            if piece == "\r":
                self._text += piece
                self._fresh = True
                continue
            # "\r\n" ends a line that has its prefix already.
            if self._fresh and (piece != "\n" or self._blank):
                self._text += self._prefix
            self._text += piece
            self._fresh = self._blank = piece == "\n"

    def end_line(self) -> None:
        """Ends a line that the rank has left open."""
        if not self._blank:
            self.feed(b"\n")

    def take(self) -> str:
        """The text that was not taken before."""
        text, self._text = self._text, ""
        return text


def in_order(printers: Iterable[Printer], at_work: Container[int]) -> str:
    """What can be shown now: text in rank order, up to the first rank still at work."""
    text = ""
    for each in printers:
        if each.rank in at_work:
            return text + each.take()
        each.end_line()
        text += each.take()
    return text

"""The course kit: exercises that can be assigned, checked and graded.

Read `exercise` (what one is), `reader` (`check` for a reader alone), `sandbox` (an
answer in a process of its own), `grade` (a class), `build` (what students are given).
The exercises themselves stand in `book/course/`, their statements in the chapters.
"""

from .exercise import Exercise, Wrong, always_fails
from .reader import check

__all__ = ["Exercise", "Wrong", "always_fails", "check"]

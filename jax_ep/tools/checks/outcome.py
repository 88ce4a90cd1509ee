"""What a check came to."""

import dataclasses
from typing import Literal

State = Literal["healthy", "problem", "not applicable"]

NO_CUDA = "no CUDA devices"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of the doctor's table.

    Attributes:
      subject: what was looked at; outcomes of one subject follow each other.
      name: of the check.
      state: "healthy", "problem" or "not applicable".
      found: what there is, in one line.
      remedy: what to do; None unless there is a problem.
    """

    subject: str
    name: str
    state: State
    found: str
    remedy: str | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """Makes the outcomes of one subject."""

    name: str

    def healthy(self, name: str, found: str) -> Outcome:
        """All is well."""
        return Outcome(self.name, name, "healthy", found)

    def problem(self, name: str, found: str, remedy: str) -> Outcome:
        """Something must be done."""
        return Outcome(self.name, name, "problem", found, remedy)

    def not_applicable(self, name: str, found: str) -> Outcome:
        """There is nothing here to look at; `found` says why."""
        return Outcome(self.name, name, "not applicable", found)


def one_line(error: object) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())

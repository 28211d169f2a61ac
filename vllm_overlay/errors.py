"""What a user is told when something is refused: one line with place, finding and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

CREDENTIALS = re.compile(r"(?<=//)[^/\s@\"']+(?=@)")  # the login of a URL

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h


class ConfigError(Exception):
    """A configuration that is refused (exit status 78).

    ``str()`` is one line: ``file:line:column: what; found …; expected …; remedy``. It shows no
    login of a URL.
    """

    exit_code = EXIT_CONFIG

    def __init__(
        self,
        what: str,
        *,
        file: Path | str | None = None,
        line: int | None = None,
        column: int | None = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.file = file
        self.line = line
        self.column = column
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(what)

    @property
    def told(self) -> str:
        """The line without its remedy."""
        return self._line(None)

    def __str__(self) -> str:
        return self._line(self.remedy)

    def _line(self, remedy: str | None) -> str:
        place = ":".join(
            str(part) for part in (self.file, self.line, self.column) if part is not None
        )
        parts = [self.what]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if remedy:
            parts.append(remedy)
        text = CREDENTIALS.sub("…", "; ".join(parts))
        return one_line(f"{place}: {text}" if place else text)


class UsageError(ConfigError):
    """A command that is called wrongly (exit status 2)."""

    exit_code = EXIT_USAGE


class FailedError(ConfigError):
    """Something that was tried and went wrong (exit status 1)."""

    exit_code = EXIT_FAILED


class ConfigErrors(Exception):
    """Every reason at once, so that a user mends them in one go."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))

    @property
    def exit_code(self) -> int:
        return max(error.exit_code for error in self.errors)


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise the errors, if there are any: one as it is, several together."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)


def one_line(text: str) -> str:
    """Return text with every control character escaped: a message never spans lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``, or None if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean 'x'?`` for the nearest known name, or None."""
    close = nearest(name, known)
    return f"did you mean '{close}'?" if close else None

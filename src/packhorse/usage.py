"""A command line that cannot be understood -> one error, the nearest name, and where the help is."""

import re
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

LIKE = 0.6
"""Names that are less like each other (see `SequenceMatcher.ratio`) are not told for one another."""

_UNKNOWN = (
    re.compile(r"unrecognized arguments: .*?(?P<name>--[\w.-]+)"),
    re.compile(r"Subcommand '[^']*' does not accept option '(?P<name>[^']+)'"),
    re.compile(r"Group '(?P<group>[^']*)' does not accept option '(?P<name>[^']+)'"),
    re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
)


class PlainErrors:
    """Makes a parser of jsonargparse tell an error alone: its usage has a hundred lines, and would bury it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and what may have been meant; ends with exit status 2."""
        if not self.exit_on_error:  # it parses a part for another one
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        print(f"error: {_explained(message, parser)}\ntip: all options: {command} --help", file=sys.stderr)
        self.exit(2)


class Parser(PlainErrors, ArgumentParser):
    """A parser with such errors."""


def read_docstrings(arguments: Iterable[str]) -> None:
    """Read the docstrings of settings only where they are told: it takes as long as everything else that is parsed."""
    is_told = any(word == "-h" or "help" in word or "comments" in word for word in arguments)
    set_parsing_settings(docstring_parse_attribute_docstrings=is_told)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like another, if one is; of equal ones, that of the same group.

    Only what stands behind the last dot is compared: a name may have got into the wrong group.
    """
    group, _, own = name.rpartition(".")
    found = []
    for other in known:
        its_group, _, its_own = other.rpartition(".")
        found.append((SequenceMatcher(None, own, its_own).ratio(), its_group == group, other))
    likeness, _, best = max(found, default=(0.0, False, ""))
    return best if likeness >= LIKE else None


def _explained(message: str, parser: ArgumentParser) -> str:
    """What the parser says; of an unknown option only its name, and the nearest one."""
    found = next((match for match in (unknown.match(message) for unknown in _UNKNOWN) if match), None)
    if found is None:
        return message
    name = ".".join(part for part in (found.groupdict().get("group"), found["name"]) if part)
    near = nearest(name.removeprefix("--"), _options(parser))
    dashes = "--" if name.startswith("--") else ""
    return f"there is no option {name}." + (f" Did you mean {dashes}{near}?" if near else "")


def _options(parser: ArgumentParser) -> set[str]:
    spellings = (spelling for action in parser._actions for spelling in action.option_strings)
    return {s[2:] for s in spellings if s.startswith("--") and not s.endswith(("+", ".help"))}

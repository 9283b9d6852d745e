"""A mistake of the user, in one line. The project's ``errors`` makes exit codes of it."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The message is one line and stands without a traceback."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def invalid(field: str, value: object, expected: str | Iterable[object]) -> UserError:
    """The error for a bad value of ``field`` (dotted, as typed on the command line); ``expected`` is a phrase or the choices."""
    choices = expected if isinstance(expected, str) else "one of " + ", ".join(str(e) for e in expected)
    return UserError(f"{field} = {value!r}: expected {choices}")

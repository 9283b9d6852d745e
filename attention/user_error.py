"""A mistake of the user, in one line, and how a command line ends."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NoReturn, TextIO

LONGEST_VALUE, LONGEST_LINE = 120, 1600


class UserError(ValueError):
    """Something the user can mend; to programs that use the package, a bad value.

    The message is one line and stands without a traceback; the middle of a very long one is left out.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


class OneLineParser(argparse.ArgumentParser):
    """Bad arguments become a ``UserError`` in place of argparse's usage and message. A description keeps its lines."""

    def __init__(self, **settings: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def one_line(message: str) -> str:
    return _cut(" ".join(message.split()), LONGEST_LINE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def refuse(wrong: bool, message: str) -> None:
    """``ValueError`` in one line, for callers of the package, where something is wrong."""
    if wrong:
        raise ValueError(one_line(f"low-precision attention: {message}"))


def invalid(
    field: str, value: object, expected: str | Iterable[object], *, typed: object = None, choices: Iterable[object] = ()
) -> UserError:
    """The error for a bad value of ``field`` (dotted, as typed on the command line); ``expected`` is the choices, or a phrase in place of
    ``choices``.

    Before many choices comes the one that is spelled most like the value, or like what was ``typed`` in its place.
    """
    names = [str(choice) for choice in (choices if isinstance(expected, str) else expected)]
    if not isinstance(expected, str):
        expected = "one of " + ", ".join(names)
    word = str(value if typed is None else typed)
    # Words in another order, or without their first one, before what has most letters in common.
    whole = sorted((name for name in names if set(word.split("_")) <= set(name.replace(":", "_").split("_"))), key=len)
    other = [name for name in names if re.sub(r"\d+", "0", name) != re.sub(r"\d+", "0", word)]  # m23 does not mean m3
    nearest = whole or get_close_matches(word, other, n=1, cutoff=0.7)  # o_in_delta does not mean delta
    meant = f"did you mean {nearest[0]}? " if nearest and len(names) > 5 else ""
    return UserError(f"{_cut(field, LONGEST_VALUE)} = {_cut(repr(value), LONGEST_VALUE)}: {meant}expected {expected}")


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Around a command line: a ``UserError`` is one line on stderr and exit code 2, as is a stdout that is closed or on a full disk.

    A closed stderr leads nowhere, as /dev/null: nothing asks whether there is one, and no file gets its descriptor.
    Ctrl-C is one line (the interrupt's message if it has one) and exit code 130, a closed stdout (``| head``) exit code 141.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise UserError("standard output: it is closed; expected a file, a pipe or /dev/null")
        try:
            yield
        except OSError:
            _flush("\n")  # where a print raised it, stdout takes this no more than that
            raise
        finally:
            _flush()
    except UserError as error:
        print("; ".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        discard(sys.stdout)
        raise SystemExit(141) from None


def _flush(more: str = "") -> None:
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk
        discard(sys.stdout)
        raise UserError(f"standard output: {error.strerror}") from error


def discard(stream: TextIO) -> None:
    """Let a stream that takes nothing more lead nowhere: what is still in its buffer would fail once more at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

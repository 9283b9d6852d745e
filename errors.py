"""User errors: one line that names field, value and choices, and exit code 2."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.user_error import OneLineParser as OneLineParser
from attention.user_error import UserError, command_line, discard, invalid

if TYPE_CHECKING:
    from torch import Tensor


class BusyError(UserError):
    """Another process has what this one needs: a run, a recording, a folder to write."""


def warn(text: str) -> None:
    """Print a warning on stderr. Where that is closed (``2>&1 | head``) or a file on a full disk, the program goes on without it."""
    try:
        print(f"warning: {text}", file=sys.stderr)
    except OSError:
        discard(sys.stderr)


def check_types(section: str, config: Any) -> None:
    """Raise ``UserError`` for the first field of a dataclass that is declared a class and holds a value of another.

    Whole numbers are floats. ``section``: its name in a config; "" for the config. Before its values are compared: a Python file may set
    anything.
    """
    for one in dataclasses.fields(config):
        value, kinds = getattr(config, one.name), (int, float) if one.type is float else (one.type,)
        if isinstance(one.type, type) and type(value) not in kinds:
            raise invalid(f"{section}.{one.name}".strip("."), value, f"a value of type {one.type.__name__}")


def check_size(field: str, value: object, least: int) -> None:
    """Raise ``UserError`` unless ``value`` is a whole number of ``least`` or more."""
    if type(value) is not int or value < least:
        raise invalid(field, value, f"a whole number of {least} or more")


def check_finite(tensors: Iterable[tuple[str, "Tensor"]], where: object) -> None:
    """Raise ``UserError`` for the first of named weights that is not of floats, or not finite."""
    for name, tensor in tensors:
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
            raise UserError(f"{where}: {name} is not finite")


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any exception of the code inside, which reads foreign content, into a ``UserError`` that names ``what``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: cannot be read: {type(error).__name__}: {first_line(error)}") from error


@contextlib.contextmanager
def on_disk(what: object, verb: str) -> Iterator[None]:
    """Turn an ``OSError`` of the code inside into a ``UserError``: ``what`` cannot be written, say."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot {verb} ({error.strerror})") from error


def first_line(error: BaseException) -> str:
    """The first line of the first error in the chain: cleaning up after a failure can fail, too."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def trainer_packages() -> Iterator[None]:
    """Around the imports of a command line and around its work, see ``command_line``; a missing package of the trainer is one line, too."""
    with command_line():
        try:
            yield
        except ModuleNotFoundError as missing:
            package = str(missing.name).partition(".")[0]
            if any(Path(__file__).with_name(own).exists() for own in (package, f"{package}.py")):
                raise  # no package that pip installs
            raise UserError(f"this needs the package {package}: pip install '.[train]'") from None


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Make a command line's ``main`` end as ``command_line`` says."""
    return trainer_packages()(main)

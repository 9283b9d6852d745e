"""errors.py: how a command line ends."""

from __future__ import annotations

import pytest

from errors import UserError, exit_on_user_error


@pytest.mark.parametrize(
    ("error", "code", "line"), [(UserError("x = 1"), 2, "error: x = 1\n"), (KeyboardInterrupt(), 130, "interrupted\n")]
)
def test_an_end_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @exit_on_user_error
    def main() -> None:
        raise error

    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        main()
    assert isinstance(stop.value, SystemExit)
    assert stop.value.code == code
    assert capsys.readouterr().err == line

"""scripts/show_rounding.py: what it prints, one line for each mistake, and the examples and tables of docs/numerics.md."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest
from test_docs import ROOT, blocks

from probes.bits import FORMATS
from scripts import show_rounding

NUMERICS = ROOT / "docs" / "numerics.md"
COMMAND = "$ python scripts/show_rounding.py "


def printed(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    show_rounding.main(shlex.split(arguments))
    return capsys.readouterr().out


def complaint(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        show_rounding.main(shlex.split(arguments))
    streams = capsys.readouterr()
    assert (stop.value.code, streams.out, streams.err.count("\n")) == (2, "", 1)
    return streams.err


def examples() -> list[tuple[str, str]]:
    """(arguments, output) of every command in the document."""
    found: list[tuple[str, str]] = []
    for block in blocks(NUMERICS, ""):
        for part in re.split(rf"^{re.escape(COMMAND)}", block, flags=re.MULTILINE)[1:]:
            arguments, _, output = part.partition("\n")
            found.append((arguments, output))
    return found


@pytest.mark.parametrize(("arguments", "output"), examples(), ids=[arguments for arguments, _ in examples()])
def test_the_document_shows_what_the_script_prints(
    arguments: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(arguments, capsys) == output


def table(first_heading: str) -> list[dict[str, str]]:
    """Rows of the document's table whose first column has that heading, by heading; backquotes taken off."""
    lines = NUMERICS.read_text().replace("`", "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    of_table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in of_table)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_the_documents_table_of_formats_is_that_of_the_code() -> None:
    expected = {
        name: {
            "exponent bits": str(fmt.exponent_bits),
            "mantissa bits": str(fmt.mantissa_bits),
            "unit roundoff": f"2^-{fmt.mantissa_bits + 1}",
            "largest": f"{float(fmt.largest):.1e}",
            "smallest normal": f"{2.0**fmt.least_exponent:.1e}",
            "smallest subnormal": f"{2.0 ** (fmt.least_exponent - fmt.mantissa_bits):.1e}",
        }
        for name, fmt in FORMATS.items()
    }
    assert {row.pop("format"): row for row in table("format")} == expected


def test_the_papers_example_has_the_papers_error(capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv 2510.04212, section 3.3: exact sum, BF16 result and error as printed there."""
    out = printed("-2.4071154594421387 -2.296875 --inputs fp32", capsys)
    assert "1 10000001 0010111   -4.71875   error -0.014759540557861328125" in out
    assert "guard 1 round 0 sticky 1" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("65504 16 --format fp16", "overflow: +infinity"),
        ("-65504 -16 --format fp16", "overflow: -infinity"),
        ("448 32 --format fp8_e4m3", "overflow: NaN, as there is no infinity; a conversion that saturates gives 448"),
        ("1 -1", "carry       the sum is zero"),
        ("1.5 -1.4921875", "carry       none; cancellation takes 7 places in front"),
        ("-0b1.1p-3 -1e-3", "A           1 01111100 1000000   -0.1875"),
        ("3.5 5 --op mul --format fp8_e4m3", "product     exact: 17.5 = 1.00011 x 2^4"),
        (
            "1.0078125 1.0078125 -1.015625 --op fma",
            "round       it fits: 0 01110001 0000000   0.00006103515625, exactly",
        ),
        ("0.1 --format fp32", "nearest     more than half a unit: up, away from zero"),
    ],
)
def test_lines(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in (text.strip() for text in printed(arguments, capsys).splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("1 two", "'two' is not a finite number"),
        ("1 nan", "'nan' is not a finite number"),
        ("1 2 --format bf17", "--format = 'bf17': expected one of fp32, tf32, bf16"),
        ("1 2 --inputs x", "--inputs = 'x'"),
        ("1 2 --op div", "--op = 'div': expected one of add, mul, fma"),
        ("1 2 --op fma", "two numbers for mul, three for fma"),
        ("1 2 3 --op mul", "two numbers for mul, three for fma"),
        ("1 2 --accumulate fp32", "--accumulate = 'fp32': expected an addition of three numbers"),
        ("1e6 1 --format fp16", "A = '1000000': expected a number of fp16, at most 65504"),
        ("", "the following arguments are required: A"),
    ],
)
def test_mistakes_are_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in complaint(arguments, capsys)


def test_a_reader_that_goes_away_is_no_mistake() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/show_rounding.py"), "1", "1/512"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")

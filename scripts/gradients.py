"""Gone; the line it prints says what there is instead."""

import _root  # noqa: F401

from training.retired import answer_for

answer_for(__file__)

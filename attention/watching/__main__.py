"""``python -m low_precision_attention.watching FILE``: the verdict on a file of ``watch``, and a table of its logits."""

import sys

from ..user_error import command_line
from .verdict import main

with command_line():
    main(sys.argv[1:])

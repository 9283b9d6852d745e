"""``python -m low_precision_attention.watching FILE``: the verdict on a file of ``watch``."""

import sys

from ..user_error import UserError
from .verdict import main

try:
    main(sys.argv[1:])
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

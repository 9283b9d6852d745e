"""Scripts import this first: modules of the repository are found from wherever a script is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

"""Packages that are installed, but not where Python looks."""

import importlib.metadata
import importlib.util
import site


def add_cutlass() -> None:
    """Let ``import cutlass`` find what nvidia-cutlass-dsl brings.

    Its ``.pth`` file names the folder. Python reads such files in site-packages, but not in a folder of PYTHONPATH, where
    ``pip install --target`` may have put it.
    """
    if importlib.util.find_spec("cutlass") is None:
        try:
            site.addsitedir(str(importlib.metadata.distribution("nvidia-cutlass-dsl").locate_file("")))
        except importlib.metadata.PackageNotFoundError:
            return  # the import says so

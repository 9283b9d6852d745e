"""figures/runs.py: runs that have little to draw."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from figures import runs

FALLS = np.linspace(5, 2, 120)


@pytest.mark.parametrize(
    "columns",
    [{"train_loss": FALLS, "max_logit_max": -FALLS}, {"train_loss": np.full(120, np.nan)}],
    ids=["no positive value for a logarithmic panel", "no finite loss"],
)
def test_a_panel_is_drawn_where_there_is_something_to_draw_and_the_loss_always(columns: dict[str, Any]) -> None:
    drawn = runs.run_figure([runs.DrawnRun("a: flash", pd.DataFrame(columns).astype(object), None)])
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["training loss"]

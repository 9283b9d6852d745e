"""figures/courses.py: what is drawn, what is marked, and that the legend never covers curves."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from figures import courses

STEPS = 120


def course(label: str = "a: flash", *, exploded_at: int | None = None, **columns: Any) -> courses.Course:
    columns = {"train_loss": np.linspace(5, 2, STEPS), **columns}
    return courses.Course(label, pd.DataFrame(columns).astype(object), exploded_at)


def figure(*drawn: courses.Course) -> Any:
    return courses.course_figure(drawn)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_legend_lies_outside_the_axes_and_inside_the_figure(count: int) -> None:
    names = [f"run {i}: flash_delta_from_p (hardware), explodes at 1,000" for i in range(count)]
    drawn = figure(*(course(name, exploded_at=60, grad_norm=np.ones(STEPS)) for name in names))
    drawn.draw_without_rendering()
    panels = [axes.get_tightbbox() for axes in drawn.axes]
    legend = drawn.legends[0].get_window_extent()
    assert not any(legend.overlaps(panel) for panel in panels)
    assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 for box in [legend, *panels])
    assert all(drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1 for box in [legend, *panels])


def titles(drawn: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in drawn.axes]


def test_a_logarithmic_panel_without_a_positive_value_is_left_out() -> None:
    assert titles(figure(course(max_logit_max=-np.ones(STEPS)))) == ["training loss"]


def test_runs_without_a_finite_value_have_a_picture() -> None:
    assert titles(figure(course(train_loss=np.full(STEPS, np.nan)))) == ["training loss"]

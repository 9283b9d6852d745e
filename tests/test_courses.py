"""figures/courses.py: what is drawn, what is marked, and that words never cover curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from figures import courses

STEPS = 120


def course(label: str = "a: flash", *, exploded_at: int | None = None, **columns: Any) -> courses.Course:
    columns = {"train_loss": np.linspace(5, 2, STEPS), **columns}
    records = [{"step": s} | {key: float(values[s]) for key, values in columns.items()} for s in range(STEPS)]
    return courses.Course(label=label, records=records, exploded_at=exploded_at)


def figure(*drawn: courses.Course, note: str = "", title: str = "") -> Any:
    return courses.course_figure(drawn, title=title, note=note, fine_print="Explosion: see there.")


def y_titles(drawn: Any) -> list[str]:
    return [axes.get_ylabel().split("\n")[0] for axes in drawn.axes]


def test_panels_are_those_with_data() -> None:
    flat = np.ones(STEPS)
    assert y_titles(figure(course(), course("b", w_q_norm_max=flat))) == ["training loss", "largest spectral"]


def test_a_panel_of_nothing_finite_is_left_out() -> None:
    assert y_titles(figure(course(w_q_norm_max=np.full(STEPS, np.nan)))) == ["training loss"]


def test_all_four_panels_in_order() -> None:
    flat = np.ones(STEPS)
    drawn = figure(course(w_q_norm_max=flat, grad_norm=flat, val_loss=flat))
    assert y_titles(drawn) == ["training loss", "largest spectral", "gradient norm", "validation loss"]


def test_the_loss_axis_is_linear_and_the_gradient_axis_logarithmic() -> None:
    drawn = figure(course(grad_norm=np.geomspace(0.1, 10, STEPS)))
    assert [axes.get_yscale() for axes in drawn.axes] == ["linear", "log"]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_legend_and_words_lie_outside_the_axes_and_inside_the_figure(count: int) -> None:
    names = [
        f"run {i} with a rather long name of its own: flash_delta_from_p (hardware), explodes" for i in range(count)
    ]
    drawn = figure(*(course(name, exploded_at=60) for name in names), note="A remark. " * 40, title="A title " * 8)
    renderer = drawn.canvas.get_renderer()
    panels = [axes.get_tightbbox(renderer) for axes in drawn.axes]
    boxes = [words.get_window_extent(renderer) for words in [*drawn.legends, *drawn.texts] if words.get_visible()]
    assert not any(box.overlaps(panel) for box in boxes for panel in panels)
    assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 for box in [*boxes, *panels])
    assert all(drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1 for box in [*boxes, *panels])


@pytest.mark.parametrize("values", [(1.7, 3.6), (1e-4, 1e9), (0.9999, 1.0001), (12345.0, 54321.0)])
def test_numbers_and_names_of_the_axes_do_not_overlap(values: tuple[float, float]) -> None:
    wave = np.where(np.arange(STEPS) % 2, *values)
    drawn = figure(course(grad_norm=wave, w_q_norm_max=wave, val_loss=wave))
    renderer = drawn.canvas.get_renderer()
    for axes in drawn.axes:
        axes.get_tightbbox(renderer)
        name = axes.yaxis.label.get_window_extent(renderer)
        numbers = [
            label.get_window_extent(renderer) for label in axes.get_yticklabels(which="both") if label.get_text()
        ]
        assert name.x0 >= 0
        assert len(numbers) >= 1
        assert not any(name.overlaps(number) for number in numbers)


def test_the_last_evaluation_is_inside_the_axes() -> None:
    one = course(val_loss=np.ones(STEPS))
    longer = courses.Course(label="a", records=[*one.records, {"step": 200, "val_loss": 1.0}], exploded_at=None)
    assert figure(longer).axes[-1].get_xlim()[1] > 200


def test_legend_and_words_do_not_overlap_each_other() -> None:
    drawn = figure(course(), course("b"), note="A remark. " * 40, title="A title")
    renderer = drawn.canvas.get_renderer()
    boxes = [words.get_window_extent(renderer) for words in [*drawn.legends, *drawn.texts]]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_note_is_printed() -> None:
    assert any("only delta changed" in text.get_text() for text in figure(course(), note="only delta changed").texts)


def test_an_explosion_is_marked_in_every_panel_in_its_runs_colour() -> None:
    drawn = figure(course(), course("b", exploded_at=70, w_q_norm_max=np.ones(STEPS)))
    for axes in drawn.axes:
        marks = [line for line in axes.lines if line.get_linestyle() == ":" and list(line.get_xdata()) == [70, 70]]
        assert [line.get_color() for line in marks] == [courses.COLOURS[1]]


def test_explosion_steps_too_close_to_read_are_printed_once() -> None:
    drawn = figure(course(exploded_at=70), course("b", exploded_at=72), course("c", exploded_at=100))
    assert [text.get_text() for text in drawn.axes[0].texts] == ["70", "100"]


def test_the_first_value_that_is_not_finite_is_marked() -> None:
    losses = np.linspace(5, 2, STEPS)
    losses[80], losses[90] = math.nan, math.inf
    crosses = [line for line in figure(course(train_loss=losses)).axes[0].lines if line.get_marker() == "X"]
    assert [list(line.get_xdata()) for line in crosses] == [[80]]


def test_a_run_of_nan_only_is_drawn_beside_others() -> None:
    drawn = figure(course(), course("b", train_loss=np.full(STEPS, np.nan), exploded_at=0))
    assert np.isfinite(drawn.axes[0].get_ylim()).all()


def test_an_explosion_does_not_stretch_the_loss_axis() -> None:
    losses = np.where(np.arange(STEPS) < 60, 3.0, 1e6)
    assert figure(course(), course("b", train_loss=losses)).axes[0].get_ylim()[1] < 6


def test_curves_that_lie_on_each_other_can_be_told_apart() -> None:
    widths = [courses.style(i)["linewidth"] for i in range(4)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 4


def test_styles_differ_for_many_runs() -> None:
    assert len({(courses.style(i)["color"], courses.style(i)["linestyle"]) for i in range(40)}) == 40


def test_smoothing_leaves_short_curves_alone() -> None:
    assert [courses.smoothing_window(count) for count in (10, 1000, 10**6)] == [1, 16, 200]


@pytest.mark.parametrize(("name", "head"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_ending_chooses_the_format(tmp_path: Path, name: str, head: bytes) -> None:
    courses.draw_courses([course()], tmp_path / "new" / name, title="", note="", fine_print="-")
    assert (tmp_path / "new" / name).read_bytes().startswith(head)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]

"""The loss chart as inline SVG: it needs no plotting library at start, and it follows the page's colours.

The server draws it, because the losses are there. A chart has at most 240 points, each the mean of an equal number of
steps, and a smoothed line. Steps without a finite loss leave a gap.
"""

import math

import numpy as np

from ui.html import esc, number
from ui.run.readers import Curve

WIDTH, HEIGHT = 720, 240
RIGHT, TOP, BOTTOM = 14, 14, 30
CHARACTER = 12.0  # width of a digit in a narrow window, where the text is larger
BINS = 240
WIDE = 90  # room that a restart's label needs on its right


def chart(curve: Curve, planned: int | None = None, marks: list[tuple[int, str]] | None = None) -> str:
    """The chart as SVG; "" when there are fewer than two steps.

    Args:
        curve: loss by step.
        planned: planned number of steps, where the x axis ends.
        marks: (step, label) of each vertical line, such as a restart.
    """
    points = _binned(curve.values)
    if len(points) < 2:
        return ""
    end = max(planned or 0, len(curve.values) - 1)
    ordered = sorted(v for _, v in points)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.995))]
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    left = max(52.0, 10 + CHARACTER * max(len(f"{value:g}") for value in ticks))

    def x(step: float) -> float:
        return left + (WIDTH - left - RIGHT) * step / max(end, 1)

    def y(value: float) -> float:
        height = (min(max(value, low), high) - low) / (high - low or 1)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - height)

    out = []
    for value in ticks:
        out.append(
            f'<line class="hp-gridline" x1="{left}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(f'<text class="hp-axis" x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in _ticks(0, end):
        if 0 <= step <= end:
            anchor = "end" if x(step) > WIDTH - 3 * RIGHT else "middle"  # a centred label would be cut off there
            out.append(
                f'<text class="hp-axis" x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,.0f}</text>'
            )
    for step, name in marks or []:
        out.append(f'<line class="hp-mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        shift, anchor = (4, "start") if x(step) < WIDTH - WIDE else (-4, "end")
        out.append(
            f'<text class="hp-marktext" x="{x(step) + shift:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{esc(name)}</text>'
        )
    out.append(f'<path class="hp-raw" d="{_path([(x(s), y(v)) for s, v in points])}"/>')
    out.append(f'<path class="hp-line" d="{_path([(x(s), y(v)) for s, v in _smooth(points)])}"/>')
    last = points[-1]
    label = f"Loss per step; {number(last[1])} at step {last[0]:,.0f}"
    return f'<svg class="hp-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(out)}</svg>'


def _binned(values: np.ndarray) -> list[tuple[float, float]]:
    """At most BINS points, each the mean over its steps that have a finite loss."""
    finite = np.isfinite(values)
    if not finite.any():
        return []
    first = int(finite.argmax())
    finite, values = finite[first:], values[first:].astype(np.float64)
    starts = np.arange(0, len(values), math.ceil(len(values) / BINS))
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    losses = np.add.reduceat(np.where(finite, values, 0.0), starts)
    steps = np.add.reduceat(np.where(finite, np.arange(first, first + len(values)), 0), starts)
    some = counts > 0
    return list(zip((steps[some] / counts[some]).tolist(), (losses[some] / counts[some]).tolist(), strict=True))


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """An exponential moving average over about a tenth of the chart, corrected for its bias towards the first value."""
    weight = 1 - 1 / max(3.0, len(points) / 12)
    mean, total, out = 0.0, 0.0, []
    for step, value in points:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append((step, mean / total))
    return out


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from low to high."""
    span = (high - low) or abs(high) or 1.0
    raw = span / 4
    power = 10 ** math.floor(math.log10(raw))
    unit = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw * 0.999)
    first = math.floor(low / unit)
    return [round(k * unit, 10) for k in range(first, math.ceil(high / unit) + 1)]


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)

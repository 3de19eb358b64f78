"""The loss chart as inline SVG: no plotting library to import at start, and it follows the page's colours.

Drawn on the server because the numbers are there; at most 240 points whatever the run's length, each the mean of its
share of the steps, with a smoothed line over it. Steps without a finite loss leave a gap.
"""

import math

from ui.html import esc, number

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 30
BINS = 240


def chart(losses: dict[int, float], planned: int | None = None, marks: list[tuple[int, str]] | None = None) -> str:
    """The chart as SVG; "" while there are fewer than two steps.

    Args:
        losses: loss by step. planned: the run's length, the x axis' end.
        marks: steps to mark with a line, each with a word (a restart).
    """
    steps = sorted(losses)
    points = [(s, v) for s, v in _binned(steps, losses) if math.isfinite(v)]
    if len(points) < 2:
        return ""
    end = max(planned or 0, steps[-1])
    ordered = sorted(v for _, v in points)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.995))]
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(end, 1)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low or 1)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    out = []
    for value in ticks:
        out.append(
            f'<line class="hp-gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(f'<text class="hp-axis" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in _ticks(0, end):
        if 0 <= step <= end:
            out.append(
                f'<text class="hp-axis" x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:,.0f}</text>'
            )
    for step, word in marks or []:
        out.append(f'<line class="hp-mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        out.append(f'<text class="hp-marktext" x="{x(step) + 4:.1f}" y="{TOP + 10}">{esc(word)}</text>')
    out.append(f'<path class="hp-raw" d="{_path([(x(s), y(v)) for s, v in points])}"/>')
    out.append(f'<path class="hp-line" d="{_path([(x(s), y(v)) for s, v in _smooth(points)])}"/>')
    last = points[-1]
    label = f"Loss by step; at step {last[0]:,.0f}: {number(last[1])}"
    return f'<svg class="hp-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(out)}</svg>'


def _binned(steps: list[int], losses: dict[int, float]) -> list[tuple[float, float]]:
    """At most BINS points, each the mean over its steps that have a finite loss."""
    size = max(1, math.ceil(len(steps) / BINS))
    out = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        values = [losses[s] for s in part if math.isfinite(losses[s])]
        out.append((sum(part) / len(part), sum(values) / len(values) if values else math.nan))
    return out


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """An exponential mean over about a tenth of the chart, without its pull towards the first value."""
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

"""Drawings, as SVG in the page: bars, areas, the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ltc.profiling.page.markup import bytes_text, count_text, milliseconds, text

WIDTH = 1040
PARTS = (  # of a step, as charts show them: field of the trace, words, class
    ("record_us", "Python and recording", "record"),
    ("compile_us", "compiling", "compile"),
    ("execute_us", "running, in the step's own thread", "execute"),
    ("wait_us", "waiting", "wait"),
)


def share_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar: (words, class, share of the whole) each, with a legend."""
    x, drawn = 0.0, []
    for words, kind, share in parts:
        width = share * WIDTH
        title = f"<title>{text(words)}: {100 * share:.1f} %</title>"
        drawn.append(
            f'<rect class="{kind}" x="{x:.1f}" width="{max(width, 0):.1f}" height="22">{title}</rect>'
        )
        x += width
    legend = "".join(
        f'<li><i class="{kind}"></i>{text(words)} <b>{100 * share:.1f} %</b></li>'
        for words, kind, share in parts
        if share > 0.0005
    )
    return (
        f'<svg class="shares" viewBox="0 0 {WIDTH} 22" preserveAspectRatio="none" role="img" '
        f'aria-label="where the time of a step goes">{"".join(drawn)}</svg>'
        f'<ul class="legend">{legend}</ul>'
    )


def step_strip(steps: Sequence[dict], shown: Sequence[int]) -> str:
    """A bar for each step; `shown`: of each, its place in the timeline's data, -1 for none."""
    height, pitch = 90, min(WIDTH / max(len(steps), 1), 40.0)
    durations = [step["end_us"] - step["begin_us"] for step in steps]
    # A first step that compiles may take as long as all others: it is cut off, and says so.
    ordered = sorted(durations)
    most = min(max(durations), 4 * ordered[len(ordered) // 2]) or 1.0
    bars = []
    for number, (step, took, place) in enumerate(zip(steps, durations, shown)):
        bars.append(_step_bar(step, took, place, number * pitch, pitch, height, most))
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} {height}" role="group" '
        f'aria-label="how long each step took">{"".join(bars)}</svg>'
        f'<p class="scale">full height: {milliseconds(most / 1e6)}'
        f"{'; longer steps are cut off' if max(durations) > most else ''}</p>"
    )


def _step_bar(
    step: dict, took: float, place: int, x: float, pitch: float, height: int, most: float
) -> str:
    y = float(height)
    parts: list[str] = []
    scale = height / most
    rest = took
    for key, _, kind in PARTS:
        part = min(float(step.get(key) or 0), rest)
        rest -= part
        y = _stacked(parts, kind, x, y, part * scale, pitch)
    _stacked(parts, "rest", x, y, rest * scale, pitch)
    title = f"step {step['number']}: {milliseconds(took / 1e6)}"
    for key, words, _ in PARTS:
        title += f"\n{words}: {milliseconds(float(step.get(key) or 0) / 1e6)}"
    role = f' data-step="{place}" tabindex="0" role="button"' if place >= 0 else ""
    return (
        f'<g class="step"{role} aria-label="{text(title.splitlines()[0])}"><title>{text(title)}</title>'
        f'<rect class="hit" x="{x:.1f}" width="{pitch:.1f}" height="{height}"/>{"".join(parts)}</g>'
    )


def _stacked(parts: list[str], kind: str, x: float, y: float, size: float, pitch: float) -> float:
    size = min(size, y)
    if size > 0.05:
        width = max(pitch - 1.5, 0.5)
        parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y - size:.1f}" width="{width:.1f}" '
            f'height="{size:.1f}"/>'
        )
    return y - size


def area(points: Sequence[tuple[float, float]], marks: Sequence[float], peak: float) -> str:
    """Bytes over time: (microseconds, bytes); `marks`: ends of steps; `peak`: when it was highest."""
    height, left, bottom = 200, 80, 24
    begin, end = points[0][0], max(points[-1][0], points[0][0] + 1)
    most = max(value for _, value in points) or 1.0
    across, up = (WIDTH - left) / (end - begin), (height - bottom - 12) / most

    def place(moment: float, value: float) -> str:
        return f"{left + (moment - begin) * across:.1f},{height - bottom - value * up:.1f}"

    path, last = [place(begin, 0)], points[0][1]
    for moment, value in points:  # what is held stays until it changes
        path += [place(moment, last), place(moment, value)]
        last = value
    path += [place(end, last), place(end, 0)]
    ticks = "".join(
        f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(most * part)}</text>'
        for part in (0, 0.5, 1)
        for y in [height - bottom - most * part * up]
    )
    steps = "".join(
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{height - bottom}" y2="{height - bottom + 5}"/>'
        for moment in marks
        if begin <= moment <= end
        for x in [left + (moment - begin) * across]
    )
    x = left + (min(max(peak, begin), end) - begin) * across
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="memory over time">'
        f'{ticks}<polygon class="memory" points="{" ".join(path)}"/>{steps}'
        f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - bottom}"/>'
        f'<text x="{left}" y="{height - 6}">{milliseconds(begin / 1e6)}</text>'
        f'<text x="{WIDTH}" y="{height - 6}" text-anchor="end">{milliseconds(end / 1e6)}</text></svg>'
    )


# --- the roofline -------------------------------------------------------------------------------


def roofline(
    dots: Sequence[tuple[str, float, float, float]], copy_limit: float, multiply_limit: float
) -> str:
    """(name, operations for each byte, operations a second, share of the time) each, under the roof."""
    width, height, left, top, bottom = 620, 360, 72, 28, 52
    ridge = multiply_limit / copy_limit
    x_low, x_high = _decades([dot[1] for dot in dots] + [ridge / 10, ridge * 10])
    y_low, y_high = _decades([dot[2] for dot in dots] + [multiply_limit / 100, multiply_limit])

    def x_of(value: float) -> float:
        return left + (math.log10(value) - x_low) / (x_high - x_low) * (width - left - 12)

    def y_of(value: float) -> float:
        return (
            height
            - bottom
            - (math.log10(value) - y_low) / (y_high - y_low) * (height - bottom - top)
        )

    grid = "".join(
        f'<line class="grid" x1="{x_of(10**k):.1f}" x2="{x_of(10**k):.1f}" y1="{top}" y2="{height - bottom}"/>'
        f'<text x="{x_of(10**k):.1f}" y="{height - bottom + 22}" '
        f'text-anchor="{"end" if k == x_high else "middle"}">{_power(k)}</text>'
        for k in range(x_low, x_high + 1)
    ) + "".join(
        f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y_of(10**k):.1f}" y2="{y_of(10**k):.1f}"/>'
        f'<text x="{left - 6}" y="{y_of(10**k) + 4:.1f}" text-anchor="end">{count_text(10**k)}</text>'
        for k in range(y_low, y_high + 1)
    )
    start = max(10.0**x_low, 10.0**y_low / copy_limit)
    roof = (
        f"{x_of(start):.1f},{y_of(start * copy_limit):.1f} {x_of(ridge):.1f},{y_of(multiply_limit):.1f} "
        f"{x_of(10**x_high):.1f},{y_of(multiply_limit):.1f}"
    )
    drawn = "".join(
        f'<circle class="dot" data-name="{text(name)}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" '
        f'r="{3 + 16 * math.sqrt(share):.1f}"><title>{text(name)}: {100 * share:.1f} % of the time, '
        f"{count_text(y)} a second, {x:.2g} for each byte</title></circle>"
        for name, x, y, share in sorted(dots, key=lambda dot: -dot[3])
    )
    return (
        f'<svg class="chart roofline" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="kernels below the limits of the machine">{grid}'
        f'<polyline class="roof" points="{roof}"/>{drawn}'
        f'<text x="{width - 12}" y="{height - 6}" text-anchor="end">operations for each byte moved</text>'
        f'<text x="{left}" y="17">operations a second</text></svg>'
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    logs = [math.log10(value) for value in values if value > 0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return low, max(high, low + 1)


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 < exponent < 5 else f"1e{exponent}"

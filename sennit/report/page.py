"""The report as one HTML page: everything inside, nothing loaded from anywhere.

The page carries plotly.js, its style and script, and the panels as JSON; a content security policy forbids every
request. Each text of the run is escaped: recipes, samples and paths are not trusted.
"""

from __future__ import annotations

import html
import json
import math
import re
from importlib import resources
from typing import Any

import sennit
from sennit.errors import SennitError
from sennit.report import facts, words
from sennit.report.panels import Panel, Shares
from sennit.report.run_data import Array, Event, RunData
from sennit.report.series import minutes_of_training, thin

MAX_SAMPLES = 20
MAX_TEXT = 6000
"""Characters shown of a sample."""
MAX_RECIPE = 200_000
MAX_ROWS = 200

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
ICON = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M1 3c5 0 4 9 14 9' stroke='%232f6fde' stroke-width='3' fill='none'/%3E%3C/svg%3E"  # noqa: E501
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def render_page(run: RunData, panels: list[Panel], shares: Shares | None, *, png_name: str = "report.png") -> bytes:
    """Return the page of `run` in UTF-8."""
    name = run_name(run)
    kind, progress = facts.status(run)
    data = {"panels": [_panel_json(p) for p in panels], "shares": _shares_json(shares), **_axes_json(run)}
    label = {"finished": "finished", "stopped": "in progress or stopped", "empty": "empty"}[kind]
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="sennit {escape(sennit.__version__)}">
<title>{escape(name)} - sennit run report</title>
<link rel="icon" href="{ICON}">
<style>{asset("page.css")}</style>
</head>
"""
    body = f"""<body>
<header>
<div class="bar"><span class="brand">sennit</span><span class="brand-what">run report</span>
<button id="theme" type="button" aria-label="Switch between light and dark">Light / dark</button></div>
<h1>{escape(name)} <span class="status {kind}">{escape(label)}: {escape(progress)}</span></h1>
<p class="subtitle">{_joined(facts.subtitle(run))}</p>
</header>
<main>
{_notes(run)}
{_tiles(run)}
{_plots(run, panels, shares, png_name)}
{_samples(run)}
{_timeline(run)}
{_environment(run)}
{_recipe(run)}
</main>
<footer>Written by sennit {escape(sennit.__version__)} from {escape(str(run.path))}.
Long curves are thinned; every minimum and maximum is kept.</footer>
<script type="application/json" id="report-data">{script_json(data)}</script>
"""
    pictures = f"<script>{plotly_js()}</script>\n<script>{asset('page.js')}</script>\n" if panels else ""
    scripts = f"{pictures}<script>{asset('theme.js')}</script>\n"
    return f"{head}{body}{scripts}</body>\n</html>\n".encode("utf-8", "replace")


def run_name(run: RunData) -> str:
    """Return the run's name: that of its recipe, else of its folder."""
    name = run.setting("run.name")
    folder = run.path.resolve().name
    if not isinstance(name, str) or not name or name == folder:
        return folder
    return f"{name} ({folder})"


def escape(text: str) -> str:
    """Return `text` for HTML: markup escaped, control characters and lone surrogates replaced."""
    return html.escape(_CONTROL.sub("\ufffd", text), quote=True)


def script_json(value: Any) -> str:
    """Return strict JSON that can stand inside a script element: no `<`, `>` or `&` in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """Return the text of a file in `sennit/report/assets`."""
    return resources.files("sennit.report").joinpath("assets", name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """Return the source of plotly.js from the installed plotly package. Raises SennitError if it is not there."""
    try:
        return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise SennitError(
            "The report needs plotly.js, which comes with the Python package plotly, and that is not installed. "
            "Install it with `pip install plotly` and run `sennit report` again."
        ) from error


def _numbers(values: Array, digits: int = 6) -> list[float | None]:
    """Return JSON numbers with `digits` significant digits; None where not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def _panel_json(panel: Panel) -> dict[str, Any]:
    traces = [
        {
            "name": trace.name,
            "x": [int(x) for x in trace.x],
            "y": _numbers(trace.y),
            "color": trace.color,
            "style": trace.style.value,
            "right": trace.right,
            **({"texts": trace.texts} if trace.texts else {}),
        }
        for trace in panel.traces
    ]
    return {
        "key": panel.key,
        "yAxis": panel.y_axis,
        "rightAxis": panel.right_axis,
        "fromZero": panel.from_zero,
        "yMax": panel.y_max,
        "log": panel.log,
        "traces": traces,
    }


def _shares_json(shares: Shares | None) -> dict[str, Any] | None:
    if shares is None:
        return None
    total = sum(seconds for _, seconds, _ in shares.parts) or 1.0
    parts = [
        {
            "name": name,
            "percent": round(100 * seconds / total, 2),
            "color": color,
            "text": f"{words.percent(100 * seconds / total)}  {words.duration(seconds)}",
        }
        for name, seconds, color in shares.parts
    ]
    return {"key": shares.key, "parts": parts}


def _axes_json(run: RunData) -> dict[str, Any]:
    """Return the table from steps to tokens and minutes, and the steps at which the run was resumed."""
    resumed = {event.step for event in run.events_of("resume")}
    step = run.steps["step"]
    table: dict[str, list[float | None]] = {}
    if len(step):
        minutes = minutes_of_training(run.steps["time"], step, resumed)
        for name, values in (("tokens", run.steps["tokens"]), ("minutes", minutes)):
            x, y = thin(step, values, 600)
            finite = [(a, b) for a, b in zip(x.tolist(), _numbers(y, 9), strict=True) if b is not None]
            if len(finite) > 1 and finite[-1][1] > finite[0][1]:
                table[name] = [list(column) for column in zip(*finite, strict=True)]  # type: ignore[assignment]
    return {"axes": table, "resumes": sorted(resumed)[-50:]}


def _joined(parts: list[str]) -> str:
    return " &middot; ".join(escape(part) for part in parts)


def _notes(run: RunData) -> str:
    if not run.notes:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in run.notes) + "</ul>"


def _tiles(run: RunData) -> str:
    tiles = [
        f'<div class="tile"><dt>{escape(f.label)}</dt><dd>{escape(f.value)}</dd>'
        f'<dd class="detail">{escape(f.detail)}</dd></div>'
        for f in facts.headline(run)
    ]
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _plots(run: RunData, panels: list[Panel], shares: Shares | None, png_name: str) -> str:
    if not panels:
        return '<p class="empty-run">No step has been recorded yet: the pictures appear with the first one.</p>'
    figures = [_figure(panel.key, panel.title, panel.note, log=True) for panel in panels]
    if shares is not None:
        figures.append(_figure(shares.key, shares.title, shares.note, log=False))
    return f"""<div class="controls"><span class="axis" id="axis" role="group" aria-label="Horizontal axis">
<button type="button" data-axis="step" aria-pressed="true">Steps</button>
<button type="button" data-axis="tokens" aria-pressed="false">Tokens</button>
<button type="button" data-axis="minutes" aria-pressed="false">Minutes</button></span>
<span class="hint">Drag over a picture to zoom all of them, double-click to go back.
Dotted upright lines: the run was resumed there.</span></div>
<noscript><p class="notes">The pictures need JavaScript; {escape(png_name)} shows the same ones.</p></noscript>
<div class="plots">{"".join(figures)}</div>"""


def _figure(key: str, title: str, note: str, *, log: bool) -> str:
    button = f'<button type="button" class="log" data-log="{key}" aria-pressed="false">log</button>' if log else ""
    caption = f'<span class="note">{escape(note)}</span>' if note else ""
    return (
        f'<section class="card plot"><div class="card-head"><h2>{escape(title)}</h2>{caption}{button}</div>'
        f'<div class="picture" id="plot-{key}" role="img" aria-label="{escape(title)}"></div></section>'
    )


def _samples(run: RunData) -> str:
    samples = run.events_of("sample")[-MAX_SAMPLES:]
    if not samples:
        return ""
    newest, *older = reversed(samples)
    rest = "".join(_sample(sample) for sample in older)
    rest = f"<details><summary>Earlier samples ({len(older)})</summary>{rest}</details>" if older else ""
    return f'<section class="card"><h2>Generated text</h2>{_sample(newest)}{rest}</section>'


def _sample(event: Event) -> str:
    prompt, text = (str(event.fields.get(key) or "") for key in ("prompt", "text"))
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + f" ... ({len(text) - MAX_TEXT:,} more characters)"
    return (
        f'<p class="note">step {event.step:,}, the prompt in bold</p>'
        f'<pre class="sample"><b>{escape(prompt[:MAX_TEXT])}</b>{escape(text)}</pre>'
    )


def _timeline(run: RunData) -> str:
    rows = facts.timeline(run)
    return _details(f"Checkpoints and resumes ({len(rows)})", ("step", "event", ""), rows[:MAX_ROWS])


def _environment(run: RunData) -> str:
    return _details("Environment", ("", ""), facts.environment_rows(run)[:MAX_ROWS])


def _details(title: str, heads: tuple[str, ...], rows: list[Any]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(head)}</th>" for head in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell[:2000])}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<details class="card"><summary>{escape(title)}</summary><div class="scroll"><table>'
        f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table></div></details>"
    )


def _recipe(run: RunData) -> str:
    if not run.recipe_text:
        return ""
    return (
        '<details class="card"><summary>Recipe (recipe.toml, resolved)</summary>'
        f'<pre class="recipe">{escape(run.recipe_text[:MAX_RECIPE])}</pre></details>'
    )


__all__ = ["asset", "escape", "plotly_js", "render_page", "run_name", "script_json"]

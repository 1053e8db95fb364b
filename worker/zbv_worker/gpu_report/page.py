"""A GPU report as one HTML page that opens from disk without a network, and as lines for a terminal.

The page has no scripts. Its style is the one of zbv's other pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from zbv_worker.gpu_report.check import Check, Checked, Line, ReportOptions
from zbv_worker.gpu_report.gpu_report import Report

UNPROVED_PAGE = "docs/without-a-gpu.md"
"""What tests prove without a GPU, and which check of this report proves the rest."""

_STYLE = "export/report/static/zbv.css"
_OWN_STYLE = """
.results { table-layout: fixed; min-width: 720px; }
th, td { white-space: normal; overflow-wrap: anywhere; }
.results th:nth-child(1) { width: 8%; }
.results th:nth-child(2) { width: 34%; }
.results th:nth-child(n + 3) { width: 17%; }
.results th:nth-child(5) { width: 24%; }
.pass { color: var(--good); font-weight: 600; }
.fail { color: var(--bad); font-weight: 600; }
.not-run { color: var(--muted); }
"""


def page(report: Report) -> str:
    """The page of a report."""
    verdict = "every line that ran passed" if report.has_passed else "some lines failed"
    heading = f'<h1>GPU report</h1><p class="sub">{verdict.capitalize()}.</p>'
    body = (
        '<header class="top"><span class="brand">zbv</span></header>',
        f'<main><div class="heading"><div>{heading}</div></div>',
        _cards(report),
        _facts(report.facts),
        *(_panel(outcome) for outcome in report.outcomes),
        f'<p class="muted small">{UNPROVED_PAGE} lists what tests prove without a GPU, and what not.</p>',
        f'</main><footer class="bottom">zbv {escape(str(report.facts["zbv"]))}</footer>',
    )
    return f"{_head(f'GPU report: {verdict} · zbv')}<body>\n{chr(10).join(body)}\n</body>\n</html>\n"


def _head(title: str) -> str:
    style = files("zbv_solver").joinpath(_STYLE).read_text(encoding="utf-8")
    lines = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">',
        f"<style>{style}{_OWN_STYLE}</style>\n</head>\n",
    )
    return "\n".join(lines)


def _cards(report: Report) -> str:
    failures, unrun = report.count("fail"), report.count("not run")
    cards = (
        ("Passed", report.count("pass"), "good" if not failures else ""),
        ("Failed", failures, "bad" if failures else ""),
        ("Not run", unrun, ""),
        ("Seconds", round(sum(outcome.seconds for outcome in report.outcomes)), ""),
    )
    return '<dl class="cards">{}</dl>'.format(
        "".join(
            f'<div class="card {kind}"><dt>{name}</dt><dd><strong>{value}</strong></dd></div>'
            for name, value, kind in cards
        )
    )


def _facts(facts: Mapping[str, Any]) -> str:
    return _section("Machine", "", _table("machine", ("fact", "value"), facts_of(facts), ("", "left")))


def facts_of(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts by name, one per GPU."""
    for name, value in facts.items():
        if name != "gpus":
            yield name, str(value)
    for index, gpu in enumerate(facts.get("gpus", ())):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        capability = f"compute capability {gpu['compute_capability']}"
        yield f"GPU {index}", f"{gpu['name']}, {memory}, {gpu['multiprocessors']} SMs, {capability}"


def _panel(outcome: Checked) -> str:
    check = outcome.check
    rows = ((line.verdict, line.what, line.measured, line.limit, line.reason) for line in outcome.lines)
    remedy = (
        f"<p><strong>What to do:</strong> {escape(check.remedy)}</p>" if outcome.verdict == "fail" else ""
    )
    said = f'<p class="muted">{escape(check.proves)}</p>{remedy}'
    heads = ("verdict", "line", "measured", "limit", "reason")
    table = _table("results", heads, rows, ("verdict", "left", "left", "left", "left"))
    return _section(f"{check.title} ({check.name}, {outcome.seconds:.0f} s)", said, table)


def _section(title: str, said: str, table: str) -> str:
    title = escape(title[:1].upper() + title[1:])
    return f'<section class="panel"><h2>{title}</h2>{said}<div class="scroll">{table}</div></section>'


def _table(name: str, heads: Iterable[str], rows: Iterable[tuple[str, ...]], kinds: tuple[str, ...]) -> str:
    heading = "".join(f'<th class="left">{escape(head)}</th>' for head in heads)
    body = "".join(
        "<tr>{}</tr>".format("".join(_cell(text, kind) for text, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    return f'<table class="{name}"><thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>'


def _cell(text: str, kind: str) -> str:
    kind = text.replace(" ", "-") if kind == "verdict" else kind
    return f'<td class="{kind}">{escape(text).replace(chr(10), "<br>")}</td>'


def checked_text(outcome: Checked) -> Iterator[str]:
    """A check's lines for a terminal."""
    yield f"{outcome.check.name}: {outcome.check.title} ({outcome.seconds:.1f} s)"
    yield from map(_line_text, outcome.lines)
    if outcome.verdict == "fail":
        yield f"  what to do: {outcome.check.remedy}"


def _line_text(line: Line) -> str:
    limit = f" ({line.limit})" if line.limit not in ("", "none") else ""
    measured = f": {line.measured}{limit}" if line.measured and line.verdict != "fail" else ""
    reason = f": {line.reason}" if line.reason else ""
    return f"  {line.verdict:<7}  {line.what}{measured}{reason}"


def summary(report: Report) -> str:
    """One line for a terminal."""
    counts = (f"{report.count('pass')} passed", f"{report.count('fail')} failed")
    return f"{', '.join(counts)}, {report.count('not run')} not run"


def listing(checks: Iterable[Check], options: ReportOptions) -> Iterator[str]:
    """Names of checks, what they prove, and whether they can run here."""
    for check in checks:
        lack = check.needs.lack(options)
        yield f"{check.name}: {check.title}{f' (not here: {lack})' if lack else ''}"
        yield f"  proves: {check.proves}"

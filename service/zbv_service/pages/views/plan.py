"""The page of one plan."""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.export import FORMATS, report

from zbv_service.pages.shell import Shell, assets, render


def plan_page(view: report.PlanView, shell: Shell) -> bytes:
    """The solver's view of a plan, with links to the pages and documents of the service."""
    page, document = f"{shell.root}/plans/{view.plan_id}", f"{shell.root}/v1/plans/{view.plan_id}"
    links = [
        report.PageLink(
            "Change and search again",
            f"{shell.root}/new?from={view.plan_id}",
            "A new search that begins with this plan's problem",
        ),
        report.PageLink("Compare", f"{page}/compare", "With other schedules on one time axis"),
        report.PageLink("Memory and time", f"{page}/frontier", "The best span at every memory limit"),
        report.PageLink(
            "Trace for Perfetto",
            f"{document}/export/chrome-trace",
            "Downloads the trace, a file that ui.perfetto.dev and chrome://tracing open",
        ),
    ]
    linked = replace(
        view,
        links=tuple(links if shell.may_search else links[1:]),
        exports=tuple(
            report.PageLink(name, f"{document}/export/{name}", entry.description)
            for name, entry in FORMATS.items()
        ),
        json_url=document,
        # The version is part of the address, because browsers cache the answer without asking again.
        actions_url=f"{page}/actions?v={assets()}",
    )
    return render("plan.html.j2", shell, view=linked)

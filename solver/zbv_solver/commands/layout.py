"""``zbv layout``: the parallel layout that trains a model fastest on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from rich.console import Console
from zbv_models.estimate.transformers_config import is_transformers_config, read_config
from zbv_models.layouts.answer import ranking_json
from zbv_models.layouts.cluster import AnyCluster, doubts, parse_cluster
from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts, score_given_cut
from zbv_models.layouts.layout import MOST_LAYOUTS, MOST_LISTED, ZERO_STAGES, Fixed
from zbv_models.layouts.profile import parse_profile
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_models.layouts.request import OF_MODEL, BatchConfig, Request, parse_request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.sensitivity import Outcome, outcomes

from zbv_solver.commands.cut_score import score_json, score_summary, score_table
from zbv_solver.commands.interrupt import Interruption, terminated_like_interrupted
from zbv_solver.commands.layout_tables import (
    change_text,
    composition_table,
    layout_table,
    memory_text,
    origin_text,
    origins_text,
    rank_memory_table,
    sensitivity_note,
    sensitivity_table,
    trained_text,
    verdict,
)
from zbv_solver.commands.messages import flag_of, named_flags, print_whole, spinner
from zbv_solver.commands.model_flags import FLAGS, given_parallel, read_adapter
from zbv_solver.documents.files import file_label, load, output, read_json
from zbv_solver.documents.validation import require_kind
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.export.quantities import SECONDS, counted, figure, gigabytes, time
from zbv_solver.search.options import SearchOptions


def layout(arguments: argparse.Namespace) -> None:
    """Search the best layouts; print a table, and write them if asked."""
    options = _options(arguments)
    request = _request(arguments)
    if arguments.cut is not None:
        _given_cut(request, arguments)
        return
    with _naming(arguments):
        setting = request.setting
    top, workers = arguments.top, arguments.workers

    def search(stop: Ends) -> Ranking:
        def tell(found: LayoutProgress) -> None:
            say(_news(found))

        if arguments.executor == FREE:
            most = MOST_LISTED if arguments.points else MOST_LAYOUTS
            with _naming(arguments):
                return best_layouts(
                    request.families(most),
                    *(setting, top, options, stop, tell),
                    workers=workers,
                )
        with _naming(arguments):
            layouts = list(takewhile(lambda _: not stop(), request.every()))
        if stop():
            raise _too_late(arguments.time_limit)
        try:
            return executor_layouts(
                layouts, setting, arguments.executor, top, options, stop, tell, workers=workers
            )
        except InvalidInput as error:
            raise error.found_in("--executor") from None

    def answer(is_stopped: Callable[[], bool]) -> tuple[Ranking, list[Outcome] | None]:
        stop = Ends(is_stopped, arguments.time_limit)
        ranking = search(stop)
        if not ranking.best:
            raise _too_late(arguments.time_limit)
        if not arguments.sensitivity:
            return ranking, None
        found = []
        for each in outcomes(ranking, request, stop):
            found.append(each)
            say(f"sensitivity: {change_text(each)}")
        return ranking, found

    with terminated_like_interrupted(), spinner("searching layouts", arguments.time_limit) as say:
        interruption = Interruption(say)
        if arguments.output is None:
            ranking, found = interruption.run(answer)
        else:
            with output(arguments.output) as write_text:
                ranking, found = interruption.run(answer)
                document = ranking_json(ranking, request, with_points=arguments.points, sensitivity=found)
                write_text(json.dumps(document) + "\n")
    console = Console(stderr=arguments.output == "-")
    print_whole(layout_table(ranking, request), stderr=console.stderr)
    console.print(origin_text(request) + trained_text(request) + verdict(ranking), highlight=False)
    console.print(memory_text(request.cluster), highlight=False)
    best = ranking.best[0]
    if request.profiles:
        console.print(origins_text(ranking), highlight=False)
    print_whole(composition_table(best), stderr=console.stderr)
    print_whole(rank_memory_table(best), stderr=console.stderr)
    if found:
        print_whole(sensitivity_table(ranking, found), stderr=console.stderr)
        console.print(sensitivity_note(found), highlight=False)
    if isinstance(best, ExecutorLayout):
        console.print(f"\n{best.settings or ''}{best.remark}".rstrip(), markup=False, soft_wrap=True)
    interruption.finish("the layout shown")


def _given_cut(request: Request, arguments: argparse.Namespace) -> None:
    """Print what a layout achieves with a given cut, and what its devices hold."""
    with spinner("searching better cuts"), _naming(arguments):
        given = score_given_cut(
            request, arguments.cut, effort=arguments.effort or "quick", time_limit=arguments.time_limit
        )
    if arguments.output is not None:
        document = score_json(given.score) | {
            "step_time": given.step_time,
            "peak_memory": given.peak_memory,
            "reserved_memory": given.reserved_memory,
        }
        with output(arguments.output) as write_text:
            write_text(json.dumps(document) + "\n")
    console = Console(stderr=arguments.output == "-")
    print_whole(score_table(given.score), stderr=console.stderr)
    console.print(
        f"A step takes {time(given.step_time, SECONDS)}. The fullest device has tensors of "
        f"{gigabytes(given.peak_memory)}, for which PyTorch reserves {gigabytes(given.reserved_memory)} of "
        f"{gigabytes(request.cluster.size)}. {memory_text(request.cluster)}",
        highlight=False,
    )
    console.print(score_summary(given.score).rstrip(), markup=False, highlight=False, soft_wrap=True)


def _too_late(limit: float | None) -> InvalidInput:
    """The error of a search that was to end before it had planned a layout; after Ctrl-C, nobody sees it."""
    detail = f"found {limit or 0.0:g} seconds, which passed before a layout was planned."
    return InvalidInput.at("--time-limit", f"{detail} Give more time, or fix parts of the layout.")


@contextmanager
def _naming(arguments: argparse.Namespace) -> Iterator[None]:
    """Let errors of the request name files and flags."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput([_named(each, arguments) for each in error.issues]) from None


def _news(found: LayoutProgress) -> str:
    best = "" if found.step_time is None else f", best step {time(found.step_time, SECONDS)}"
    return (
        f"{counted(found.considered, 'layout')}, {figure(found.ruled_out, 12)} ruled out, "
        f"{figure(found.planned, 12)} planned{best}, none below {time(found.no_layout_below, SECONDS)}"
    )


def _options(arguments: argparse.Namespace) -> SearchOptions | None:
    """The options of full searches; None without --effort. The time limit is that of all of them together."""
    try:
        options = SearchOptions(arguments.effort or "quick", arguments.time_limit, workers=arguments.workers)
    except InvalidInput as error:
        raise named_flags(error) from None
    return None if arguments.effort is None else replace(options, time_limit=None)


def _request(arguments: argparse.Namespace) -> Request:
    for name in ("top", *FLAGS):
        value, least = getattr(arguments, name), int(name != "zero_stage")
        if isinstance(value, int) and value < least:
            raise InvalidInput([Issue("", f"found {value}; must be at least {least}.", flag_of(name))])
    if (stage := arguments.zero_stage) is not None and stage > max(ZERO_STAGES):
        raise InvalidInput([Issue("", f"found {stage}; must be at most {max(ZERO_STAGES)}.", "--zero-stage")])
    for flag in ("sensitivity", "points"):
        if getattr(arguments, flag) and arguments.executor != FREE:
            detail = (
                f"found it and --executor {arguments.executor}; it is for zbv only. Leave one of them out."
            )
            raise InvalidInput([Issue("", detail, flag_of(flag))])
    if arguments.model is None and not arguments.preset:
        raise InvalidInput([Issue("", "found neither; give one of them.", "model, --preset")])
    read_adapter(arguments)
    cluster = load(arguments.cluster, _questioned_cluster)
    fixed = Fixed(**{name: getattr(arguments, name) for name in FLAGS})
    document = {} if arguments.model is None else read_json(arguments.model)
    if is_transformers_config(document):
        _require_batch(arguments)
    profiles = tuple(
        load(path, partial(parse_profile, source=file_label(path))) for path in arguments.profile
    )
    try:
        require_kind(document, "model's configuration")
        if is_transformers_config(document):
            document = {"model": read_config(document, arguments.sequence_length)}
        request = parse_request(
            document,
            cluster,
            fixed,
            tuple(arguments.preset),
            given_parallel(arguments),
            arguments.executor,
            **{name: getattr(arguments, name) for name in BatchConfig.model_fields},
        )
        return replace(request, profiles=profiles)
    except InvalidInput as error:
        issues = [_named(issue, arguments) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None


def _questioned_cluster(document: Any) -> AnyCluster:
    """The cluster of a document; values that contradict its device are questioned on standard error."""
    require_kind(document, "cluster")
    cluster = parse_cluster(document)
    for doubt in doubts(document):
        sys.stderr.write(f"zbv: warning: {doubt}\n")
    return cluster


def _require_batch(arguments: argparse.Namespace) -> None:
    detail = "a config.json does not say it, and has no place for it. Give this flag."
    flags = [
        flag_of(name) for name in ("global_batch", "sequence_length") if getattr(arguments, name) is None
    ]
    if flags:
        raise InvalidInput([Issue("", detail, flag) for flag in flags])


def _named(issue: Issue, arguments: argparse.Namespace) -> Issue:
    """An issue that names the file, or the flags if they are wrong or there is no file."""
    model: str | None = arguments.model
    if issue.pointer.startswith("--"):
        return Issue("", issue.detail, issue.pointer)
    if issue.pointer == "/fixed":
        given = (flag_of(name) for name in FLAGS if getattr(arguments, name) is not None)
        return Issue("", issue.detail, ", ".join(given))
    if issue.pointer.startswith("/fixed/"):
        return Issue("", issue.detail, flag_of(issue.pointer.removeprefix("/fixed/")))
    if issue.pointer.removeprefix("/parallel/") in given_parallel(arguments):
        return Issue("", issue.detail, flag_of(issue.pointer.removeprefix("/parallel/")))
    flags = {"/model": "--preset", "/global_batch": "--global-batch", "/model/sequence": "--sequence-length"}
    if issue.source:
        return issue
    key = issue.pointer.removeprefix("/").removeprefix("model/").partition("/")[0]
    if key in OF_MODEL and getattr(arguments, key) is not None:
        return Issue("", issue.detail, flag_of(key))
    if model is None and issue.pointer in flags:
        return Issue("", issue.detail, flags[issue.pointer])
    if issue.pointer in flags and "required" in issue.detail:
        issue = replace(issue, detail=f"{issue.detail} Give it, or {flags[issue.pointer]}.")
    is_of_cluster = issue.pointer == "/groups" or (model is None and not issue.pointer)
    path = arguments.cluster if is_of_cluster else model
    return issue if path is None else replace(issue, source=file_label(path))

"""Sphinx configuration of the documentation site, which ``make docs`` builds into ``build/docs``.

Two directives generate reference pages from the code: ``command-help`` prints the help of a command and of
all its subcommands, and ``http-operations`` lists the operations of the service's OpenAPI document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from zbv_solver import __version__

ROOT = Path(__file__).parent.parent
PUBLIC = ("zbv_solver", "zbv_service.client", "zbv_worker", "zbv_worker.model")

project = "zbv"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_*"]

html_theme = "furo"
html_title = f"zbv {__version__}"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = [
    "myst.header"
]  # A page may begin below a first-level heading where it includes another file.

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False


class CommandHelp(SphinxDirective):
    """``{command-help} module``: the help of the module's parser and its subcommands, a section for each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one section per command."""
        os.environ["COLUMNS"] = "100"
        parser: argparse.ArgumentParser = import_module(self.arguments[0])._parser()
        return [self._section(each) for each in _with_subcommands(parser)]

    def _section(self, parser: argparse.ArgumentParser) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(parser.prog)])
        section += nodes.title(text=parser.prog)
        section += nodes.literal_block(text=parser.format_help(), language="text")
        self.state.document.note_implicit_target(section)
        return section


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _with_subcommands(each)


class HttpOperations(SphinxDirective):
    """``{http-operations}``: a table of every operation for each tag of ``service/openapi.json``."""

    columns: ClassVar = ("operation", "summary", "scope")

    def run(self) -> list[nodes.Node]:
        """Return one section per tag."""
        source = ROOT / "service" / "openapi.json"
        self.env.note_dependency(str(source))
        document = json.loads(source.read_text(encoding="utf-8"))
        by_tag: dict[str, list[tuple[str, str, str]]] = {}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if "responses" not in operation:
                    continue  # parameters that all methods of a path share
                row = (f"{method.upper()} {path}", operation["summary"], _scopes(operation))
                by_tag.setdefault(operation["tags"][0], []).append(row)
        return [self._section(tag, rows) for tag, rows in by_tag.items()]

    def _section(self, tag: str, rows: list[tuple[str, str, str]]) -> nodes.section:
        section = nodes.section(ids=[f"operations-{tag}"])
        section += nodes.title(text=tag.capitalize())
        group = nodes.tgroup(cols=3)
        group += [nodes.colspec(colwidth=width) for width in (5, 5, 2)]
        group += nodes.thead("", _row(*(nodes.Text(name) for name in self.columns)))
        cells = (
            (nodes.literal(text=call), nodes.Text(text), nodes.Text(scope)) for call, text, scope in rows
        )
        group += nodes.tbody("", *(_row(*each) for each in cells))
        section += nodes.table("", group)
        return section


def _scopes(operation: dict[str, Any]) -> str:
    found = [scope for each in operation.get("security", []) for scope in each.get("token", ())]
    return " or ".join(found) or ("any token" if operation.get("security") else "none")


def _row(*cells: nodes.Node) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def _load_public_names(_app: Sphinx) -> None:
    """Load the names that packages load on first use, because autodoc only sees loaded ones."""
    for package in PUBLIC:
        module = import_module(package)
        vars(module).update({name: getattr(module, name) for name in module.__all__})


def setup(app: Sphinx) -> None:
    """Register the directives."""
    app.connect("builder-inited", _load_public_names)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("http-operations", HttpOperations)

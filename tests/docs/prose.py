"""``make prose``: find idioms that we avoid, in documentation, docstrings, comments, messages and test names.

Prints the findings and their number per folder. With ``--all`` it also prints idioms that are merely
suspicious; they do not count. The status is 1 if there are findings. Code in Markdown, and names in
backquotes, are ignored.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_WORDS = 4
"""A string literal of at least this many words counts as prose."""

AVOID = {
    r"anew": "again, from scratch, new",
    r"beside": "next to, in addition to, with",
    r"(?:of|than|and|from|by|on|to) (?:theirs|ours|hers|yours)": "their, our, and the noun",
    r"none of (?:theirs|ours)": "no, and the noun",
    r"of (?:its|their|a|one's|his) own": "its own, separate",
    r"(?:is|are|be|was|were|been|being|gets?) told": "gets, receives, we pass",
    r"whoever|whomever": "anyone who",
    r"for ever": "forever",
    r"where there (?:is|are) (?:none|no)": "if there is no",
    r"such a one|the like": "name the thing",
    r"(?:there|here)(?:by|in|of|upon|to)|where(?:in|of|upon|to)": "in this, of which",
    r"as it were|so to speak|of a sudden": "(leave out)",
}
"""Idioms that the repository must not contain."""

CONSIDER = {
    r"such(?! as\b| that\b| an?\b)": "this, these, like that",
    r"whose": "with, that has",
    r"whatever": "any, everything that",
    r"(?:of|by|for|from|in|than|with|on|to|as|about) what": "name the thing",
    r"what (?:is|was|are|were|it|they|one) \w+": "name the thing",
    r"the former|the latter": "name the thing",
}
"""Idioms that are often a sign of a sentence that can be simpler."""

RULES = AVOID | CONSIDER
PATTERN = re.compile("|".join(rf"(?P<r{n}>\b(?:{rule})\b)" for n, rule in enumerate(RULES)), re.IGNORECASE)
REMEDIES = list(RULES.values())


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Return line numbers and the prose on them."""
    text = path.read_text(encoding="utf-8")
    lines = enumerate(text.splitlines(), 1)
    if path.suffix == ".py":
        return _python(text)
    if path.suffix == ".js":
        return ((number, line) for number, line in lines if re.match(r"\s*(//|\*|/\*)", line))
    if path.suffix in (".md", ".j2"):
        return _markdown(text)
    return ((number, line) for number, line in lines if "#" in line)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def _python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if len(node.value.split()) >= MESSAGE_WORDS:
            yield from enumerate(node.value.splitlines(), node.lineno)


def findings(path: Path) -> Iterator[tuple[int, str, str, bool]]:
    """Return line, wording, remedy, and whether the wording must be avoided, of every finding in a file."""
    for number, line in sorted(prose_of(path)):
        for found in PATTERN.finditer(re.sub(r"`[^`]*`", "", line)):
            index = int(str(found.lastgroup).removeprefix("r"))
            yield number, found[0], REMEDIES[index], index < len(AVOID)


def files() -> Iterator[Path]:
    """Return the tracked files that contain prose, and those that are new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    kinds = (".py", ".md", ".js", ".yaml", ".yml", ".j2", ".cfg", ".service", ".sbatch")
    for name in listed:
        path = ROOT / name
        is_prose = name.endswith(kinds) or path.name.startswith(("Dockerfile", "Makefile"))
        if is_prose and path.is_file() and path != Path(__file__).resolve():
            yield path


def main() -> int:
    """Print the findings; returns 1 if there are any."""
    parser = argparse.ArgumentParser(prog="make prose", description=__doc__)
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the numbers")
    parser.add_argument("-a", "--all", action="store_true", help="also print suspicious idioms")
    parser.add_argument("folders", nargs="*", help="only files below these folders")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for path in files():
        name = str(path.relative_to(ROOT))
        if arguments.folders and not name.startswith(tuple(arguments.folders)):
            continue
        for line, words, remedy, is_avoided in findings(path):
            counts["/".join(Path(name).parts[:-1][:3]) or "."] += is_avoided
            if not arguments.quiet and (is_avoided or arguments.all):
                print(f"{name}:{line}: “{words}”: {remedy}")
    for folder, count in sorted(counts.items()):
        if count:
            print(f"{count:5} {folder}")
    print(f"{counts.total():5} in total")
    return 1 if counts.total() else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a node allows: models by patterns, checkpoints by directories. The documentation agrees with it."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_service.client import NodeWork
from zbv_service.client.admission import is_model_allowed, is_script_allowed
from zbv_worker.agent.policy import AgentOptions
from zbv_worker.commands.cli import _parser
from zbv_worker.errors import InvalidRun
from zbv_worker.model.spec import require_named

REPOSITORY = ROOT
DOCUMENTS = tuple(
    f"docs/{of}.md" for of in ("run-the-service", "security", "clusters", "training", "containers")
)


def work(directory: str | None, factory: str = "a.models:build") -> NodeWork:
    checkpoint = None if directory is None else {"directory": directory, "every": 1}
    document = {"options": {"checkpoint": checkpoint}}
    return NodeWork("r" * 32, 0, 0, 1, 1, "h:1", "p", factory, document)


def allowing(*directories: Path) -> AgentOptions:
    """Options of an agent that allows the models of ``a`` and checkpoints in some directories."""
    return AgentOptions("http://zbv", "node", "127.0.0.1", 1, Path("state"), ("a.*",), directories)


@pytest.mark.parametrize(
    ("pattern", "factory", "expected"),
    [
        ("a.models.*", "a.models:build", True),
        ("a.models.*", "a.models.gpt:build", True),
        ("a.models.*", "a.modelsx:build", False),
        ("a.models", "a.models.gpt:build", False),
        ("a.*", "b.a:build", False),
        ("a.models:build", "a.models:build", True),
        ("a.models:build", "a.models:other", False),
    ],
)
def test_a_pattern_with_a_star_allows_package_and_modules(pattern: str, factory: str, expected: bool) -> None:
    assert is_model_allowed(factory, [pattern]) is expected


def test_checkpoints_are_kept_in_allowed_directories_and_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "shared", tmp_path / "secret"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    (tmp_path / "mount").symlink_to(inside)

    def refusal(directory: object) -> str | None:
        return allowing(tmp_path / "mount").refusal_of(work(str(directory)))

    for directory in (inside, inside / "run" / "1", tmp_path / "mount" / "run", inside / "x" / ".." / "y"):
        assert refusal(directory) is None, directory
    others = tmp_path, tmp_path / "shared-not", inside / ".." / "secret", inside / "link" / "run", Path("/")
    for directory in (outside, *others):
        said = f"it allows {tmp_path / 'mount'}. Start it with --allow-checkpoint-dir"
        assert said in str(refusal(directory)), directory
    assert f"which is {outside / 'run'}" in str(refusal(inside / "link" / "run"))
    assert "must be an absolute path" in str(refusal("ck"))


def test_without_an_allowed_directory_only_runs_with_checkpoints_are_refused(tmp_path: Path) -> None:
    assert allowing().refusal_of(work(None)) is None
    assert "it allows none" in str(allowing().refusal_of(work(str(tmp_path))))


def script(path: Path | str) -> NodeWork:
    return NodeWork("r" * 32, 0, 0, 1, 1, "h:1", "p", None, {}, script=str(path))


def test_scripts_run_from_allowed_paths_and_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "shared", tmp_path / "secret"
    for folder in (inside, outside):
        (folder / "deep").mkdir(parents=True)
        for name in ("train.py", "deep/other.py"):
            (folder / name).write_text("")
    (inside / "link.py").symlink_to(outside / "train.py")
    (tmp_path / "mount").symlink_to(inside)
    options = replace(allowing(), allowed_scripts=(str(tmp_path / "mount" / "*.py"),))
    assert options.allows["scripts"] == [str(tmp_path / "mount" / "*.py")]
    for path in ("mount/train.py", "mount/deep/other.py"):
        assert options.refusal_of(script(tmp_path / path)) is None
    for path, message in (
        ("secret/train.py", "does not run script"),
        ("mount/link.py", f"which is {outside / 'train.py'}: it allows {tmp_path}/mount"),
        ("mount/../secret/train.py", "does not run script"),
        ("mount/absent.py", "has no file"),
    ):
        assert message in str(options.refusal_of(script(f"{tmp_path}/{path}")))
    refusal = str(allowing().refusal_of(script(inside / "train.py")))
    assert f"it allows none. Start it with --allow-script '{inside / 'train.py'}'" in refusal


def test_a_star_allows_every_script_and_a_path_with_brackets_can_be_named(tmp_path: Path) -> None:
    for name in ("a.py", "[x].py", "x.py"):
        (tmp_path / name).write_text("")
    for pattern, names in (("*", ["a.py", "[x].py"]), (f"{tmp_path}/[x].py", ["[x].py", "x.py"])):
        options = replace(allowing(), allowed_scripts=(pattern,))
        for name in names:
            path = str(tmp_path / name)
            assert is_script_allowed(path, [pattern]), (pattern, name)  # as the service decides
            assert options.refusal_of(script(path)) is None, (pattern, name)
    named = replace(allowing(), allowed_scripts=(f"{tmp_path}/[x].py",))
    assert "does not run script" in str(named.refusal_of(script(tmp_path / "a.py")))


def test_files_of_a_model_are_read_in_allowed_folders_and_nowhere_else(tmp_path: Path) -> None:
    """Symbolic links are resolved, as those of scripts."""
    inside, outside = tmp_path / "models", tmp_path / "secret"
    for folder in (inside / "m", outside):
        folder.mkdir(parents=True)
        (folder / "data.txt").write_text("text")
    (inside / "link").symlink_to(outside)
    (inside / "link.txt").symlink_to(outside / "data.txt")
    (tmp_path / "mount").symlink_to(inside)
    patterns = (f"transformers:{tmp_path}/mount/*", "a.*")
    options = replace(allowing(), allowed_models=patterns)

    def refusal(model: str, data: str | None = None) -> str | None:
        document = {"model": {"arguments": {} if data is None else {"data": f"{tmp_path}/{data}"}}}
        named = replace(work(None, f"transformers:{tmp_path}/{model}"), document=document)
        said = options.refusal_of(named)
        for path in (model, data):  # the ranks look again, when they read the files
            if path is not None:
                with pytest.raises(InvalidRun) if said and path in said else nullcontext():
                    require_named(f"transformers:{tmp_path}/{path}", patterns)
        return said

    assert refusal("mount/m") is None
    assert refusal("mount/m", "mount/m/data.txt") is None
    for model, data in (
        ("secret", None),
        ("mount/link", None),
        ("mount/link/below", None),
        ("mount/m", "mount/link.txt"),
        ("mount/m", "secret/data.txt"),
        ("mount/m", "mount/../secret/data.txt"),
    ):
        assert "does not load model" in str(refusal(model, data)), (model, data)


def test_an_agent_sends_its_policy_with_directories_as_given_and_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert allowing(tmp_path / "link").allows == {
        "models": ["a.*"],
        "scripts": [],
        "checkpoint_directories": [str(tmp_path / "link"), str(tmp_path / "real")],
    }


def commands(document: str) -> list[list[str]]:
    """The commands in a document that start agents, runs and profiles, without their comments."""
    text = (REPOSITORY / document).read_text().replace("\\\n", " ")
    found = re.findall(r"^ *((?:zbv-worker (?:agent|run|profile)|zbv-service run) .*)$", text, re.MULTILINE)
    return [shlex.split(line.partition("  #")[0]) for line in found]


def test_the_documents_agents_run_the_models_and_checkpoints_that_the_documents_submit() -> None:
    agents, runs = [], []
    for document in DOCUMENTS:
        for program, command, *words in commands(document):
            if command == "agent":
                agents.append(_parser().parse_args([command, *words]))
            elif program == "zbv-service":
                runs.append(words)
    assert len(agents) >= 2
    assert runs
    for words in runs:
        if "--script" in words:
            path = words[words.index("--script") + 1]
            assert any(is_script_allowed(path, agent.allow_script) for agent in agents), path
    for agent in agents:
        for words in runs:
            if "--script" in words:
                continue
            factory = words[words.index("--model") + 1]
            if factory.startswith("mypackage."):
                assert is_model_allowed(factory, agent.allow_model), (factory, agent.allow_model)
                directory = Path(words[words.index("--checkpoint-dir") + 1])
                assert any(directory.is_relative_to(each) for each in agent.allow_checkpoint_dir)

"""Everything that docs/your-model.md shows works as printed, in the order of the page."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.rank_fixtures import RANK_VARIABLES
from zbv_solver.commands.cli import main as zbv
from zbv_worker.commands.cli import main as zbv_worker
from zbv_worker.errors import InvalidRun
from zbv_worker.host.local_ranks import LocalRanks, python_command

PAGE = (ROOT / "docs" / "your-model.md").read_text()
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)

SIZES = ["--model-args", '{"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2}']
"""A small GPT in place of the one of the page."""


class Reader:
    """Does what the page shows.

    Attributes
    ----------
    logs
        What the ranks of each command printed, by command.
    names
        The variables of the blocks that are not files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.logs: dict[str, str] = {}
        self.names: dict[str, Any] = {}

    def follow(self, language: str, code: str) -> None:
        name = re.match(r"# (\w+\.py)\n", code)
        if language == "sh":
            for line in code.splitlines():
                self._run(line, *shlex.split(line))
        elif name is not None:
            (self._folder / name[1]).write_text(code)
        else:
            exec(compile(code, "your-model.md", "exec"), self.names)

    def _run(self, line: str, program: str, *arguments: str) -> None:
        if program == "pip":
            require_extras(arguments[-1])
        elif program == "zbv":
            assert zbv([*arguments, "--effort", "quick"]) == 0
        elif program == "zbv-worker":
            sizes = SIZES if "zbv_worker.models.gpt:gpt" in arguments else []
            assert zbv_worker([*arguments, "--repeats", "2", *sizes]) == 0
        elif program == "python":
            self._ranks(line, 1, "support.run_script", *arguments)
        else:
            flag, count, *rest = arguments
            assert (program, flag) == ("torchrun", "--nproc-per-node")
            if rest[:2] == ["--no-python", "zbv-worker"]:
                self._ranks(line, int(count), "zbv_worker", *rest[2:])
            else:
                self._ranks(line, int(count), "support.run_script", *rest)

    def _ranks(self, line: str, count: int, module: str, *arguments: str) -> None:
        logs = self._folder / f"logs-{len(self.logs)}"
        with LocalRanks([python_command(module, *arguments)] * count, logs) as ranks:
            ranks.wait(timeout=240)
            self.logs[line] = "".join(map(ranks.log, range(count)))


def require_extras(package: str) -> None:
    """The package of a ``pip install`` has these extras; it is not installed here."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: Any = re.fullmatch(r"\.\[([\w,]+)\]", package)
    assert set(found[1].split(",")) <= set(known)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "mymodel", raising=False)
        for name in RANK_VARIABLES:
            patch.delenv(name, raising=False)
        found = Reader(folder)
        for language, code in BLOCKS:
            found.follow(language, code)
        yield found
        sys.modules.pop("mymodel", None)


def losses(log: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", log)]


@pytest.mark.parametrize("line", ["python train.py", "torchrun --nproc-per-node 2 train.py"])
def test_the_five_lines_train(reader: Reader, line: str) -> None:
    found = losses(reader.logs[line])
    assert len(found) == 20
    assert found[-1] < found[0]
    assert "zbv: planned 8 microbatches" in reader.logs[line]


def test_names_and_steps_are_as_printed(reader: Reader) -> None:
    assert reader.names["checkpoints"].step == 6
    assert "['embedding.weight', 'block.0.0.weight']" in PAGE
    names = list(reader.names["layers"])
    assert names[:2] == ["embedding", "block.0"]


def test_runs_on_the_command_line_train(reader: Reader) -> None:
    logs = [log for line, log in reader.logs.items() if "zbv-worker run" in line]
    assert len(logs) == 2
    for log in logs:
        found = losses(log)
        assert len(found) == 20
        assert found[-1] < found[0]


def test_a_run_and_a_pipeline_resume_from_each_others_checkpoints(reader: Reader) -> None:
    torch, pipe_of = reader.names["torch"], reader.names["zbv"].Pipeline
    model = importlib.import_module("mymodel").layers()
    with pipe_of(reader.names["plan"], model) as pipe:
        optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=1e-2)
        checkpoints = pipe.checkpoints("saved", optimizer)
        assert checkpoints.step == 20
        for step in checkpoints.steps(22, every=1):
            pipe.step(microbatches=[model.microbatch(step, index) for index in range(4)])
            optimizer.step()
            optimizer.zero_grad()
    line = "torchrun --nproc-per-node 2 --no-python zbv-worker run --plan-file plan.json"
    line += " --model mymodel:layers --steps 24 --checkpoint-dir saved"
    reader.follow("sh", line)
    assert re.findall(r"step (\d+): loss", reader.logs[line]) == ["22", "23"]


def test_errors_begin_as_the_table_says(reader: Reader) -> None:
    """Those that one process can cause."""
    pipe_of, nn, torch = reader.names["zbv"].Pipeline, reader.names["nn"], reader.names["torch"]
    shown = re.findall(r"^\| `(?:\w+: )([^`…]+?) ?…?` \|", PAGE, flags=re.MULTILINE)
    x = torch.randn(30, 8)
    with pipe_of(reader.names["plan"], [nn.Linear(8, 8)] * 2, nn.functional.mse_loss) as pipe:
        with pytest.raises(InvalidRun) as rows:
            pipe.step(x, x)
        with pytest.raises(InvalidRun) as keyword:
            pipe.step(x[:8], x[:8], mask=x[:8])
    for said in (rows, keyword):
        assert any(str(said.value).startswith(begin) for begin in shown), said.value

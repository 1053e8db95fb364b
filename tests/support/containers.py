"""Reads Dockerfiles and compose files strictly, because the tests have no container engine to check them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.paths import ROOT

DOCKER = ROOT / "docker"
_KNOWN = {
    *("ARG", "FROM", "WORKDIR", "COPY", "ENV", "RUN", "LABEL", "USER", "VOLUME", "EXPOSE"),
    *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of the exec form; other forms fail."""
        listed = re.search(r"\[.*\]", self.text)
        assert listed is not None, f"{self.name} {self.text}: not in exec form, so that signals do not arrive"
        words: list[str] = json.loads(listed[0])
        return words


@dataclass(frozen=True)
class Dockerfile:
    """A Dockerfile: the arguments before its first stage, and its stages."""

    name: str
    arguments: dict[str, str]
    stages: list[list[Instruction]]

    @classmethod
    def read(cls, name: str) -> Dockerfile:
        """Read one of ``docker/``; an unknown instruction fails."""
        lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
        arguments: dict[str, str] = {}
        stages: list[list[Instruction]] = []
        for line in filter(None, joined.splitlines()):
            instruction = Instruction(*line.split(maxsplit=1))
            assert instruction.name in _KNOWN, line
            if instruction.name == "FROM":
                stages.append([])
            if stages:
                stages[-1].append(instruction)
            else:
                key, _, value = instruction.text.partition("=")
                arguments[key] = value
        return cls(name, arguments, stages)

    def all(self, name: str) -> list[Instruction]:
        return [found for stage in self.stages for found in stage if found.name == name]

    def last(self, name: str) -> Instruction:
        """The last one of the final stage, which takes effect."""
        return [found for found in self.stages[-1] if found.name == name][-1]

    @property
    def variables(self) -> dict[str, str]:
        settings = [word for found in self.stages[-1] if found.name == "ENV" for word in found.text.split()]
        return dict(word.split("=", 1) for word in settings)

    @property
    def sources(self) -> set[str]:
        """The paths that are copied from the repository."""
        copies = [found.text.split() for found in self.all("COPY") if not found.text.startswith("--from=")]
        return {source for *copied, _ in copies for source in copied}


@dataclass(frozen=True)
class Container:
    """A service of the compose file, with its image."""

    name: str
    service: dict[str, Any]
    image: Dockerfile | None

    @property
    def words(self) -> list[str]:
        """Its command line; for a foreign image, only the part in the compose file."""
        entrypoint, command = self.service.get("entrypoint"), self.service.get("command")
        if self.image is not None and entrypoint is None:
            entrypoint = self.image.last("ENTRYPOINT").words
            command = self.image.last("CMD").words if command is None else command
        return [word.replace("$$", "$") for word in [*(entrypoint or []), *(command or [])]]

    @property
    def variables(self) -> dict[str, str]:
        own = {} if self.image is None else self.image.variables
        return own | {name: str(value) for name, value in self.service.get("environment", {}).items()}

    @property
    def health(self) -> list[str] | None:
        """The command of its health check, if it has one."""
        own = self.service.get("healthcheck", {})
        if own.get("disable"):
            return None
        if "test" in own:
            kind, *words = own["test"]
            assert kind == "CMD", f"{self.name}: {kind}"
            return [str(word) for word in words]
        return None if self.image is None else self.image.last("HEALTHCHECK").words

    @property
    def user(self) -> str:
        given = self.service.get("user")
        if given is not None:
            return str(given)
        return "" if self.image is None else self.image.last("USER").text

    @property
    def mounts(self) -> dict[str, tuple[str, bool]]:
        """By path: the mounted volume or file, and whether it is writable."""
        found = [mount.split(":") for mount in self.service.get("volumes", [])]
        return {path: (source, options != ["ro"]) for source, path, *options in found}

    @property
    def writable(self) -> set[str]:
        volumes = set() if self.image is None else set(self.image.last("VOLUME").words)
        mounted = {path for path, (_, can_write) in self.mounts.items() if can_write}
        return volumes | mounted | set(self.service.get("tmpfs", []))

    @property
    def networks(self) -> set[str]:
        return set(self.service.get("networks", []))


def compose(*names: str) -> dict[str, Any]:
    """Compose files, later ones over earlier ones: mappings merge, everything else is replaced."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, yaml.safe_load((DOCKER / name).read_text()))
    return merged


def containers(document: dict[str, Any]) -> dict[str, Container]:
    found = {}
    for name, service in document["services"].items():
        build = service.get("build")
        image = None if build is None else Dockerfile.read(Path(build["dockerfile"]).name)
        found[name] = Container(name, service, image)
    return found


def _merge(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merge(below.get(key), value) for key, value in above.items()}
    return above

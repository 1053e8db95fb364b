"""The flags of ``zbv estimate`` and ``zbv layout``, generated from the fields of their documents.

Names, types, words and descriptions are those of the sections of a configuration, and of
:class:`~zbv_models.layouts.layout.Fixed`.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo
from zbv_models.estimate.adapters import from_peft
from zbv_models.estimate.config import EstimateConfig, ParallelConfig
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.sections import preset_names, presets_of
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import BatchConfig

from zbv_solver.commands.messages import flag_of
from zbv_solver.commands.parser import Parser
from zbv_solver.documents.files import file_label, read_json
from zbv_solver.errors import InvalidInput

SECTIONS: dict[str, Any] = {name: field.annotation for name, field in EstimateConfig.model_fields.items()}
NONE = "none"
"""What undoes a value of a file or a preset, for keys that may be absent."""
FLAGS = tuple(field.name for field in dataclasses.fields(Fixed))
"""The parts of a layout that may be fixed."""
KEPT = ("precision", "optimizer", "recompute_modules", "pairs", "copies")
"""Keys of the section ``parallel`` that are flags of ``zbv layout``: what training keeps."""
EXECUTORS = ("zbv", "torch", "megatron", "torchtitan", "any")
OF_LAYOUTS = {
    "recompute": "what every stage recomputes; per-stage lets the plan choose none or full for each",
    "recompute_layers": "how many first layers of every stage are recomputed in full (executor megatron)",
    "placement": "kinds of groups, from neighbouring devices to the farthest",
    "pipeline_parallel": ParallelConfig.model_fields["pp_degree"].description,
}
"""Parts of a layout that are no keys of a configuration, or have another meaning there."""


class Values(NamedTuple):
    """What a key accepts."""

    kinds: frozenset[type]
    """Types of plain values: ``int``, ``float``, ``bool``, ``str``."""
    words: tuple[str, ...]
    """The only words, if there are such."""
    listed: tuple[str, ...]
    """The only words of a list."""
    is_list: bool
    """Whether it is a list of words."""
    is_optional: bool

    @classmethod
    def of(cls, annotation: Any) -> Values:
        """The values of an annotated type; those of objects are left out."""
        options = list(_alternatives(annotation))
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        lists = [get_args(option)[0] for option in options if get_origin(option) is tuple]
        listed = [word for item in lists if get_origin(item) is Literal for word in get_args(item)]
        is_list = bool(listed) or any(str in _alternatives(item) for item in lists)
        kinds = {option for option in options if option in (int, float, bool, str)}
        return cls(
            frozenset(kinds | ({str} if words else set())),
            tuple(words),
            tuple(listed),
            is_list,
            NoneType in options,
        )

    def read(self, text: str) -> Any:
        """A flag's value; ``none`` is the absent value where the key may be absent."""
        if text == NONE and self.is_optional and NONE not in self.words:
            return None
        return int(text) if int in self.kinds else float(text) if float in self.kinds else text

    @property
    def metavar(self) -> str:
        """How help shows them."""
        plain = "INT" if int in self.kinds else "FLOAT" if float in self.kinds else "LETTERS"
        undone = [NONE] if self.is_optional and NONE not in self.words else []
        return "|".join([*(self.words or (plain,)), *undone])


def _alternatives(annotation: Any) -> list[Any]:
    """The types and literals of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for part in get_args(annotation) for option in _alternatives(part)]
    return [annotation]


def flags(section: str) -> dict[str, FieldInfo]:
    """The keys of a section that have a flag: all but objects."""
    found: dict[str, FieldInfo] = SECTIONS[section].model_fields
    values = {key: Values.of(field.annotation) for key, field in found.items()}
    return {key: field for key, field in found.items() if values[key].kinds or values[key].is_list}


def add_estimate_flags(parser: Parser) -> None:
    """The arguments of ``zbv estimate``."""
    parser.offered["--preset"] = preset_names
    parser.add_argument("--config", metavar="FILE", help="model, parallel and device (JSON), or -")
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="start from a model or device that zbv knows; may be repeated",
    )
    _add_adapter(parser)
    parser.add_argument("--list-presets", action="store_true", help="list the presets, then exit")
    parser.add_argument("--table", action="store_true", help="also print tables of layers and memory")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="problem file (default: -)")
    for section in SECTIONS:
        group = parser.add_argument_group(
            section, "replaces values of the file and the presets; none undoes a value that may be absent"
        )
        for key, field in flags(section).items():
            shown: dict[str, Any] = {"dest": f"{section}.{key}", "default": argparse.SUPPRESS}
            _add_value(group, key, Values.of(field.annotation), field.description, **shown)


def _add_adapter(parser: Parser) -> None:
    text = "adapter_config.json of PEFT: rank, matrices and layers of LoRA; flags replace what it says"
    parser.add_argument("--adapter", metavar="FILE", help=text)


def read_adapter(arguments: argparse.Namespace, section: str = "") -> None:
    """Set the flags that an ``adapter_config.json`` stands for, where they are not given.

    ``section`` is what the names of flags begin with. Raises :class:`InvalidInput` if it cannot be read.
    """
    if arguments.adapter is None:
        return
    values = vars(arguments)
    # Flags of a section are absent unless they are given, others are None.
    given = {
        key
        for key in Transformer.model_fields
        if (name := f"{section}{key}") in values and (section or values[name] is not None)
    }
    document = read_json(arguments.adapter)
    try:
        found = from_peft(document, given)
    except InvalidInput as error:
        raise error.found_in(file_label(arguments.adapter)) from None
    values.update({f"{section}{key}": value for key, value in found.items()})


def _add_value(
    group: argparse._ActionsContainer, key: str, values: Values, text: str | None, **shown: Any
) -> None:
    """The flag of one key."""
    text = (text or "").replace("%", "%%")
    if values.is_list:
        shown |= {"nargs": "+", "metavar": "WORD"}
        if values.listed:
            text = f"{text}: {', '.join(values.listed)}"
            shown |= {"choices": values.listed}
    elif bool in values.kinds:
        shown |= {"action": argparse.BooleanOptionalAction}
    else:
        shown |= {"type": _reader(values), "metavar": values.metavar}
    group.add_argument(flag_of(key), help=text, **shown)


def _reader(values: Values) -> Any:
    def read(text: str) -> Any:
        return values.read(text)

    read.__name__ = "int" if int in values.kinds else "float"  # argparse names it in its errors
    return read


def _add_choice(group: argparse._ActionsContainer, key: str, annotation: Any, text: str | None) -> None:
    """The flag of a key that is absent unless it is given."""
    values = Values.of(annotation)
    if values.is_list:
        _add_value(group, key, values, text)
    elif values.words:
        group.add_argument(flag_of(key), choices=values.words, help=text)
    else:
        group.add_argument(flag_of(key), type=int, metavar="INT", help=text)


def add_layout_flags(parser: Parser) -> None:
    """What ``zbv layout`` and ``zbv-service layout`` search, and how hard."""
    parser.add_argument("model", nargs="?", help="model (JSON) with global_batch, or a config.json, or -")
    parser.offered["--preset"] = partial(presets_of, "model")
    parser.add_argument("--preset", action="append", default=[], metavar="NAME", help="model that zbv knows")
    _add_adapter(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="FILE",
        help="cluster (JSON): nodes, gpus_per_node, device; optionally memory and host_memory (bytes) and "
        "links (latency in µs, bandwidth in GB/s); or -",
    )
    known = BatchConfig.model_fields | {key: ParallelConfig.model_fields[key] for key in KEPT}
    for key, field in known.items():
        _add_choice(parser, key, field.annotation, field.description)
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="problem of `zbv-worker profile`: measured layers replace estimates; repeat it for further "
        "sizes of microbatches",
    )
    parser.add_argument("--top", type=int, default=1, metavar="N", help="layouts to list (default: 1)")
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default=EXECUTORS[0],
        help="program that runs the pipeline; all but zbv have fixed orders (default: zbv)",
    )
    parser.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        help="search better plans for the most promising layouts (default: constructed orders)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end the search after this time, once a layout was planned (default: no limit)",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="also say what other devices, links, memory and batches change",
    )
    parser.add_argument(
        "--points", action="store_true", help="add step and memory of all layouts to the document"
    )
    fixed = parser.add_argument_group("parts of the layout", "the search chooses those that are not given")
    described = {**Transformer.model_fields, **ParallelConfig.model_fields}
    for name, annotation in get_type_hints(Fixed).items():
        text = OF_LAYOUTS[name] if name in OF_LAYOUTS else described[name].description
        _add_choice(fixed, name, annotation, text)


def given_parallel(arguments: argparse.Namespace) -> dict[str, str | list[str]]:
    """The keys of the section ``parallel`` that were given."""
    return {name: value for name in KEPT if (value := getattr(arguments, name)) is not None}

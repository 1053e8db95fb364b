"""What a model of transformers comes from: a configuration, its file, a folder with tensors, or a class."""

from __future__ import annotations

import copy
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from zbv_worker.errors import InvalidRun, describe_error

SUPPORTED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""The model types that tests compare with the unsplit model."""


def require_transformers() -> None:
    """Raise InvalidRun if transformers is missing or too old."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InvalidRun(
            f"found no module {error.name!r}; models of transformers need it. Install it with: "
            f"pip install 'zbv[transformers]'."
        ) from None
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < 5:
        raise InvalidRun(
            f"found transformers {version}; zbv needs 5 or later. Install it with: "
            f"pip install 'transformers>=5'."
        )


def resolved(source: Any) -> tuple[Any, Any, Path | None]:
    """The model class, the configuration, and the folder with tensors."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

    folder = None
    config: Any
    if isinstance(source, type) and issubclass(source, PreTrainedModel):
        made: Any = source
        if made.config_class is None:
            raise InvalidRun(
                f"from_transformers: found the class {made.__name__}, which has no configuration. "
                f"Pass a class as LlamaForCausalLM, or a configuration."
            )
        config = supported(made.config_class())
        require_language_model(made, config)
        return made, config, None
    if isinstance(source, str | Path):
        path = Path(source)
        folder = path if path.is_dir() else None
        config = _read_config(path / "config.json" if path.is_dir() else path)
    elif isinstance(source, PreTrainedConfig):
        config = source
    else:
        raise InvalidRun(
            f"from_transformers: found a {type(source).__name__}; must be a configuration, a model, a model "
            f"class, a folder, or the path of a config.json."
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(supported(config))], config, folder


def require_language_model(model_class: type, config: Any) -> None:
    """Raise InvalidRun if the class is no causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    needed = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not issubclass(model_class, needed):
        raise InvalidRun(
            f"from_transformers: found a {model_class.__name__}, which is no causal language model. Use "
            f"{needed.__name__}, or pass the layers as a list of modules."
        )


def _read_config(path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRun(
            f"from_transformers: found no {path}; must be a folder with a config.json, or that file. Nothing "
            f"is downloaded: download the model first."
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRun(f"{path}: cannot be read as JSON ({error}). Copy the file again.") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    _require_supported(kind)
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # transformers raises classes of several libraries
        raise InvalidRun(f"{path}: transformers rejects it: {describe_error(error)}.") from None


def supported(config: Any) -> Any:
    """The configuration; raises InvalidRun if its family is not supported."""
    _require_supported(config.model_type)
    return config


def _require_supported(kind: object) -> None:
    if kind not in SUPPORTED:
        raise InvalidRun(
            f"found a configuration with model_type {kind!r}; zbv splits the families "
            f"{', '.join(SUPPORTED)}. Pass the layers of other models as a list of modules."
        )


def dtype_of(config: Any) -> torch.dtype:
    """The configuration's dtype, else float32."""
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def on_meta(model_class: Any, config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    """The whole model without memory for its parameters."""
    options = {} if attention is None else {"attn_implementation": attention}
    config = copy.deepcopy(supported(config))
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype, **options)
    except Exception as error:  # transformers raises classes of several libraries
        raise InvalidRun(
            f"transformers cannot build a {model_class.__name__} from this configuration: "
            f"{describe_error(error)}. Correct the configuration."
        ) from error
    return model.train()


def like(source: Any) -> Any:
    """A model on the meta device with the configurations of a given one, also if they change later."""
    model = on_meta(type(source), source.config, source.dtype, source.config._attn_implementation)
    originals = dict(source.named_modules())
    for name, module in model.named_modules():
        if hasattr(module, "config") and hasattr(originals.get(name), "config"):
            module.config = originals[name].config  # masks are made for what the layers use
    return model

"""A vision encoder from the keys of a ``config.json``: its type, its wrapper, patches and projector.

The sources are the modeling files of transformers 5, as for :mod:`zbv_models.estimate.families`.
"""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput

from zbv_models.estimate.families import VISION_KINDS
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Document, Keys, defaults
from zbv_models.estimate.transformers_kinds import VisionKind, Wrapper

WHERE = "/vision_config"
IGNORED = ("standardize", "use_clipped_linears", "global_head_dim", "num_key_value_heads")
"""Two vectors, bounds of values, and sizes that others give."""


def read_vision(document: Document, wrapper: Wrapper, outside: Keys, model: Section) -> tuple[Keys, Section]:
    """The section ``vision`` and the keys it was read from.

    Images are as large as the file says: ``image_size``, or the table of positions. How many images a
    sequence has is not part of a file; one is assumed.

    Parameters
    ----------
    outside
        The keys around ``vision_config``.
    model
        The section ``model`` of the language model.

    Raises :class:`InvalidInput` for an encoder without a formula.
    """
    name = document.get("model_type") or wrapper.vision
    if name == outside.get("model_type"):  # older files repeat it
        name = wrapper.vision
    if not isinstance(name, str) or name not in VISION_KINDS:
        detail = (
            f"found {quoted(name)}; zbv has formulas for {', '.join(VISION_KINDS)}. Write the sizes of the "
            f"encoder as vision in model.json, or remove vision_config to plan the language model alone."
        )
        raise InvalidInput.at(f"{WHERE}/model_type", detail)
    kind = VISION_KINDS[name]
    keys = Keys(document, defaults().get(kind.defaults or name, {}), WHERE)
    hidden = keys.number(*kind.width)
    patch = _side(keys, "patch_size", "spatial_patch_size")
    channels = keys.size("num_channels", "in_channels", "in_chans") or 3
    patches = _patches(keys, patch)
    rows = keys.size("position_embedding_size")  # of the vertical and of the horizontal table
    merged = _merged(wrapper, keys, outside, patches)
    outside.get("projection_hidden_size")  # the width of a projector's norm
    layers = keys.number("num_hidden_layers", "depth", "vt_num_hidden_layers")
    levels = keys.places(layers, "deepstack_visual_indexes")
    widths = {"merged": merged * hidden, "patch": hidden, "model": model.get("hidden")}
    _check_width(keys, kind, model)
    for key in ("projection_dim", "mm_hidden_size", "vocab_size", "head_dim", "tokens_per_second", *IGNORED):
        keys.get(key)  # a head that is not used, a width that others give, or the rate of videos
    return keys, {
        "hidden": hidden,
        "layers": layers,
        "heads": keys.number("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        "ffn": _ffn(keys, kind, hidden),
        "patches": patches,
        "position_table": 2 * rows if rows else None,
        "patch_values": channels * patch**2 * _side(keys, "temporal_patch_size"),
        "merged": merged,
        "pooled": wrapper.pooled,
        "projector": [widths[each] if each in widths else keys.number(each) for each in wrapper.projector],
        "projectors": 1 + len(levels),
        **_pieces(keys, layers, patch),
        **kind.model,
    }


def _check_width(keys: Keys, kind: VisionKind, model: Section) -> None:
    """Raise :class:`InvalidInput` where the encoder gives tokens of another width than the model's."""
    for name in ("out_hidden_size", "text_hidden_size", "hidden_size"):
        if name in kind.width:
            continue
        width = keys.size(name)
        if keys.has(name) and width != model.get("hidden"):
            rule = f"must be the width of the language model ({model.get('hidden')})."
            raise keys.wrong(name, f"found {quoted(width)}; {rule}")


def _ffn(keys: Keys, kind: VisionKind, hidden: int) -> int | None:
    """The width of its MLPs, which some files give as a multiple of the encoder's."""
    if kind.ffn != ("mlp_ratio",):
        return keys.size(*kind.ffn)
    ratio = keys.get("mlp_ratio")
    if ratio is None:
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1000:
        raise keys.wrong("mlp_ratio", f"found {quoted(ratio)}; must be a number above 0.")
    return int(hidden * ratio)


def _pieces(keys: Keys, layers: int, patch: int) -> Section:
    """The pieces of an image within which most blocks attend (Bai et al. 2025, Qwen2.5-VL, §2.1.1)."""
    size = keys.size("window_size")
    if size is None:
        return {}
    return {
        "window": max(1, size // patch) ** 2,
        "full_attention": keys.places(layers, "fullatt_block_indexes"),
    }


def _side(keys: Keys, *names: str) -> int:
    """A size in pixels of a square, 1 if the type of encoder has none."""
    name, value = names[0], keys.get(*names)
    if isinstance(value, list | tuple):
        if not value or list(value) != [value[0]] * len(value):
            raise keys.wrong(
                name, f"found {quoted(value)}; zbv reads squares only. Write model.json instead."
            )
        value = value[0]
    if value is not None and (type(value) is not int or not 1 <= value <= 100_000):
        raise keys.wrong(name, f"found {quoted(value)}; must be a whole number above 0.")
    return value or 1


def _patches(keys: Keys, patch: int) -> int:
    """Patches of an image: of the largest, or as many as there are learned positions."""
    table: Any = keys.get("num_position_embeddings")
    if table is not None:
        return keys.number("num_position_embeddings")
    if keys.get("pos_emb_height", "init_pos_emb_height") is not None:
        keys.get("pos_emb_time", "init_pos_emb_time")
        return keys.number("pos_emb_height", "init_pos_emb_height") * keys.number(
            "pos_emb_width", "init_pos_emb_width"
        )
    if (tokens := keys.size("default_output_length")) is not None:  # Gemma 4 says how many tokens it gives
        return tokens * _side(keys, "pooling_kernel_size") ** 2
    if keys.get("image_size") is None:
        detail = (
            "this key is absent, and this type of encoder has no default. Add how many pixels a side of an "
            "image has, or remove vision_config to plan the language model alone."
        )
        raise keys.wrong("image_size", detail)
    return max(1, _side(keys, "image_size") // patch) ** 2


def _merged(wrapper: Wrapper, keys: Keys, outside: Keys, patches: int) -> int:
    """Patches that become one token."""
    name = wrapper.merged
    if name is None:
        return 1
    if name == "pixel_shuffle_ratio":
        ratio = keys.get(name)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise keys.wrong(name, f"found {quoted(ratio)}; must be above 0 and at most 1.")
        return round(1 / ratio**2)
    if name == "mm_tokens_per_image":
        return max(1, patches // outside.number(name))
    where = outside if outside.has(name) or keys.get(name) is None else keys
    return _side(where, name) ** 2

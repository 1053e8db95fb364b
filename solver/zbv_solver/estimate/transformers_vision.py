"""A vision encoder and its projector from the keys of a ``config.json``."""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput
from zbv_solver.estimate.transformers_keys import Document, Keys
from zbv_solver.estimate.transformers_kinds import VISION_KINDS, Section, Wrapper

PROJECTOR = ("projection_hidden_size",)
"""Keys around the encoder's: the width of a projector's norm."""
WHERE = "/vision_config"


def read_vision(
    document: Document, wrapper: Wrapper, outside: Keys, model: Section, defaults: dict[str, Document]
) -> tuple[Keys, Section]:
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
    keys = Keys(document, defaults.get(kind.defaults or name, {}), WHERE)
    hidden = keys.number("hidden_size", "vt_hidden_size")
    patch, channels = _side(keys, "patch_size"), keys.count("num_channels", "in_channels") or 3
    patches = _patches(keys, patch)
    merged = _merged(wrapper, keys, outside, patches)
    outside.get(*PROJECTOR)
    levels = keys.get("deepstack_visual_indexes") or []
    if not isinstance(levels, list):
        detail = f"found {quoted(levels)}; must be a list of numbers of layers."
        raise keys.wrong("deepstack_visual_indexes", detail)
    widths = {"merged": merged * hidden, "patch": hidden, "model": model.get("hidden")}
    for key in (
        "out_hidden_size",
        "text_hidden_size",
        "projection_dim",
        "mm_hidden_size",
        "vocab_size",
        "head_dim",
    ):
        keys.get(key)  # the language model's width, or a head that is not used
    return keys, {
        "hidden": hidden,
        "layers": keys.number("num_hidden_layers", "depth", "vt_num_hidden_layers"),
        "heads": keys.number("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        "ffn": keys.get("intermediate_size", "vt_intermediate_size"),
        "patches": patches,
        "patch_values": channels * patch**2 * _side(keys, "temporal_patch_size"),
        "merged": merged,
        "pooled": wrapper.pooled,
        "projector": [widths[each] if each in widths else keys.number(each) for each in wrapper.projector],
        "projectors": 1 + len(levels),
        **kind.model,
    }


def _side(keys: Keys, name: str) -> int:
    """A size in pixels of a square, 1 if the type of encoder has none."""
    value = keys.get(name)
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

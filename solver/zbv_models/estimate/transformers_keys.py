"""The keys of a ``config.json``: which ones were read, and which ones have no effect on costs.

A reader asks :class:`Keys` for values. In the end, every key must have been read or be known to have no
effect; :meth:`Keys.unread` names the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput, Issue

Document = dict[str, Any]

WITHOUT_EFFECT = {
    "the file": (
        "architectures auto_map dtype model_type name_or_path _name_or_path _from_model_config torch_dtype "
        "transformers_version tokenizer_class prefix problem_type task_specific_params "
        "finetuning_task id2label label2id license language_model_only model_max_length "
        "max_sequence_length seq_length max_seq_len num_labels for_llm_compressor unsloth_fixed "
        "unsloth_version"
    ),
    "its quantised weights": (
        "quantization_config compression_config expert_dtype moe_router_dtype mamba_ssm_dtype "
        "mamba_ssm_cache_dtype quantization fp32_attention"
    ),
    "generation and outputs": (
        "use_cache cache_implementation return_dict output_attentions output_scores "
        "output_hidden_states output_router_logits return_dict_in_generate do_sample early_stopping "
        "bad_words_ids begin_suppress_tokens suppress_tokens diversity_penalty length_penalty "
        "repetition_penalty exponential_decay_length_penalty encoder_no_repeat_ngram_size "
        "no_repeat_ngram_size forced_bos_token_id forced_eos_token_id max_length min_length num_beams "
        "num_beam_groups num_return_sequences remove_invalid_values temperature top_k top_p typical_p "
        "tf_legacy_loss torchscript num_logits_to_keep keys_to_ignore_at_inference use_return_dict "
        "summary_type summary_use_proj summary_first_dropout summary_proj_to_labels "
        "summary_activation classifier_dropout num_reward_heads is_decoder is_llama_config"
    ),
    "initial values": (
        "initializer_range initializer_factor init_std init_method rescale_prenorm_residual "
        "time_step_floor time_step_limit time_step_max time_step_min time_step_rank "
        "layer_scale_init_value"
    ),
    "positions": (
        "rope_theta rope_scaling rope_parameters rope_interleave rope_local_base_freq swa_rope_theta "
        "rotary_pct rotary_emb_base rotary_dim partial_rotary_factor partial_rotary_factors "
        "max_position_embeddings original_max_position_embeddings initial_context_length n_positions "
        "n_ctx no_rope_layers no_rope_layer_interval position_embedding_type use_mrope mla_use_nope "
        "default_theta rope_type attn_temperature_tuning floor_scale attn_scale "
        "indexer_rope_interleave rope_mode"
    ),
    "functions of one value": (
        "hidden_act hidden_activation activation_function mlp_hidden_act mamba_hidden_act "
        "projector_hidden_act attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar "
        "logit_scale logits_scaling residual_multiplier attention_multiplier embedding_multiplier "
        "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn "
        "attention_value_scale swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared "
        "residual_in_fp32 clip_qkv use_gemma_norm output_gate_type slow_but_exact "
        "apply_residual_connection_post_layernorm attention_softmax_in_fp32"
    ),
    "which experts": (
        "norm_topk_prob scoring_func topk_method routed_scaling_factor aux_loss_alpha seq_aux "
        "router_aux_loss_coef router_jitter_noise input_jitter_noise use_routing_bias "
        "use_moe_router_bias moe_router_scaling_factor moe_renormalize moe_router_activation_func "
        "use_grouped_topk moe_norm_min moe_router_enable_expert_bias load_balance_coeff"
    ),
    "how a framework computes": (
        "masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv bias_dropout_fusion "
        "pretraining_tp ep_size chunk_size_feed_forward use_mamba_kernels moe_shared_expert_overlap "
        "use_parallel_residual use_parallel_block use_parallel_embedding attn_implementation "
        "_attn_implementation use_flash_attn "
        "_flash_attn_2_enabled _attn_implementation_autoset gradient_checkpointing"
    ),
    "dropout inside attention": ("attention_dropout attn_pdrop attention_probs_dropout_prob"),
    "single biases, and an encoder's own head": (
        "attention_out_bias lm_head_bias multimodal_projector_bias multi_modal_projector_bias "
        "vision_use_head vision_output_dim"
    ),
    "tokens of images": (
        "image_seq_length num_image_tokens video_seq_length vision_feature_layer "
        "vision_feature_select_strategy vision_soft_tokens_per_image image_grid_pinpoints process_image_mode "
        "use_unified_vision_chunk ignore_index use_image_newline_parameter"
    ),
}
"""Keys that do not change parameters, times or memory, by what they are about."""
ENDINGS = ("_token_id", "_token_ids", "_token_index", "_eps", "_epsilon", "_placeholder")
"""Ends of the names of further such keys: the numbers of tokens, and of norms."""
NEVER_READ: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "bias": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "mlp_only_layers": ([],),
    "qk_norm_type": ("per_head", "per_layer"),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False, True),
    "use_cla": (False,),
    "use_sliding_window": (False,),
    "order_of_interleaved_layers": ("local_attn_first",),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_bidirectional_attention": (False, "vision"),
    "mtp_use_dedicated_embeddings": (False,),
    "normalization_function": ("rmsnorm",),
    "post_norm": (False,),
    "use_rmsnorm": (True,),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger",),
    "pos_emb_type": ("divided_fixed",),
    "projector_dropout": (0,),
    "video_attn_type": ("spatial_temporal",),
    "index_share_for_mtp_iteration": (False, True),
}
"""Keys with the only values, besides null, that zbv has formulas for."""
IGNORED = frozenset(word for words in WITHOUT_EFFECT.values() for word in words.split())


@cache
def defaults() -> dict[str, Document]:
    """The defaults of transformers 5 by type: of the keys that are read, where they are not null."""
    text = files(__package__).joinpath("transformers_defaults.json").read_text(encoding="utf-8")
    found: dict[str, Document] = json.loads(text)
    return found


class Keys:
    """A section of a ``config.json`` with the defaults of its type.

    Parameters
    ----------
    where
        Pointer to the section.
    without_effect
        Further keys that change no costs of its type.
    """

    def __init__(
        self, document: Document, defaults: Document, where: str = "", without_effect: Iterable[str] = ()
    ) -> None:
        self._document, self._defaults, self._where = document, defaults, where
        self._read = set(without_effect)
        self._inner: dict[str, Keys] = {}

    def get(self, *names: str) -> Any:
        """The value of a key that goes by any of some names, else the default; None if it is null.

        Raises :class:`InvalidInput` where two names have different values.
        """
        self._read.update(names)
        given = {name: self._document[name] for name in names if name in self._document}
        values = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            first = next(iter(values))
            if value != values[first]:
                detail = (
                    f"found {quoted(value)}, but {first} says {quoted(values[first])}. Remove one of them."
                )
                raise self.wrong(name, detail)
        if values:
            return next(iter(values.values()))
        return (
            None if given else next((self._defaults[name] for name in names if name in self._defaults), None)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys of the file."""
        return tuple(self._document)

    def inside(self, name: str) -> Keys:
        """The keys of an object; without one, those of its default."""
        value, default = self.get(name), self._defaults.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, f"found {quoted(value)}; must be an object.")
        if name not in self._inner:
            default = default if isinstance(default, dict) else {}
            self._inner[name] = Keys(value or {}, default, f"{self._where}/{name}")
        return self._inner[name]

    def each(self, name: str, length: int) -> list[Keys]:
        """The keys of every object of a list with one per layer."""
        found = []
        for place, value in enumerate(self.listed(length, name)):
            if not isinstance(value, dict):
                raise self.wrong(name, f"found {quoted(value)}; must be a list of objects.")
            found.append(Keys(value, {}, f"{self._where}/{name}/{place}"))
            self._inner[f"{name}/{place}"] = found[-1]
        return found

    def has(self, *names: str) -> bool:
        """Whether the file has a key with a value."""
        return any(self._document.get(name) is not None for name in names)

    def number(self, *names: str) -> int:
        """A whole number above 0; raises :class:`InvalidInput` for others, and if there is none."""
        value = self.size(*names)
        if value is None:
            detail = "this key has no value, and there is no default. Write one: a whole number above 0."
            raise self.wrong(self.name_of(names), detail)
        return value

    def size(self, *names: str) -> int | None:
        """A whole number above 0; None if there is none."""
        value = self.get(*names)
        if value is not None and (type(value) is not int or not 1 <= value <= 10**8):
            raise self.wrong(self.name_of(names), f"found {quoted(value)}; must be a whole number above 0.")
        return value

    def count(self, *names: str, null: int = 0, least: int = 0) -> int:
        """A whole number from ``least``; ``null`` if there is none."""
        value = self.get(*names)
        if value is None:
            return null
        if type(value) is not int or not least <= value <= 10**8:
            rule = f"must be a whole number from {least}."
            raise self.wrong(self.name_of(names), f"found {quoted(value)}; {rule}")
        return value

    def flag(self, *names: str, null: bool = False) -> bool:
        """True or false; ``null`` if there is none."""
        value = self.get(*names)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(self.name_of(names), f"found {quoted(value)}; must be true or false.")
        return null if value is None else value

    def listed(self, length: int | None, *names: str, padding: int = 0) -> list[Any]:
        """A list with an entry per layer; without a ``length``, of one or more.

        Some files also have an entry for each of ``padding`` layers of multi-token prediction, which are
        left out.
        """
        value = self.get(*names)
        if isinstance(value, list) and length is not None and padding and len(value) == length + padding:
            return value[:length]
        if not value or not isinstance(value, list | str) or len(value) != (length or len(value)):
            found = f"{len(value)} entries" if isinstance(value, list) else quoted(value)
            rule = "must be a list of one per layer" + ("." if length is None else f" ({length}).")
            raise self.wrong(self.name_of(names), f"found {found}; {rule}")
        return list(value)

    def name_of(self, names: tuple[str, ...]) -> str:
        """The name that the file has for a key."""
        present = [name for name in names if name in self._document]
        return next((name for name in present if self.has(name)), (*present, *names)[0])

    def places(self, count: int, name: str, first: int = 0) -> list[int]:
        """Places of layers from 0; empty if there is none. The file counts them from ``first``."""
        value = self.get(name)
        if value is None:
            return []
        known = range(first, first + count)
        if not isinstance(value, list) or any(type(at) is not int or at not in known for at in value):
            rule = f"must be a list of numbers of layers, which are below {count + first}."
            raise self.wrong(name, f"found {quoted(value)}; {rule}")
        return [at - first for at in value]

    def wrong(self, name: str, detail: str) -> InvalidInput:
        """The error of a key."""
        return InvalidInput.at(f"{self._where}/{name}", detail)

    def unread(self) -> Iterator[Issue]:
        """One issue per key with a value that was not read and may have an effect."""
        for inner in self._inner.values():
            yield from inner.unread()
        for key, value in self._document.items():
            if value is None or key in self._read or key in IGNORED or key.endswith(ENDINGS):
                continue
            if key not in NEVER_READ:
                detail = (
                    f"found {quoted(value)}; zbv does not know what this key changes. Remove it if it "
                    f"changes neither sizes nor layers. Otherwise, write the sizes as model.json."
                )
                yield Issue(f"{self._where}/{key}", detail)
            elif value not in NEVER_READ[key]:
                allowed = " or ".join([*(quoted(each) for each in NEVER_READ[key]), "null"])
                detail = (
                    f"found {quoted(value)}; zbv has formulas for {allowed} only. Write model.json instead."
                )
                yield Issue(f"{self._where}/{key}", detail)

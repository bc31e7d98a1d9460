"""Checkpoints of WeSpeaker over a pretrained model: w2v-BERT 2.0, WavLM (s3prl) and Whisper.

In: tensors, WeSpeaker's configuration, and the description of the pretrained model. Out: tensors by
our names, and the sections `model` and `frontend` of our configuration. All weights come from the
checkpoint, which has those of the pretrained model, too.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from speakerlab.checkpoints.recognise import recognise
from speakerlab.checkpoints.toolkit_config import ForeignConfig
from speakerlab.frontend.encoders import FAMILIES
from speakerlab.frontend.pretrained_files import describe

PROJECTION = "projection."  # the head
FRONT_END = "frontend."
ENCODER = "frontend.encoder."
# WeSpeaker's `frontend` -> (pattern, replacement) pairs, applied in turn with `re.sub` to a name.
# Replaced by "": a tensor that has no part in the embedding.
RENAMES: Mapping[str, list[tuple[str, str]]] = {
    # transformers' own names, with those of peft around them in the first stage.
    "w2vbert": [
        (r"^frontend\.encoder\.base_model\.model\.", ENCODER),
        (r"\.base_layer\.", "."),
        (r"\.lora_([AB])\.default\.weight$", r".lora_\1"),
    ],
    # Microsoft's names of WavLM, in transformers' terms.
    "s3prl": [
        (r"^frontend\.featurizer\.weights$", "frontend.layer_weights"),
        (r"^frontend\.upstream\.upstream\.model\.", ENCODER),
        (r"^frontend\.encoder\.mask_emb$", ""),
        (r"(feature_extractor\.conv_layers\.\d+)\.0\.", r"\1.conv."),
        (r"(feature_extractor\.conv_layers\.\d+)\.2\.(1\.)?", r"\1.layer_norm."),
        (
            r"^frontend\.encoder\.post_extract_proj\.",
            ENCODER + "feature_projection.projection.",
        ),
        (
            r"^frontend\.encoder\.layer_norm\.",
            ENCODER + "feature_projection.layer_norm.",
        ),
        (r"\.pos_conv\.0\.weight_g$", ".pos_conv.0.parametrizations.weight.original0"),
        (r"\.pos_conv\.0\.weight_v$", ".pos_conv.0.parametrizations.weight.original1"),
        (r"\.pos_conv\.0\.", ".pos_conv_embed.conv."),
        (r"\.self_attn\.grep_linear\.", ".attention.gru_rel_pos_linear."),
        (r"\.self_attn\.grep_a$", ".attention.gru_rel_pos_const"),
        (r"\.self_attn\.relative_attention_bias\.", ".attention.rel_attn_embed."),
        (r"\.self_attn\.", ".attention."),
        (r"\.self_attn_layer_norm\.", ".layer_norm."),
        (r"\.fc1\.", ".feed_forward.intermediate_dense."),
        (r"\.fc2\.", ".feed_forward.output_dense."),
    ],
    # OpenAI's names of Whisper, in transformers' terms.
    "whisper_encoder": [
        # WeSpeaker has the LayerNorm of PMFA in its front end.
        (r"^frontend\.encoder\.ln_post2\.", "norm."),
        (
            r"^frontend\.encoder\.positional_embedding$",
            ENCODER + "embed_positions.weight",
        ),
        (r"^frontend\.encoder\.blocks\.", ENCODER + "layers."),
        (r"\.attn\.query\.", ".self_attn.q_proj."),
        (r"\.attn\.key\.", ".self_attn.k_proj."),
        (r"\.attn\.value\.", ".self_attn.v_proj."),
        (r"\.attn\.out\.", ".self_attn.out_proj."),
        (r"\.attn_ln\.", ".self_attn_layer_norm."),
        (r"\.mlp\.0\.", ".fc1."),
        (r"\.mlp\.2\.", ".fc2."),
        (r"\.mlp_ln\.", ".final_layer_norm."),
    ],
}
# WeSpeaker's `frontend` -> `model_type` of the pretrained model.
MODEL_TYPES = {
    "w2vbert": "wav2vec2-bert",
    "s3prl": "wavlm",
    "whisper_encoder": "whisper",
}


class Translated(NamedTuple):
    """A checkpoint over a pretrained model in our terms."""

    model: dict[str, Any]  # section of the configuration
    frontend: dict[str, Any]  # section of the configuration
    state: dict[str, Tensor]  # of the embedder


def translate(
    tensors: Mapping[str, Tensor],
    foreign: ForeignConfig,
    *,
    pretrained: str | None,
    where: str,
) -> Translated:
    """Translate a checkpoint; pretrained: folder or `hf:owner/name` of the pretrained model.

    Of the pretrained model, only the description is read. Raises ValueError if it is missing or
    does not belong to the checkpoint.
    """
    kind = foreign.kind
    if pretrained is None:
        raise ValueError(
            f"{where}: has a pretrained model as its front end ({kind}); add --pretrained"
            " DIR or hf:owner/name, whose config.json and preprocessor_config.json"
            " describe it"
        )
    description = describe(pretrained)
    model_type = description.architecture.get("model_type")
    if model_type != MODEL_TYPES[kind]:
        raise ValueError(
            f"--pretrained: {pretrained} is a {model_type}, but {where} has a"
            f" {MODEL_TYPES[kind]} ({kind}); give the model that it was trained with"
        )

    renamed = rename(tensors, kind)
    merge_adapters(renamed, foreign)
    state: dict[str, Tensor] = {}
    backbone: dict[str, Tensor] = {}
    for name, tensor in renamed.items():
        part = state if name.startswith(FRONT_END) else backbone
        part[name] = tensor

    frontend = {
        "name": "ssl",
        "model": pretrained,
        "weights": "whole",
        "architecture": description.architecture,
        "preprocessing": description.preprocessing,
    }
    family = FAMILIES[MODEL_TYPES[kind]]
    if kind == "w2vbert":
        num_layers = description.architecture[family.num_layers]
        model, frontend["layers"] = _adapter_mfa(backbone, num_layers)
    elif kind == "whisper_encoder":
        model, frontend["layers"] = _pmfa(backbone, foreign)
    else:
        frontend["mean_norm"] = foreign.subtracts_mean()
        feat_dim = description.architecture[family.channels]
        recognised = recognise(
            {name: tuple(tensor.shape) for name, tensor in backbone.items()},
            toolkits=("wespeaker",),
            pooling=foreign.pooling,
            feat_dim=feat_dim,
            where=where,
        )
        model = {"name": recognised.row.model, "args": recognised.args}
        backbone = {
            name: backbone[published_name]
            for name, published_name in recognised.names.items()
        }

    for name, tensor in backbone.items():
        state[f"backbone.{name}"] = tensor
    return Translated(model=model, frontend=frontend, state=state)


def rename(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the tensors by our names, without the head and what has no part in the embedding."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        our_name = name
        for pattern, replacement in RENAMES[kind]:
            our_name = re.sub(pattern, replacement, our_name)
        if our_name and not our_name.startswith(PROJECTION):
            renamed[our_name] = tensor
    return renamed


def _adapter_mfa(
    backbone: Mapping[str, Tensor], num_layers: int
) -> tuple[dict[str, Any], list[int]]:
    """Return the section `model`, and the first and last state, of W2VBert_Adapter_MFA."""
    num_adapters = sum(
        name.startswith("adapter_layers.") and name.endswith(".0.bias")
        for name in backbone
    )
    args = {
        "embed_dim": len(backbone["bottleneck.weight"]),
        "adapter_dim": len(backbone["adapter_layers.0.0.weight"]),
    }
    # The last states have adapters, usually all.
    first_state = num_layers + 1 - num_adapters
    return {"name": "adapter_mfa", "args": args}, [first_state, num_layers]


def _pmfa(
    backbone: Mapping[str, Tensor], foreign: ForeignConfig
) -> tuple[dict[str, Any], list[int]]:
    """Return the section `model`, and the first and last state, of Whisper_PMFA."""
    first_block, last_block = foreign.whisper_blocks()
    args = {
        "embed_dim": len(backbone["fc.weight"]),
        "mean_norm": foreign.subtracts_mean(),
    }
    # WeSpeaker counts blocks from 0; state 0 is the input of the first block.
    return {"name": "pmfa", "args": args}, [first_block + 1, last_block + 1]


def merge_adapters(renamed: dict[str, Tensor], foreign: ForeignConfig) -> None:
    """Add the adapters of a first stage (LoRA) to the weights that they adapt, in place."""
    suffix = ".lora_A"
    for name in [name for name in renamed if name.endswith(suffix)]:
        layer = name.removesuffix(suffix)
        a_RI = renamed.pop(name)
        b_OR = renamed.pop(f"{layer}.lora_B")
        scale = foreign.lora_alpha() / len(a_RI)
        weight_OI = renamed[f"{layer}.weight"]
        renamed[f"{layer}.weight"] = weight_OI + scale * (b_OR @ a_RI)

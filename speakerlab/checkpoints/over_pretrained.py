"""Checkpoints of other toolkits over a pretrained model.

WeSpeaker's over w2v-BERT 2.0, WavLM (s3prl) and Whisper; those of the authors of w2v-BERT 2.0 for
speaker verification (github.com/ZXHY-82/w2v-BERT-2.0_SV); Microsoft's over WavLM, HuBERT and
wav2vec 2.0 (github.com/microsoft/UniSpeech, downstreams/speaker_verification).

In: tensors, WeSpeaker's configuration if there is one, and the description of the pretrained model.
Out: tensors by our names, and the sections `model` and `frontend` of our configuration. All weights
come from the checkpoint, which has those of the pretrained model, too.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from speakerlab.checkpoints.recognise import recognise
from speakerlab.checkpoints.toolkit_config import ForeignConfig
from speakerlab.frontend.encoders import FAMILIES
from speakerlab.frontend.pretrained_files import Description, describe

PROJECTION = "projection."  # the head
FRONT_END = "frontend."
ENCODER = "frontend.encoder."
LORA_A = ".lora_A"
# (pattern, replacement) pairs, applied in turn with `re.sub` to a name. Replaced by "": a tensor
# that has no part in the embedding.
Renames = list[tuple[str, str]]
# transformers' own names, with those of peft around them in the first stage.
PEFT: Renames = [
    (r"^frontend\.encoder\.base_model\.model\.", ENCODER),
    (r"\.base_layer\.", "."),
    (r"\.lora_([AB])\.default\.weight$", r".lora_\1"),
]
# fairseq's names of wav2vec 2.0 and its followers, in transformers' terms.
FAIRSEQ: Renames = [
    (
        r"^frontend\.encoder\.(mask_emb|final_proj|label_embs_concat|project_q|quantizer)\b.*",
        "",
    ),
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
]
# Kind of checkpoint -> pairs.
RENAMES: Mapping[str, Renames] = {
    "w2vbert": PEFT,
    "s3prl": [
        (r"^frontend\.featurizer\.weights$", "frontend.layer_weights"),
        (r"^frontend\.upstream\.upstream\.model\.", ENCODER),
        *FAIRSEQ,
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
    "w2v-BERT-2.0_SV": [(r"^front\.", FRONT_END), *PEFT],
    "UniSpeech": [
        (r"^feature_weight$", "frontend.layer_weights"),
        (r"^feature_extract\.model\.", ENCODER),
        *FAIRSEQ,
        # WeSpeaker's names of ECAPA-TDNN: both took it from the same code.
        (r"\.Conv1dReluBn1\.", ".se_res2block.0."),
        (r"\.Res2Conv1dReluBn\.", ".se_res2block.1."),
        (r"\.Conv1dReluBn2\.", ".se_res2block.2."),
        (r"\.SE_Connect\.", ".se_res2block.3."),
        (r"^pooling\.", "pool."),
        (r"^loss_calculator\..*", ""),  # the head
    ],
}
# Kind of checkpoint -> `model_type` of the pretrained models that it may have. WeSpeaker's kinds
# are the values of `frontend` in its configuration.
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    "w2vbert": ("wav2vec2-bert",),
    "s3prl": ("wavlm",),
    "whisper_encoder": ("whisper",),
    "w2v-BERT-2.0_SV": ("wav2vec2-bert",),
    "UniSpeech": ("wavlm", "hubert", "wav2vec2"),
}
# Kinds without a configuration -> how the names in the front end begin.
PREFIXES = {"w2v-BERT-2.0_SV": "front.", "UniSpeech": "feature_extract.model."}


class Translated(NamedTuple):
    """A checkpoint over a pretrained model in our terms."""

    model: dict[str, Any]  # section of the configuration
    frontend: dict[str, Any]  # section of the configuration
    state: dict[str, Tensor]  # of the embedder


def kind_of(tensors: Mapping[str, Tensor], foreign: ForeignConfig) -> str | None:
    """Return the kind of a checkpoint over a pretrained model; None if it is over none."""
    if foreign.kind in MODEL_TYPES:
        return foreign.kind
    for kind, prefix in PREFIXES.items():
        has_prefix = any(name.startswith(prefix) for name in tensors)
        if has_prefix:
            return kind
    return None


def translate(
    kind: str,
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
    description = _describe_pretrained(kind, pretrained, where=where)
    model_type = description.architecture["model_type"]
    renamed = rename(tensors, kind)
    has_adapters = any(name.endswith(LORA_A) for name in renamed)
    if has_adapters and kind == "w2v-BERT-2.0_SV":
        raise ValueError(
            f"{where}: has LoRA adapters apart from the weights, and nothing says their"
            " alpha; merge them with the authors' utils/lora_merge.py"
        )
    merge_adapters(renamed, foreign)
    state, backbone = _split(renamed)
    frontend = {
        "name": "ssl",
        "model": pretrained,
        "weights": "whole",
        "architecture": description.architecture,
        "preprocessing": description.preprocessing,
    }
    family = FAMILIES[model_type]
    if model_type == "wav2vec2-bert":
        if kind == "w2vbert" and foreign.subtracts_mean():
            raise ValueError(
                f"{foreign.path}: dataset_args.cmvn: the mean of the layers of w2v-BERT"
                " is not subtracted here; import models that were trained without"
            )
        num_layers = description.architecture[family.num_layers]
        model, frontend["layers"] = _adapter_mfa(backbone, num_layers)
    elif model_type == "whisper":
        model, frontend["layers"] = _pmfa(backbone, foreign)
    else:
        is_microsofts = kind == "UniSpeech"
        # Microsoft's InstanceNorm.
        frontend["variance_norm"] = is_microsofts
        frontend["mean_norm"] = is_microsofts or foreign.subtracts_mean()
        feat_dim = description.architecture[family.channels]
        model, backbone = _recognised_backbone(
            backbone, foreign, feat_dim=feat_dim, where=where
        )
        if is_microsofts:
            model["args"]["pool_eps"] = 1e-9

    for name, tensor in backbone.items():
        state[f"backbone.{name}"] = tensor
    return Translated(model=model, frontend=frontend, state=state)


def _describe_pretrained(
    kind: str, pretrained: str | None, *, where: str
) -> Description:
    """Read the description of a pretrained model; ValueError if a checkpoint has another."""
    if pretrained is None:
        raise ValueError(
            f"{where}: has a pretrained model as its front end ({kind}); add --pretrained"
            " DIR or hf:owner/name, whose config.json and preprocessor_config.json"
            " describe it"
        )
    description = describe(pretrained)
    model_type = str(description.architecture.get("model_type"))
    if model_type not in MODEL_TYPES[kind]:
        raise ValueError(
            f"--pretrained: {pretrained} is a {model_type}, but {where} has a"
            f" {' or '.join(MODEL_TYPES[kind])} ({kind}); give the model that it was"
            " trained with"
        )
    return description


def _split(
    renamed: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the front end, and those of the backbone."""
    frontend: dict[str, Tensor] = {}
    backbone: dict[str, Tensor] = {}
    for name, tensor in renamed.items():
        if name.startswith(FRONT_END):
            frontend[name] = tensor
        else:
            backbone[name] = tensor
    return frontend, backbone


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


def _recognised_backbone(
    backbone: Mapping[str, Tensor],
    foreign: ForeignConfig,
    *,
    feat_dim: int,
    where: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the section `model` of one of WeSpeaker's networks, and its tensors by our names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in backbone.items()}
    recognised = recognise(
        shapes,
        toolkits=("wespeaker",),
        pooling=foreign.pooling,
        feat_dim=feat_dim,
        where=where,
    )
    state: dict[str, Tensor] = {}
    for name, published_name in recognised.names.items():
        state[name] = backbone[published_name]
    model = {"name": recognised.row.model, "args": dict(recognised.args)}
    return model, state


def _adapter_mfa(
    backbone: Mapping[str, Tensor], num_layers: int
) -> tuple[dict[str, Any], list[int]]:
    """Return the section `model`, and the first and last state, of W2VBert_Adapter_MFA."""
    # Each adapter has one tensor of this name.
    num_adapters = 0
    for name in backbone:
        if name.startswith("adapter_layers.") and name.endswith(".0.bias"):
            num_adapters += 1
    args = {
        "embed_dim": len(backbone["bottleneck.weight"]),
        "adapter_dim": len(backbone["adapter_layers.0.0.weight"]),
    }
    # The last states have adapters, usually all: of the states 0 to 24, 25 adapters have those from
    # 24 + 1 - 25 = 0 on.
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
    # A list, because the tensors of adapters are removed in the loop.
    for name in list(renamed):
        if not name.endswith(LORA_A):
            continue
        layer = name.removesuffix(LORA_A)
        a_RI = renamed.pop(name)
        b_OR = renamed.pop(f"{layer}.lora_B")
        rank = len(a_RI)
        scale = foreign.lora_alpha() / rank
        weight_OI = renamed[f"{layer}.weight"]
        renamed[f"{layer}.weight"] = weight_OI + scale * (b_OR @ a_RI)

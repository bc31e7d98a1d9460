"""Encoders of `transformers`, layer by layer: input -> the states between their layers.

The layers are those of transformers; the loops over them are ours, because here the highest layers
may be left out, Whisper hears less than 30 s, a layer may be computed again in the backward pass,
and exporters can follow. A test compares all states with transformers' own.

Letters: B rows, S samples, T frames, H channels of a state.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.frontend.conformer import conformer_layer

# Calls a layer with its arguments, and may do more (compute it again in the backward pass).
RunLayer = Callable[..., Any]
# (encoder, input, run) -> states_BTH, first the input of the first layer.
States = Callable[[Any, Tensor, RunLayer], Iterator[Tensor]]


def wav2vec_states(encoder: Any, wave_BS: Tensor, run: RunLayer) -> Iterator[Tensor]:
    """Yield the states of wav2vec 2.0, HuBERT or WavLM for waves (B, S)."""
    feats_BCT = encoder.feature_extractor(wave_BS)
    projected = encoder.feature_projection(feats_BCT.transpose(1, 2))
    # All but HuBERT return the features, too.
    state_BTH = projected
    if isinstance(projected, tuple):
        state_BTH = projected[0]

    transformer = encoder.encoder
    state_BTH = state_BTH + transformer.pos_conv_embed(state_BTH)
    # "Stable": each layer normalises its input, and the last state is normalised at the end.
    is_stable = encoder.config.do_stable_layer_norm
    if not is_stable:
        state_BTH = transformer.layer_norm(state_BTH)
    state_BTH = transformer.dropout(state_BTH)
    yield state_BTH

    last_index = encoder.config.num_hidden_layers - 1
    is_wavlm = encoder.config.model_type == "wavlm"
    position_bias = None
    for index, layer in enumerate(transformer.layers):
        if is_wavlm:
            # The first layer computes a bias that all layers use.
            state_BTH, position_bias = run(
                layer,
                state_BTH,
                position_bias=position_bias,
            )
        else:
            state_BTH = run(layer, state_BTH)
        if index == last_index and is_stable:
            state_BTH = transformer.layer_norm(state_BTH)
        yield state_BTH


def w2v_bert_states(encoder: Any, feats_BTF: Tensor, run: RunLayer) -> Iterator[Tensor]:
    """Yield the states of w2v-BERT 2.0 for stacked features (B, T, F)."""
    state_BTH, _ = encoder.feature_projection(feats_BTF)
    conformer = encoder.encoder
    state_BTH = conformer.dropout(state_BTH)
    yield state_BTH
    for layer in conformer.layers:
        state_BTH = run(partial(conformer_layer, layer), state_BTH)
        yield state_BTH


def whisper_states(encoder: Any, mel_BFU: Tensor, run: RunLayer) -> Iterator[Tensor]:
    """Yield the states of Whisper's encoder for log mel features (B, F, U), at most 30 s."""
    hidden_BHU = F.gelu(encoder.conv1(mel_BFU))
    hidden_BHT = F.gelu(encoder.conv2(hidden_BHU))
    state_BTH = hidden_BHT.transpose(1, 2)
    num_frames = state_BTH.shape[1]
    state_BTH = state_BTH + encoder.embed_positions.weight[:num_frames]
    state_BTH = F.dropout(state_BTH, p=encoder.dropout, training=encoder.training)
    yield state_BTH

    last_index = encoder.config.encoder_layers - 1
    for index, layer in enumerate(encoder.layers):
        state_BTH = run(layer, state_BTH, None)  # no attention mask
        if index == last_index:
            state_BTH = encoder.layer_norm(state_BTH)
        yield state_BTH


class Family(NamedTuple):
    """Models of one architecture: names in transformers, and how to compute their states."""

    encoder: str  # module and class below transformers.models
    settings: str  # module and class of its configuration
    extractor: str  # `feature_extractor_type` in preprocessor_config.json
    states: States
    # Where the layers are; the highest ones may be left out.
    layers: str
    num_layers: str  # key in config.json
    channels: str  # key in config.json
    # Beginnings of the names of the encoder's tensors in a file that has more than the encoder.
    prefixes: tuple[str, ...]
    # Name of the part that normalises the state of the very last layer and no other state; "" if
    # there is none. Where the last layer is left out, this part has no use.
    final_norm: Callable[[Mapping[str, Any]], str] = lambda architecture: ""


def _final_norm_of_wav2vec(architecture: Mapping[str, Any]) -> str:
    return "encoder.layer_norm" if architecture.get("do_stable_layer_norm") else ""


def _wav2vec_family(module: str, name: str, prefix: str) -> Family:
    return Family(
        encoder=f"{module}.modeling_{module}:{name}Model",
        settings=f"{module}.configuration_{module}:{name}Config",
        extractor="Wav2Vec2FeatureExtractor",
        states=wav2vec_states,
        layers="encoder.layers",
        num_layers="num_hidden_layers",
        channels="hidden_size",
        prefixes=("", prefix),
        final_norm=_final_norm_of_wav2vec,
    )


# `model_type` in config.json -> family.
FAMILIES: Mapping[str, Family] = {
    "wav2vec2": _wav2vec_family("wav2vec2", "Wav2Vec2", "wav2vec2."),
    "hubert": _wav2vec_family("hubert", "Hubert", "hubert."),
    "wavlm": _wav2vec_family("wavlm", "WavLM", "wavlm."),
    "wav2vec2-bert": Family(
        encoder="wav2vec2_bert.modeling_wav2vec2_bert:Wav2Vec2BertModel",
        settings="wav2vec2_bert.configuration_wav2vec2_bert:Wav2Vec2BertConfig",
        extractor="SeamlessM4TFeatureExtractor",
        states=w2v_bert_states,
        layers="encoder.layers",
        num_layers="num_hidden_layers",
        channels="hidden_size",
        prefixes=("", "wav2vec2_bert."),
    ),
    "whisper": Family(
        encoder="whisper.modeling_whisper:WhisperEncoder",
        settings="whisper.configuration_whisper:WhisperConfig",
        extractor="WhisperFeatureExtractor",
        states=whisper_states,
        layers="layers",
        num_layers="encoder_layers",
        channels="d_model",
        prefixes=("", "encoder.", "model.encoder."),
        final_norm=lambda architecture: "layer_norm",
    ),
}


def build_encoder(family: Family, architecture: Mapping[str, Any]) -> nn.Module:
    """Build an encoder with random weights; it masks nothing and leaves no layer out.

    Masks and LayerDrop draw from streams of random numbers of their own, and a layer that is left
    out has no gradient on this rank.
    """
    import importlib

    def find_class(path: str) -> Any:
        module_name, _, class_name = path.partition(":")
        module = importlib.import_module(f"transformers.models.{module_name}")
        return getattr(module, class_name)

    values = {
        **architecture,
        "layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
        "apply_spec_augment": False,
    }
    settings_class = find_class(family.settings)
    encoder_class = find_class(family.encoder)
    return encoder_class(settings_class(**values))

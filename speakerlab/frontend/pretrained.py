"""A front end that is a pretrained speech model: w2v-BERT 2.0, WavLM, HuBERT, wav2vec 2.0, Whisper.

    waves -> EncoderInput -> encoder of transformers -> states of its layers -> features

A backbone that takes all layers gets them side by side; any other gets their learned weighted sum.
The weights of the pretrained model are the base: what stays as it is in the base is not saved with
a training or an adapter, but loaded from the base again, whose sha256 is compared.

Letters: B rows, S samples, T frames, H channels of a state, L layers, F features.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speakerlab.core.full_precision import widened
from speakerlab.core.shapes import real_constants
from speakerlab.frontend.encoder_inputs import (
    EncoderInput,
    StackedFbank,
    Waves,
    WhisperMel,
)
from speakerlab.frontend.encoders import FAMILIES, Family, build_encoder
from speakerlab.frontend.lora import Lora, add_lora, merge_lora, merged_state
from speakerlab.frontend.pretrained_files import (
    PREPROCESSING,
    describe,
    find_folder,
    read_weights,
    weights_sha256,
)

# Weight normalisation in files of older versions of torch -> its names today.
RENAMED = {
    ".weight_g": ".parametrizations.weight.original0",
    ".weight_v": ".parametrizations.weight.original1",
}
VARIANCE_FLOOR = 1e-5  # as torch.nn.InstanceNorm1d, which Microsoft's models have here
# Parts that a pretrained model may have after its layers, and that its states do not pass.
REFUSED_PARTS = ("add_adapter", "use_intermediate_ffn_before_adapter")


class PretrainedFrontEnd(nn.Module):
    """Features of a pretrained model. In: wave_BS. Out: feats_BTF.

    model: a folder, or `hf:owner/name`. layers: the states to use, from the first to the last; 0 is
    the input of the first layer. Layers above the last are left out. mean_norm: subtract the mean
    over time of the weighted sum; variance_norm: then divide by its deviation. dropout: in
    training, apply the dropout that the model was trained with; without it, the model is always in
    eval mode. lora: adapt some linear layers, and freeze the rest of the model. publish: what a
    published model holds: `whole`, all weights with adapters merged, or `adapter`, only what was
    trained, and the sha256 of the base.

    The rest is written by training. sha256, of the base; architecture, preprocessing: the values of
    config.json and preprocessor_config.json, read from the folder if they are None. weights: where
    the weights of the pretrained model are: in the `base`, or in `whole` with all others.
    joins_layers: the backbone takes all layers.
    """

    def __init__(
        self,
        *,
        model: str,
        sample_rate: int = 16000,
        layers: Literal["all"] | tuple[int, int] = "all",
        mean_norm: bool = False,
        variance_norm: bool = False,
        dropout: bool = False,
        lora: Lora | None = None,
        publish: Literal["whole", "adapter"] = "whole",
        weights: Literal["base", "whole"] = "base",
        sha256: str | None = None,
        architecture: dict[str, Any] | None = None,
        preprocessing: dict[str, Any] | None = None,
        joins_layers: bool = False,
    ) -> None:
        super().__init__()
        require_transformers()
        if architecture is None or preprocessing is None:
            architecture, preprocessing = describe(model)
        self.model = model
        self.publish = publish
        self.weights = weights
        self.sha256 = sha256
        self.family = find_family(model, architecture)
        with real_constants():
            self.inputs = build_inputs(model, architecture, preprocessing)
        if sample_rate != self.inputs.sample_rate:
            raise ValueError(
                f"frontend.sample_rate: {model} takes {self.inputs.sample_rate} Hz, not"
                f" {sample_rate}; set frontend.sample_rate={self.inputs.sample_rate}"
            )

        num_layers = architecture[self.family.num_layers]
        first, last = (0, num_layers) if layers == "all" else layers
        _check_layers(model, first, last, num_layers=num_layers)
        self.first_layer = first
        self.num_layers = last - first + 1
        self.encoder = build_encoder(self.family, architecture)
        del self.layers[last:]
        # Normalises the last of all layers, where that is used.
        self.final_norm = self.family.final_norm(architecture)
        if self.final_norm and last < num_layers:
            # Ranks would wait for its gradient.
            self.encoder.get_submodule(self.final_norm).requires_grad_(False)

        _check_norms(
            mean_norm=mean_norm,
            variance_norm=variance_norm,
            joins_layers=joins_layers,
        )
        self.joins_layers = joins_layers
        self.mean_norm = mean_norm
        self.variance_norm = variance_norm
        self.num_channels: int = architecture[self.family.channels]  # of a state
        self.feat_dim = self.num_channels
        if joins_layers:
            self.feat_dim *= self.num_layers
        else:
            # Equal weights at first; the sum of the weights is 1.
            self.layer_weights = nn.Parameter(torch.zeros(self.num_layers))
        if lora is not None:
            add_lora(self.encoder, lora)

        self.keeps_dropout = dropout
        self.recomputes_layers = False  # in the backward pass, to save memory
        self.encoder.eval()
        self.register_state_dict_post_hook(_leave_out_base)
        self.register_load_state_dict_post_hook(_expect_no_base)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the layers of the encoder, up to the last that is used."""
        layers = self.encoder.get_submodule(self.family.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def learns(self) -> bool:
        """Return whether the encoder, or an adapter in it, is trained."""
        parameters = self.encoder.parameters()
        return any(parameter.requires_grad for parameter in parameters)

    @property
    def sample_rate(self) -> int:
        """Return the sample rate of the waves, in Hz."""
        return self.inputs.sample_rate

    @property
    def min_samples(self) -> int:
        """Return the samples of the shortest wave, which has one frame."""
        return self.inputs.min_samples

    @property
    def frame_shift(self) -> int:
        """Return the samples between two frames."""
        return self.inputs.frame_shift

    @property
    def max_seconds(self) -> float:
        """Return the length of the longest wave, in seconds; infinite without a limit."""
        return self.inputs.max_seconds

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of `num_samples`."""
        return self.inputs.num_frames(num_samples)

    def samples_used(self, num_samples: int) -> int:
        """Return how many of the samples the features depend on."""
        return self.inputs.samples_used(num_samples)

    def train(self, mode: bool = True) -> "PretrainedFrontEnd":
        """Set the mode; the encoder stays in eval mode unless its dropout is asked for."""
        super().train(mode)
        self.encoder.train(mode and self.keeps_dropout)
        return self

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return features (B, T, F) of waves (B, S) in [-1, 1]."""
        with torch.no_grad():
            x_B = self.inputs(wave_BS)
        return self.encode(x_B)

    def encode(self, x_B: Tensor) -> Tensor:
        """Return features (B, T, F) of the input of the encoder."""
        states = self.states(x_B)
        if self.joins_layers:
            return torch.cat(states, dim=2)
        # In fp32: the states of some models have channels far from 0.
        weight_L = self.layer_weights.softmax(0)
        feats_BTF = weight_L[0] * widened(states[0])
        for index in range(1, self.num_layers):
            feats_BTF = feats_BTF + weight_L[index] * widened(states[index])
        if self.mean_norm:
            feats_BTF = feats_BTF - feats_BTF.mean(1, keepdim=True)
        if self.variance_norm:
            # The mean is 0 here.
            var_B1F = feats_BTF.square().mean(1, keepdim=True)
            feats_BTF = feats_BTF / (var_B1F + VARIANCE_FLOOR).sqrt()
        return feats_BTF

    def states(self, x_B: Tensor) -> list[Tensor]:
        """Return the states (B, T, H) of the chosen layers, for the input of the encoder."""
        # A frozen encoder keeps nothing for a backward pass.
        needs_grad = self.learns and torch.is_grad_enabled()
        with torch.set_grad_enabled(needs_grad):
            states = self.family.states(self.encoder, x_B, self._run)
            all_states = list(states)
        return all_states[self.first_layer :]

    def _run(self, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a layer; keep its inner results for the backward pass, or compute them again."""
        if self.recomputes_layers and torch.is_grad_enabled():
            return checkpoint(layer, *args, use_reentrant=False, **options)
        return layer(*args, **options)

    def prepare_for_export(self) -> None:
        """Use plain attention from now on: exporters cannot express the layout of the fused one."""
        encoder: Any = self.encoder
        encoder.set_attn_implementation("eager")

    def load_base(self) -> None:
        """Load the weights of the pretrained model; ValueError if they are not those expected."""
        folder = find_folder(self.model)
        if self.sha256 is not None:
            digest = weights_sha256(folder)
            if digest != self.sha256:
                raise ValueError(
                    f"{folder}: is another model, sha256 {digest[:12]} instead of"
                    f" {self.sha256[:12]}; set frontend.model to the folder of the right"
                    " one (for a published model in its config.yaml)"
                )
        tensors = read_weights(folder)
        fitting = fit_names(
            tensors,
            wanted=_base_tensors(self.encoder),
            prefixes=self.family.prefixes,
            where=str(folder),
        )
        with torch.no_grad():
            for name, tensor in _base_tensors(self.encoder).items():
                tensor.copy_(fitting[name])

    def merge(self) -> None:
        """Make the model whole: adapters become part of its weights, and all of them are saved."""
        merge_lora(self.encoder)
        self.weights = "whole"

    def whole(self) -> dict[str, Tensor]:
        """Return the state dict that the model would have if it were merged."""
        state: dict[str, Tensor] = {}
        for name, tensor in merged_state(self.encoder).items():
            state[f"encoder.{name}"] = tensor
        if not self.joins_layers:
            state["layer_weights"] = self.layer_weights
        return state

    def saved_elsewhere(self) -> set[str]:
        """Return the names of the parameters that are saved with the base only."""
        names: set[str] = set()
        if self.weights == "whole":
            return names
        # What is trained differs from the base.
        for name, parameter in self.encoder.named_parameters():
            if not parameter.requires_grad:
                names.add(f"encoder.{name}")
        return names


def _check_layers(model: str, first: int, last: int, *, num_layers: int) -> None:
    """Raise ValueError unless a model has the states from the first to the last."""
    if not 0 <= first <= last <= num_layers:
        raise ValueError(
            f"frontend.layers: {first} to {last} are not among the states 0 to"
            f" {num_layers} of {model}; correct them"
        )


def _check_norms(*, mean_norm: bool, variance_norm: bool, joins_layers: bool) -> None:
    """Raise ValueError for a normalisation that does not fit how the layers are combined."""
    if mean_norm and joins_layers:
        raise ValueError(
            "frontend.mean_norm: is for the sum of the layers, but this model takes"
            " all of them; set it to false"
        )
    if variance_norm and not mean_norm:
        raise ValueError(
            "frontend.variance_norm: needs the mean subtracted; set"
            " frontend.mean_norm=true"
        )


def _leave_out_base(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Remove from a state dict what is saved with the base."""
    del metadata
    assert isinstance(module, PretrainedFrontEnd)
    for name in module.saved_elsewhere():
        state.pop(prefix + name, None)


def _expect_no_base(module: nn.Module, incompatible: Any) -> None:
    """Accept a state dict without what is saved with the base."""
    assert isinstance(module, PretrainedFrontEnd)
    names_in_front_end = module.saved_elsewhere()
    # In a larger module that is loaded, the name of the front end comes before them.
    endings = tuple(f".{name}" for name in names_in_front_end)
    missing: list[str] = []
    for name in incompatible.missing_keys:
        if name not in names_in_front_end and not name.endswith(endings):
            missing.append(name)
    # The caller looks at this list.
    incompatible.missing_keys[:] = missing


def _base_tensors(encoder: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an encoder that its base has: all but adapters."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in encoder.state_dict(keep_vars=True).items():
        last_name = name.rpartition(".")[2]
        if last_name not in ("lora_A", "lora_B"):
            tensors[name] = tensor.data
    return tensors


def fit_names(
    tensors: Mapping[str, Tensor],
    *,
    wanted: Mapping[str, Tensor],
    prefixes: tuple[str, ...],
    where: str,
) -> dict[str, Tensor]:
    """Return the wanted tensors of a file by their names in the encoder.

    A file may hold more: a decoder, heads of the pretraining, layers above those in use. Raises
    ValueError if a tensor is missing or has another shape.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        renamed[name] = tensor

    def count_wanted(prefix: str) -> int:
        return sum(prefix + name in renamed for name in wanted)

    prefix = max(prefixes, key=count_wanted)
    fitting: dict[str, Tensor] = {}
    unfit: list[str] = []
    for name, wanted_tensor in wanted.items():
        tensor = renamed.get(prefix + name)
        if tensor is None or tensor.shape != wanted_tensor.shape:
            unfit.append(name)
        else:
            fitting[name] = tensor
    if unfit:
        raise ValueError(
            f"{where}: the weights are not those of its config.json: {len(unfit)} of"
            f" {len(wanted)} tensors are missing or of another shape"
            f" ({', '.join(unfit[:3])}); download the model again"
        )
    return fitting


def require_transformers() -> None:
    """Refuse an environment where transformers is missing or cannot be imported.

    It imports torchaudio where that is installed, so one for another torch is also a reason.
    """
    try:
        import transformers.audio_utils  # noqa: F401
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        raise ValueError(
            f"frontend.name: ssl needs transformers, but {missing} is not installed; run"
            " pip install transformers"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"frontend.name: ssl needs transformers, which cannot be imported ({reason});"
            " run `speakerlab doctor`, which says what does not fit"
        ) from error


def find_family(model: str, architecture: Mapping[str, Any]) -> Family:
    """Return the family of a model; ValueError if it is not among those known."""
    model_type = str(architecture.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(
            f"frontend.model: {model} is a {model_type}; use a model of the kinds"
            f" {', '.join(FAMILIES)}"
        )
    for part in REFUSED_PARTS:
        if architecture.get(part):
            raise ValueError(
                f"frontend.model: {model} has a part after its layers ({part}), which is"
                " not supported; use a model without it"
            )
    # The published w2v-BERT 2.0 has this kind; only its layers are written for it.
    positions = architecture.get("position_embeddings_type", "relative_key")
    if model_type == "wav2vec2-bert" and positions != "relative_key":
        raise ValueError(
            f"frontend.model: {model} has positions of the kind {positions}; use a model"
            " with relative_key, such as facebook/w2v-bert-2.0"
        )
    family = FAMILIES[model_type]
    for key in (family.num_layers, family.channels):
        if not isinstance(architecture.get(key), int):
            raise ValueError(
                f"frontend.model: config.json of {model} has no {key}; download it again"
            )
    return family


def build_inputs(
    model: str,
    architecture: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
) -> EncoderInput:
    """Build what the encoder hears; ValueError if a value is missing that would change it."""
    family = find_family(model, architecture)
    extractor = preprocessing.get("feature_extractor_type")
    if extractor != family.extractor:
        raise ValueError(
            f"frontend.model: {PREPROCESSING} of {model} is of {extractor}, not of"
            f" {family.extractor}; copy the file from the page of the model"
        )

    def value(key: str, kind: type = int) -> Any:
        if not isinstance(preprocessing.get(key), kind):
            raise ValueError(
                f"frontend.model: {PREPROCESSING} of {model} has no {key}, without which"
                " its input is unknown; copy the file from the page of the model"
            )
        return preprocessing[key]

    sampling_rate = value("sampling_rate")
    if extractor == "Wav2Vec2FeatureExtractor":
        return Waves(
            sampling_rate=sampling_rate,
            do_normalize=value("do_normalize", bool),
            kernels=architecture["conv_kernel"],
            strides=architecture["conv_stride"],
        )
    if extractor == "SeamlessM4TFeatureExtractor":
        return StackedFbank(
            sampling_rate=sampling_rate,
            num_mel_bins=value("num_mel_bins"),
            stride=value("stride"),
        )
    return WhisperMel(
        sampling_rate=sampling_rate,
        feature_size=value("feature_size"),
        n_fft=value("n_fft"),
        hop_length=value("hop_length"),
        chunk_length=value("chunk_length"),
        do_normalize=preprocessing.get("do_normalize", False),
    )

"""Write over_pretrained.npz: embeddings of the publishers' code over small pretrained models.

    python tests/checkpoints/toolkits/make_over_pretrained.py WESPEAKER SLT22 UNISPEECH W2VBERT_SV

with checkouts of github.com/wenet-e2e/wespeaker, of github.com/JunyiPeng00/
SLT22_MultiHead-Factorized-Attentive-Pooling, which has Microsoft's code of WavLM, of
github.com/microsoft/UniSpeech, and of github.com/ZXHY-82/w2v-BERT-2.0_SV. For each case of
over_pretrained.py: the names and shapes of the checkpoint, whose weights `figures.fill` draws, and
the embeddings of `waves()`.
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from figures import fill
from over_pretrained import CASES, FIGURES, waves, write_base


def add_package(name: str, folder: Path) -> None:
    """Make a package importable without running its `__init__`."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def refill(module: nn.Module, prefix: str = "") -> None:
    """Draw the weights by their names in the checkpoint."""
    state = {}
    for name, value in module.state_dict().items():
        state[name] = value
        if value.is_floating_point():
            state[name] = fill(prefix + name, tuple(value.shape), 0)
    module.load_state_dict(state)


def w2v_bert(base: Path, *, lora: bool) -> tuple[nn.Module, nn.Module, Any]:
    front_end = import_module("wespeaker.frontend.w2vbert").W2VBertFrontend(
        model_name=str(base),
        frozen=True,
        use_lora=lora,
        lora_config_args={"r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
    )
    module = import_module("wespeaker.models.w2vbert_adapter_mfa")
    network = module.W2VBert_Adapter_MFA(
        feat_dim=32, embed_dim=16, adapter_dim=8, num_frontend_hidden_layers=3
    )
    return front_end, network, lambda wave_BS: network(front_end(wave_BS, None)[0])[-1]


def whisper(base: Path) -> tuple[nn.Module, nn.Module, Any]:
    from transformers import WhisperFeatureExtractor

    del base
    extractor = WhisperFeatureExtractor()
    sys.modules["whisper"] = ModuleType("whisper")
    module = import_module("wespeaker.frontend.whisper_encoder")
    # OpenAI's function, which transformers' tests compare with this one.
    module.whisper.log_mel_spectrogram = lambda wave_S, n_mels: extractor(
        wave_S.numpy(),
        sampling_rate=16000,
        padding="do_not_pad",
        return_tensors="pt",
    )["input_features"][0]
    front_end = module.whisper_encoder(
        frozen=True,
        n_mels=80,
        num_blocks=3,
        output_size=32,
        n_head=4,
        layer_st=1,
        layer_ed=2,
    )
    pmfa = import_module("wespeaker.models.whisper_PMFA").whisper_PMFA
    network = pmfa(output_size=64, embedding_dim=16)

    def embed(wave_BS: torch.Tensor) -> torch.Tensor:
        feats_BTF, _ = front_end(wave_BS, None)
        # WeSpeaker's cmvn, which is its default.
        return network(feats_BTF - feats_BTF.mean(1, keepdim=True))

    return front_end, network, embed


class Upstream(nn.Module):
    """What s3prl computes with Microsoft's code of WavLM: all states of its encoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, waves: Any) -> dict[str, list[torch.Tensor]]:
        model: Any = self.model
        states = []

        def note_input(module: Any, args: Any, options: Any) -> None:
            del module
            state_TBH = args[0] if args else options["x"]
            states.append(state_TBH.transpose(0, 1))

        def note_output(module: Any, args: Any, output: Any) -> None:
            del module, args
            states.append(output[0])

        hooks = [model.encoder.register_forward_hook(note_output)]
        for layer in model.encoder.layers:
            hooks.append(layer.register_forward_pre_hook(note_input, with_kwargs=True))
        normalised = [
            nn.functional.layer_norm(wave_S, wave_S.shape) for wave_S in waves
        ]
        model.extract_features(torch.stack(normalised))
        for hook in hooks:
            hook.remove()
        return {"hidden_states": states}


class S3prl(nn.Module):
    """WeSpeaker's front end of s3prl: the learned sum of all states, and its cmvn."""

    def __init__(self, wavlm: nn.Module, num_states: int) -> None:
        super().__init__()
        self.upstream = nn.Module()
        self.upstream.upstream = Upstream(wavlm)
        self.featurizer = nn.Module()
        self.featurizer.weights = nn.Parameter(torch.zeros(num_states))

    def forward(self, wave_BS: torch.Tensor) -> torch.Tensor:
        upstream: Any = self.upstream.upstream
        states = upstream(wave_BS)["hidden_states"]
        weight_L = self.featurizer.weights.softmax(0)
        feats_BTH = sum(w * state_BTH for w, state_BTH in zip(weight_L, states))
        return feats_BTH - feats_BTH.mean(1, keepdim=True)


def microsofts_wavlm(*, relative_positions: bool) -> nn.Module:
    """WavLM or, without relative positions, the same network as HuBERT."""
    module = import_module("models.Baseline.WavLM")
    settings = {
        "extractor_mode": "layer_norm",
        "encoder_layers": 3,
        "encoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 48,
        "encoder_attention_heads": 4,
        "layer_norm_first": True,
        "conv_feature_layers": "[(16,10,5)] + [(16,3,2)] * 4 + [(16,2,2)] * 2",
        "conv_pos": 16,
        "conv_pos_groups": 4,
        "relative_position_embedding": relative_positions,
        "num_buckets": 320,
        "max_distance": 800,
        "gru_rel_pos": relative_positions,
    }
    return module.WavLM(module.WavLMConfig(settings))


def wavlm(base: Path) -> tuple[nn.Module, nn.Module, Any]:
    del base
    front_end = S3prl(microsofts_wavlm(relative_positions=True), num_states=4)
    ecapa = import_module("wespeaker.models.ecapa_tdnn").ECAPA_TDNN_GLOB_c512
    network = ecapa(feat_dim=32, embed_dim=16, pooling_func="ASTP")
    return front_end, network, lambda wave_BS: network(front_end(wave_BS))


def unispeech(base: Path, *, relative_positions: bool) -> tuple[None, nn.Module, Any]:
    del base
    # The original loads the pretrained model by fairseq.
    sys.modules["unispeech.utils"] = ModuleType("unispeech.utils")
    sys.modules["unispeech.utils"].UpstreamExpert = Upstream
    ecapa = import_module("unispeech.ecapa_tdnn").ECAPA_TDNN_SMALL
    network = ecapa(
        feat_dim=32,
        emb_dim=16,
        feat_type="wavlm_large",
        config_path=microsofts_wavlm(relative_positions=relative_positions),
    )
    return None, network, network


def w2v_bert_of_the_authors(base: Path) -> tuple[None, nn.Module, Any]:
    # The original has a copy of transformers, and counts operations with another package.
    package = "deeplab.pretrained.audio2vector.module.transformers.src.transformers"
    parts = package.split(".")
    for end in range(4, len(parts)):
        add_package(".".join(parts[:end]), base)
    sys.modules[package] = import_module("transformers")
    sys.modules["calflops"] = ModuleType("calflops")
    sys.modules["calflops"].calculate_flops = None
    module = import_module("local.spk_model")
    folder = base.with_name("w2v-bert")  # the original looks at the name
    base.rename(folder)
    network = module.Audio2Vec_based_Adapter(
        model_name=str(folder), n_mfa_layers=-1, embd_dim=16, adapter_dim=8
    )
    # In transformers 5, a layer returns a tensor, not a tuple.
    for layer in network.front.encoder.encoder.layers:
        layer.register_forward_hook(lambda module, args, output: (output,))
    return None, network, network


BUILDERS = {
    "w2vbert_lora": lambda base: w2v_bert(base, lora=True),
    "w2vbert": lambda base: w2v_bert(base, lora=False),
    "whisper": whisper,
    "wavlm": wavlm,
    "unispeech_wavlm": lambda base: unispeech(base, relative_positions=True),
    "unispeech_hubert": lambda base: unispeech(base, relative_positions=False),
    "w2vbert_authors": w2v_bert_of_the_authors,
}


@torch.no_grad()
def main() -> None:
    wespeaker, slt22, unispeech_root, w2vbert_sv = map(Path, sys.argv[1:])
    add_package("wespeaker", wespeaker / "wespeaker")
    add_package("wespeaker.frontend", wespeaker / "wespeaker/frontend")
    add_package("models", slt22 / "models")
    verification = unispeech_root / "downstreams/speaker_verification"
    add_package("unispeech", verification / "models")
    add_package("deeplab", w2vbert_sv / "deeplab")
    add_package("local", w2vbert_sv / "recipes/DeepASV/local")
    figures = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            base = write_base(Path(folder), name)
            front_end, network, embed = BUILDERS[name](base)
        refill(network)
        network.eval()
        state = network.state_dict()
        if front_end is not None:
            refill(front_end, "frontend.")
            front_end.eval()
            for key, value in front_end.state_dict().items():
                state[f"frontend.{key}"] = value
        lines = [" ".join([key, *map(str, v.shape)]) for key, v in state.items()]
        figures[f"{name}_state"] = np.frombuffer("\n".join(lines).encode(), np.uint8)
        output = embed(waves())
        embeddings = output[-1] if isinstance(output, tuple) else output
        figures[f"{name}_embedding"] = embeddings.numpy()
    np.savez_compressed(FIGURES, **figures)


if __name__ == "__main__":
    main()

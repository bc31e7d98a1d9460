"""Front ends of pretrained models: features and states are those of transformers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import served, use_hub
from pretrained_models import MODELS, write_pretrained
from refusals import refused, refuses

from speakerlab.config.schema import load_config
from speakerlab.experiments.consistency import with_description
from speakerlab.frontend.conformer import select_distances
from speakerlab.frontend.encoder_inputs import StackedFbank, Waves, WhisperMel
from speakerlab.frontend.lora import Lora, LoraLinear
from speakerlab.frontend.pretrained import PretrainedFrontEnd
from speakerlab.frontend.pretrained_files import (
    find_folder,
    read_weights,
    weights_sha256,
)

transformers = pytest.importorskip("transformers")

KERNELS = (10, 3, 3, 3, 3, 2, 2)
STRIDES = (5, 2, 2, 2, 2, 2, 2)
RATE = 16000
every_model = pytest.mark.parametrize("name", MODELS)


def random_waves(num_batches: int) -> list[np.ndarray]:
    """Batches of two waves of 0.1 to 12 s, faint and loud."""
    generator = np.random.default_rng(0)
    waves = []
    for _ in range(num_batches):
        num_samples = int(generator.integers(RATE // 10, 12 * RATE))
        level = 10 ** generator.uniform(-3, -0.5)
        noise = generator.standard_normal((2, num_samples)) * level
        waves.append(noise.astype(np.float32))
    return waves


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folder of each small model."""
    root = tmp_path_factory.mktemp("pretrained")
    return {name: write_pretrained(root / name, name) for name in MODELS}


def test_features_of_w2v_bert_are_those_of_transformers():
    theirs = transformers.SeamlessM4TFeatureExtractor()
    ours = StackedFbank(sampling_rate=RATE, num_mel_bins=80, stride=2)
    for wave_BS in random_waves(100):
        expected = theirs(list(wave_BS), sampling_rate=RATE, return_tensors="pt")
        feats_BTF = ours(torch.from_numpy(wave_BS))
        # An odd frame is padded and masked by transformers, and left out by us.
        num_frames = int(expected["attention_mask"][0].sum())
        assert feats_BTF.shape[1] == num_frames == ours.num_frames(wave_BS.shape[1])
        expected_BTF = expected["input_features"][:, :num_frames]
        assert (feats_BTF - expected_BTF).abs().max() < 1e-4


def test_features_of_speech_with_an_offset_and_gaps_are_those_of_transformers():
    """Where an FFT in float32 would miss 1e-4, by up to 0.06."""
    theirs = transformers.SeamlessM4TFeatureExtractor()
    ours = StackedFbank(sampling_rate=RATE, num_mel_bins=80, stride=2)
    generator = np.random.default_rng(0)
    noise_S = generator.standard_normal(3 * RATE)
    # Its highest bins are nearly empty, as in speech from a telephone.
    spectrum_K = np.fft.rfft(noise_S)
    spectrum_K[len(spectrum_K) // 2 :] = 0
    narrow_S = 0.1 * np.fft.irfft(spectrum_K)
    with_gap_S = narrow_S * (np.arange(3 * RATE) % RATE > RATE // 4)
    for wave_S in (narrow_S, narrow_S + 0.3, 0.01 * narrow_S, with_gap_S):
        in_16_bit_S = np.round(wave_S * 32768) / 32768
        wave_BS = np.stack([wave_S, in_16_bit_S]).astype(np.float32)
        expected = theirs(list(wave_BS), sampling_rate=RATE, return_tensors="pt")
        feats_BTF = ours(torch.from_numpy(wave_BS))
        expected_BTF = expected["input_features"][:, : feats_BTF.shape[1]]
        assert (feats_BTF - expected_BTF).abs().max() < 1e-4


@pytest.mark.parametrize("do_normalize", [True, False])
def test_waves_are_those_of_transformers(do_normalize):
    theirs = transformers.Wav2Vec2FeatureExtractor(do_normalize=do_normalize)
    ours = Waves(
        sampling_rate=RATE,
        do_normalize=do_normalize,
        kernels=KERNELS,
        strides=STRIDES,
    )
    assert (ours.min_samples, ours.frame_shift) == (400, 320)
    for wave_BS in random_waves(100):
        expected = theirs(list(wave_BS), sampling_rate=RATE)["input_values"]
        wave = ours(torch.from_numpy(wave_BS))
        assert np.abs(wave.numpy() - np.stack(expected)).max() < 1e-4


def test_features_of_whisper_are_those_of_transformers():
    theirs = transformers.WhisperFeatureExtractor()
    ours = WhisperMel(
        sampling_rate=RATE,
        feature_size=80,
        n_fft=400,
        hop_length=160,
        chunk_length=30,
    )
    for wave_BS in random_waves(100):
        expected_BFU = theirs(
            list(wave_BS),
            sampling_rate=RATE,
            padding="do_not_pad",
            return_tensors="pt",
        )["input_features"]
        mel_BFU = ours(torch.from_numpy(wave_BS))
        assert (mel_BFU - expected_BFU).abs().max() < 1e-4


def their_states(folder: Path, wave_BS: np.ndarray) -> list[torch.Tensor]:
    """The states that transformers computes, from its own features."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor(
        list(wave_BS),
        sampling_rate=RATE,
        return_tensors="pt",
    )
    model = transformers.AutoModel.from_pretrained(folder)
    model.eval()
    if model.config.model_type == "whisper":
        model = model.encoder
    output = model(**inputs, output_hidden_states=True)
    # The last state is the output of the model, which large models normalise.
    return [*output.hidden_states[:-1], output.last_hidden_state]


def states_of(
    front_end: PretrainedFrontEnd, wave_BS: torch.Tensor
) -> list[torch.Tensor]:
    x_B = front_end.inputs(wave_BS)
    assert x_B.shape[1:] == front_end.inputs.shape(wave_BS.shape[1])
    return front_end.states(x_B)


@every_model
@torch.no_grad()
def test_states_are_those_of_transformers_in_batches_and_alone(folders, name):
    # Whisper of transformers takes 30 s, no less.
    seconds = (30.0,) if name == "whisper" else (0.7, 2.013)
    front_end = PretrainedFrontEnd(model=str(folders[name]), joins_layers=True)
    front_end.load_base()
    generator = np.random.default_rng(1)
    for duration in seconds:
        num_samples = round(duration * RATE)
        wave_BS = 0.1 * generator.standard_normal((3, num_samples)).astype(np.float32)
        wave_BS *= [[1.0], [0.1], [0.01]]
        states = states_of(front_end, torch.from_numpy(wave_BS))
        expected = their_states(folders[name], wave_BS)
        num_frames = front_end.num_frames(num_samples)
        assert len(states) == len(expected) == front_end.num_layers == 4
        for state_BTH, expected_BTH in zip(states, expected):
            assert state_BTH.shape[1] == num_frames
            # A masked frame of transformers is left out here.
            error = (state_BTH - expected_BTH[:, :num_frames]).abs().max()
            assert error < 1e-5 * max(1.0, float(expected_BTH.abs().max()))

        alone_BTF = front_end(torch.from_numpy(wave_BS[1:2]))
        together_BTF = front_end(torch.from_numpy(wave_BS))
        assert together_BTF.shape[2] == front_end.feat_dim == 4 * 32
        assert torch.allclose(alone_BTF[0], together_BTF[1], atol=1e-5)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 150])
def test_a_score_of_positions_is_that_of_the_distance_between_frames(num_frames):
    # Column r of R is for the distance r - (T - 1), as of frame r - (T - 1) from frame 0.
    distance_R = torch.arange(1 - num_frames, num_frames + 1)
    scores_BHTR = distance_R.expand(2, 3, num_frames, -1).contiguous()
    frames_T = torch.arange(num_frames)
    expected_TT = frames_T[None, :] - frames_T[:, None]
    scores_BHTT = select_distances(scores_BHTR)
    assert torch.equal(scores_BHTT, expected_TT.expand(2, 3, -1, -1))


@every_model
@torch.no_grad()
def test_layers_above_the_last_are_not_built(folders, name):
    whole = PretrainedFrontEnd(model=str(folders[name]), joins_layers=True)
    some = PretrainedFrontEnd(
        model=str(folders[name]), joins_layers=True, layers=(1, 2)
    )
    whole.load_base()
    some.load_base()
    wave_BS = 0.1 * torch.randn(2, RATE)
    for state_BTH, expected_BTH in zip(
        states_of(some, wave_BS), states_of(whole, wave_BS)[1:]
    ):
        assert torch.equal(state_BTH, expected_BTH)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(parameter.numel() for parameter in some.parameters()) < num_parameters
    with refuses("frontend.layers", "2 to 4", "0 to 3"):
        PretrainedFrontEnd(model=str(folders[name]), layers=(2, 4))


def adapt(folder: Path, name: str) -> PretrainedFrontEnd:
    """A front end whose adapters have learned something."""
    targets = ("linear_q", "linear_v") if name == "w2v_bert" else ("q_proj", "v_proj")
    front_end = PretrainedFrontEnd(
        model=str(folder),
        joins_layers=True,
        lora=Lora(rank=4, alpha=8.0, targets=targets),
    )
    front_end.load_base()
    for part in front_end.modules():
        if isinstance(part, LoraLinear):
            part.lora_B.data.normal_(std=0.2)
    return front_end


@every_model
def test_every_adapter_learns_and_merging_changes_nothing(folders, name):
    """Also in WavLM, whose attention never calls its linear layers."""
    front_end = adapt(folders[name], name).train()
    wave_BS = 0.1 * torch.randn(2, RATE)
    feats_BTF = front_end(wave_BS)
    (feats_BTF * torch.randn_like(feats_BTF)).sum().backward()
    learning = set()
    for key, parameter in front_end.named_parameters():
        assert parameter.requires_grad == (".lora_" in key)
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), key
            learning.add(key)
    # Two matrices of two linear layers in three layers.
    assert len(learning) == 12
    assert set(front_end.state_dict()) == learning

    front_end.merge()
    merged_BTF = front_end(wave_BS)
    assert torch.allclose(merged_BTF, feats_BTF, atol=1e-5)
    without = PretrainedFrontEnd(model=str(folders[name]), joins_layers=True)
    without.load_base()
    assert not torch.allclose(without(wave_BS), feats_BTF, atol=1e-2)
    assert set(front_end.state_dict()) == {
        f"encoder.{key}" for key in without.encoder.state_dict()
    }


@pytest.mark.parametrize("name", ["w2v_bert", "wavlm_large"])
def test_recomputed_layers_have_the_same_gradients(folders, name):
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        front_end = adapt(folders[name], name).train()
        front_end.recomputes_layers = recomputes
        front_end(0.1 * torch.ones(1, RATE).cumsum(1).sin()).square().sum().backward()
        gradients.append([p.grad for p in front_end.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients):
        assert torch.equal(plain, recomputed)


def test_the_encoder_stays_in_eval_mode_unless_dropout_is_asked_for(folders):
    path = str(folders["wavlm"])
    wave_BS = 0.1 * torch.randn(1, RATE)
    without = PretrainedFrontEnd(model=path).train()
    assert not any(part.training for part in without.encoder.modules())
    assert torch.equal(without(wave_BS), without(wave_BS))
    dropping = PretrainedFrontEnd(model=path, dropout=True).train()
    assert not torch.equal(dropping(wave_BS), dropping(wave_BS))
    # LayerDrop is off: it would leave layers without a gradient.
    assert dropping.encoder.config.layerdrop == 0


def test_a_weighted_sum_begins_as_the_mean(folders):
    front_end = PretrainedFrontEnd(model=str(folders["wavlm"]), mean_norm=True)
    front_end.load_base()
    wave_BS = 0.1 * torch.randn(2, RATE)
    mean_BTH = torch.stack(states_of(front_end, wave_BS)).mean(0)
    expected_BTH = mean_BTH - mean_BTH.mean(1, keepdim=True)
    assert torch.allclose(front_end(wave_BS), expected_BTH, atol=1e-5)
    assert front_end.feat_dim == 32


def change_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; None removes a key."""
    values = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of a model to damage."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


def load(path: Path | str, **options: Any) -> None:
    PretrainedFrontEnd(model=str(path), **options).load_base()


def test_a_folder_that_is_no_model_is_refused_in_one_line(folders, tmp_path):
    with refuses("frontend.model", tmp_path / "no_such", "does not exist"):
        load(tmp_path / "no_such")
    with refuses(f"{tmp_path}", "has no config.json"):
        load(tmp_path)

    copy = damaged(folders["wavlm_large"], tmp_path)
    preprocessor = copy / "preprocessor_config.json"
    change_json(preprocessor, do_normalize=None)
    with refuses("frontend.model", "has no do_normalize"):
        load(copy)
    preprocessor.unlink()
    with refuses(f"{copy}", "has no preprocessor_config.json"):
        load(copy)


def test_another_architecture_is_refused(folders, tmp_path):
    copy = damaged(folders["wavlm"], tmp_path)
    change_json(copy / "config.json", model_type="bert")
    with refuses("frontend.model", "is a bert", "wav2vec2, hubert, wavlm"):
        load(copy)
    change_json(copy / "config.json", model_type="wavlm", add_adapter=True)
    with refuses("frontend.model", "add_adapter"):
        load(copy)
    change_json(copy / "config.json", add_adapter=False, hidden_size=64)
    with refuses(f"{copy}", "not those of its config.json"):
        load(copy)


def test_half_a_download_is_refused(folders, tmp_path):
    copy = damaged(folders["w2v_bert"], tmp_path)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with refuses(f"{weights}", "cannot be read as tensors"):
        load(copy)
    weights.unlink()
    with refuses(f"{copy}", "has no weights"):
        load(copy)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with refuses(f"{copy}/model-00001-of-00002.safetensors", "is missing"):
        load(copy)


def test_another_base_and_another_rate_are_refused(folders):
    digest = weights_sha256(folders["wavlm"])
    front_end = PretrainedFrontEnd(model=str(folders["wavlm"]), sha256=digest)
    front_end.load_base()
    front_end.model = str(folders["wavlm_large"])
    with refuses(f"{folders['wavlm_large']}", "is another model", digest[:12]):
        front_end.load_base()
    with refuses("frontend.sample_rate", "16000 Hz", "8000"):
        PretrainedFrontEnd(model=str(folders["wavlm"]), sample_rate=8000)


def test_weights_in_a_pickle_and_in_several_files_are_read(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folders["hubert"] / "model.safetensors")
    expected = PretrainedFrontEnd(model=str(folders["hubert"]))
    expected.load_base()

    copy = damaged(folders["hubert"], tmp_path)
    (copy / "model.safetensors").unlink()
    # Names of older files: the whole model below a prefix, and other names of the normalised
    # weights.
    older = {}
    for key, tensor in tensors.items():
        key = key.replace("parametrizations.weight.original0", "weight_g")
        key = key.replace("parametrizations.weight.original1", "weight_v")
        older[f"hubert.{key}"] = tensor
    older["lm_head.weight"] = torch.zeros(3)
    torch.save(older, copy / "pytorch_model.bin")
    from_pickle = PretrainedFrontEnd(model=str(copy))
    from_pickle.load_base()

    names = list(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    weight_map = {}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, copy / file)
        weight_map |= dict.fromkeys(keys, file)
    index = json.dumps({"weight_map": weight_map})
    (copy / "model.safetensors.index.json").write_text(index)
    from_parts = PretrainedFrontEnd(model=str(copy))
    from_parts.load_base()
    for key, tensor in expected.encoder.state_dict().items():
        assert torch.equal(tensor, from_pickle.encoder.state_dict()[key])
        assert torch.equal(tensor, from_parts.encoder.state_dict()[key])


def test_a_pickle_with_code_is_not_run(folders, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    copy = damaged(folders["wav2vec2"], tmp_path)
    (copy / "model.safetensors").unlink()
    torch.save({"a": Payload()}, copy / "pytorch_model.bin")
    with refuses(f"{copy}/pytorch_model.bin", "cannot be read as tensors"):
        load(copy)
    assert not (tmp_path / "ran").exists()


def test_unknown_targets_of_lora_are_refused(folders):
    lora = Lora(rank=4, alpha=8.0, targets=("query",))
    with refuses("frontend.lora.targets", "query", "linear_q"):
        PretrainedFrontEnd(model=str(folders["w2v_bert"]), lora=lora)


def test_without_transformers_it_is_refused_in_one_line(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "transformers.audio_utils", raising=False)
    with refuses("frontend.name", "pip install transformers"):
        load(folders["wavlm"])


def test_a_torchaudio_of_another_torch_is_refused_in_one_line(tmp_path):
    """transformers imports torchaudio where that is installed."""
    pytest.importorskip("torchaudio")
    (tmp_path / "torchaudio.py").write_text("raise OSError('undefined symbol')\n")
    code = "from speakerlab.frontend.pretrained import require_transformers as f; f()"
    folders = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": folders}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    subject = "ValueError: frontend.name"
    assert refused(ended.stderr, subject, "undefined symbol", "doctor")


def test_a_model_of_a_hub_is_that_of_its_folder(folders, tmp_path, monkeypatch):
    with served() as server:
        use_hub(monkeypatch, server.url, tmp_path / "cache")
        commit = server.add("ann/wavlm", folders["wavlm"], more=b"not needed")
        # The description alone tells which network it is.
        frontend = PretrainedFrontEnd(model="hf:ann/wavlm")
        assert not any("safetensors" in request for request in server.requests)
        frontend.load_base()
        names = {path.name for path in find_folder("hf:ann/wavlm").iterdir()}
        assert names == {
            "config.json",
            "preprocessor_config.json",
            "model.safetensors",
        }
        (wave_BS,) = random_waves(1)
        wave = torch.from_numpy(wave_BS)
        ours = PretrainedFrontEnd(model=str(folders["wavlm"]))
        assert not frontend(wave).equal(ours(wave))
        ours.load_base()
        assert frontend(wave).equal(ours(wave))

        # A training pins the commit, from which it continues without network.
        settings = ["model.name=mhfa", "frontend={name: ssl, model: hf:ann/wavlm}"]
        settings += ["augment.spec.num_freq_masks=0", "augment.spec.num_time_masks=0"]
        config = load_config([], settings)
        pinned = with_description(config, tmp_path / "exp", None).frontend
        assert pinned["model"] == f"hf:ann/wavlm@{commit}"
        assert pinned["sha256"] == weights_sha256(folders["wavlm"])
        server.requests.clear()
        PretrainedFrontEnd(model=pinned["model"]).load_base()
        assert not any("/resolve/" in request for request in server.requests)


def test_weights_of_old_models_are_read_from_a_hub_as_tensors_only(
    folders, tmp_path, monkeypatch
):
    old = tmp_path / "old"
    shutil.copytree(folders["wavlm"], old)
    torch.save(read_weights(old), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    with served() as server:
        use_hub(monkeypatch, server.url, tmp_path / "cache")
        server.add("ann/wavlm", old)
        frontend = PretrainedFrontEnd(model="hf:ann/wavlm")
        frontend.load_base()
    (wave_BS,) = random_waves(1)
    wave = torch.from_numpy(wave_BS)
    ours = PretrainedFrontEnd(model=str(folders["wavlm"]))
    ours.load_base()
    assert frontend(wave).equal(ours(wave))


def test_refusals_of_a_hub_are_one_line(monkeypatch, tmp_path):
    with served() as server:
        use_hub(monkeypatch, server.url, tmp_path)
        with refuses("frontend.model", "hf:nobody/nothing", "HTTP 404"):
            load("hf:nobody/nothing")
        server.fault = "gated"
        with refuses("frontend.model", "hf:nobody/nothing", "gated"):
            load("hf:nobody/nothing")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses("frontend.model", "hf:nobody/nothing", "HF_HUB_OFFLINE"):
        load("hf:nobody/nothing")

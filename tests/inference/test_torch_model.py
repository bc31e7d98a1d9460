"""Decisions by the head of a training: its logits without margin, its classes by name."""

import numpy as np
import pytest
import torch
from refusals import refuses

import speakerlab
from speakerlab.config import build
from speakerlab.inference.torch_model import Classifier, load_classifier
from speakerlab.losses import HEADS

NO_MARGIN = ["training.margin.initial=0", "training.margin.final=0"]


def make_emb(num: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    emb_ND = rng.standard_normal((num, 16))
    return emb_ND.astype(np.float32)


@pytest.mark.parametrize("name", HEADS)
def test_posteriors_of_every_head(make_config, name):
    config = make_config(f"head.name={name}", *NO_MARGIN)
    head = build.build_head(config, embed_dim=16, num_classes=5)
    emb_ND = make_emb(7)
    loaded = Classifier(head, list("abcde"))
    logits_NC = loaded.logits(emb_ND)
    assert logits_NC.shape == (7, 5)
    assert logits_NC.dtype == np.float32

    # Without a margin, the logits are the same for any labels.
    any_label_N = torch.arange(7) % 5
    with torch.no_grad():
        _, wanted_NC = head(torch.from_numpy(emb_ND), any_label_N, 0.0)
    assert np.array_equal(logits_NC, wanted_NC.numpy())

    posterior_NC = loaded.posteriors(emb_ND)
    expected_NC = wanted_NC.softmax(dim=1).numpy()
    assert posterior_NC.sum(axis=1) == pytest.approx(1)
    assert posterior_NC == pytest.approx(expected_NC)
    of_nothing_NC = loaded.logits(emb_ND[:0])
    assert of_nothing_NC.shape == (0, 5)


def test_an_angular_head_gives_its_scale_times_the_cosine(make_config):
    config = make_config("head.args.scale=20")
    head = build.build_head(config, embed_dim=16, num_classes=3)
    # An embedding along the weight of each class; its length does not matter.
    weight_CD = head.get_parameter("weight_CD").detach()
    emb_CD = 5 * weight_CD.numpy()
    logits_CC = Classifier(head, list("abc")).logits(emb_CD)
    assert np.diag(logits_CC) == pytest.approx(20)


def test_models_that_cannot_decide_are_refused(publish_to):
    folder, _, _ = publish_to("sv")
    with refuses(str(folder), "verification"):
        load_classifier(folder)
    folder, _, _ = publish_to("lid", "task=identification")
    (folder / "head.safetensors").unlink()
    with refuses(str(folder), "head.safetensors"):
        load_classifier(folder)


@pytest.mark.parametrize(
    "asked",
    ["runtime.split_head=on", "training.sampled_share=0.5"],
)
def test_the_head_is_whole_on_every_rank(make_config, asked):
    sizes = {"world_size": 2, "num_classes": 60_000}
    verification = make_config()
    identification = make_config("task=identification")
    assert build.is_head_split(verification, **sizes)
    assert not build.is_head_split(identification, **sizes)
    split = make_config("task=identification", asked)
    with refuses("runtime.split_head"):
        build.is_head_split(split, 2, 10)


def test_a_recording_is_classified_in_python(publish_to, make_data_dir):
    make_data_dir(speakers=[0, 1], seconds=[0.5])
    folder, _, head = publish_to("lid", "task=identification")
    wav = folder.parent / "wav" / "spk1-0.wav"
    model = speakerlab.load(folder, device="cpu")
    classified = model.classify(wav)
    names = sorted(name for name, _ in classified)
    assert names == ["a", "b", "c"]
    posteriors = [posterior for _, posterior in classified]
    assert sum(posteriors) == pytest.approx(1)
    assert posteriors == sorted(posteriors, reverse=True)

    emb_ND = model.embed(wav)[None]
    (posterior_C,) = Classifier(head, "abc").posteriors(emb_ND)
    expected = dict(zip("abc", posterior_C))
    assert dict(classified) == pytest.approx(expected, abs=1e-6)

    other, _, _ = publish_to("sv")
    verifier = speakerlab.load(other, device="cpu")
    with refuses("model"):
        verifier.classify(wav)


def test_gpus_that_are_asked_for_must_exist(publish_to, monkeypatch):
    folder, _, _ = publish_to("sv")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # Asks for a GPU that is not there.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with refuses("--gpus", 1, "no GPU found"):
        speakerlab.load(folder)
    speakerlab.load(folder, device="cpu")

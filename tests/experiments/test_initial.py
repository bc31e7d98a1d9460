"""Initializing a training from a published model: which weights are copied, and errors."""

import logging

import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file

from speakerlab.checkpoints.published import write_initial
from speakerlab.config import build
from speakerlab.config.build import build_embedder
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.initial import init_from, keep_the_better
from speakerlab.experiments.validation import PairValidation
from speakerlab.inference.batches import embed_pieces

RATE = 16000


@pytest.mark.parametrize(
    ("head_rows", "copied"),
    [("match", 2), ("keep", 2), ("drop", 0)],
)
def test_the_embedder_and_rows_of_the_same_name_are_copied(
    publish_to, make_config, make_embedder, caplog, head_rows, copied
):
    folder, embedder, old_head = publish_to("model", classes=("a", "b", "c"))
    fresh = make_embedder("seed=9")
    classes = ["new", "c", "a", "c#0.9"]
    head = build.build_head(
        make_config("seed=9"),
        embed_dim=16,
        num_classes=4,
    )
    weight_CD = head.get_parameter("weight_CD")
    expected_CD = weight_CD.detach().clone()
    config = make_config(f"training.init_head={head_rows}")
    with caplog.at_level(logging.INFO):
        init_from(
            folder,
            embedder=fresh,
            head=head,
            classes=classes,
            config=config,
        )

    published = embedder.state_dict()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, published[name]), name
    if copied:
        old_CD = old_head.get_parameter("weight_CD")
        # rows of a, b and c
        expected_CD[1] = old_CD[2]
        expected_CD[2] = old_CD[0]
    assert torch.equal(weight_CD, expected_CD)
    assert weight_CD.requires_grad
    line = (
        f"head: {copied} of 4 rows loaded by name, {4 - copied} new, {3 - copied}"
        " rows of"
    )
    assert line in caplog.text


@pytest.mark.parametrize(
    "name", ["aam_softmax_subcenter_topk", "sphereface2", "softmax"]
)
def test_rows_of_every_parameter_of_a_head_are_copied(
    publish_to, make_config, make_embedder, name
):
    settings = (f"head={{name: {name}}}", "training.margin={initial: 0, final: 0}")
    folder, *_ = publish_to("model", *settings, classes=("a", "b"))
    config = make_config(*settings)
    head = build.build_head(
        make_config("seed=9", *settings),
        embed_dim=16,
        num_classes=3,
    )
    before = {}
    for name, tensor in head.state_dict().items():
        before[name] = tensor.clone()
    init_from(
        folder,
        embedder=make_embedder(),
        head=head,
        classes=["x", "b", "y"],
        config=config,
    )

    # of x, b and y, only b has a row in the old head
    old = load_file(folder / "head.safetensors")
    for key, value in head.named_parameters():
        if value.dim():
            assert torch.equal(value[0], before[key][0]), key
            assert torch.equal(value[1], old[key][1]), key
            assert torch.equal(value[2], before[key][2]), key
        else:
            assert torch.equal(value, old[key]), key


def test_rows_of_another_head_are_not_copied(
    publish_to, make_config, make_embedder, caplog
):
    folder, *_ = publish_to("model", classes=("a", "b"))
    config = make_config("head={name: aam_softmax_subcenter_topk}")
    head = build.build_head(config, embed_dim=16, num_classes=2)
    with caplog.at_level(logging.INFO):
        init_from(
            folder,
            embedder=make_embedder(),
            head=head,
            classes=["a", "b"],
            config=config,
        )
    assert "head: 0 of 2 rows loaded by name, 2 new, 2 rows of" in caplog.text


@pytest.mark.parametrize(
    ("settings", "file", "values"),
    [
        (
            ["model.args.embed_dim=8"],
            "embedder.safetensors",
            ["3 tensors", "backbone.xvector.dense.linear.weight"],
        ),
        (
            ["frontend.scale=32768.0", "frontend.dither=1.0"],
            "",
            ["scale: 1.0 -> 32768.0;"],
        ),
    ],
)
def test_another_model_is_an_error(
    publish_to, make_config, make_embedder, settings, file, values
):
    folder, _, head = publish_to("model")
    embedder = make_embedder(*settings)
    config = make_config(*settings)
    before = {}
    for name, tensor in embedder.state_dict().items():
        before[name] = tensor.clone()
    with refuses(str(folder / file), *values):
        init_from(
            folder,
            embedder=embedder,
            head=head,
            classes=["a"],
            config=config,
        )
    for name, tensor in embedder.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_result_is_compared_with_the_initial_weights(
    make_config, make_data_dir, tmp_path, caplog
):
    folder = make_data_dir(speakers=range(5), seconds=[0.5] * 3)
    manifest = read_manifest([folder], sample_rate=RATE)
    validation = PairValidation(manifest)
    cpu = torch.device("cpu")

    def drawn(seed: int):
        return build_embedder(make_config(f"seed={seed}")).eval()

    def compare(before: int, after: int, *settings: str):
        """Seeds of the weights before and after training."""
        config = make_config(f"seed={before}", *settings)
        state = drawn(after).state_dict()
        trained = drawn(after)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            facts = keep_the_better(
                tmp_path,
                trained,
                validation,
                config,
                cpu,
            )
        is_unchanged = True
        for name, tensor in trained.state_dict().items():
            is_unchanged &= torch.equal(tensor, state[name])
        return facts, is_unchanged, caplog.messages[-1]

    # seeds of a better and a worse model
    eers = []
    for seed in range(2):
        emb_ND = embed_pieces(drawn(seed), validation.pieces, device=cpu)
        eers.append((validation.measure(emb_ND), seed))
    (low, good), (high, bad) = sorted(eers)
    assert low < high
    better = {
        "valid_eer_initial": high,
        "valid_eer_trained": low,
        "kept_initial": False,
    }
    worse = {
        "valid_eer_initial": low,
        "valid_eer_trained": high,
        "kept_initial": False,
    }
    facts, is_unchanged, _ = compare(before=bad, after=good)
    assert facts == better
    assert is_unchanged

    facts, is_unchanged, line = compare(before=good, after=bad)
    assert facts == worse
    assert is_unchanged
    assert "no better than before training" in line
    assert f"{100 * low:.2f}" in line
    assert f"{100 * high:.2f}" in line
    assert "5 validation" in line

    # as --init does
    write_initial(tmp_path, drawn(bad))
    facts, is_unchanged, _ = compare(before=2, after=good)
    assert facts == better
    assert is_unchanged

    write_initial(tmp_path, drawn(good))
    facts, is_unchanged, line = compare(before=2, after=bad)
    assert facts == worse | {"kept_initial": True}
    assert not is_unchanged
    assert "initial model kept" in line
    assert "training.keep_better=false" in line

    # the trained weights anyway
    facts, is_unchanged, line = compare(2, bad, "training.keep_better=false")
    assert facts == worse
    assert is_unchanged
    assert f"{100 * high:.2f}" in line
    assert "trained weights used" in line

    # an equal model is not better
    facts, _, _ = compare(before=2, after=good)
    assert facts["kept_initial"]

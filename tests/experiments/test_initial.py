"""Initializing a training from a published model: which weights are copied, and errors."""

import logging

import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file

from speakerlab.checkpoints.published import write_initial
from speakerlab.config import build
from speakerlab.config.embedder import build_embedder
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments.initial import compare_with_initial, init_from
from speakerlab.experiments.validation import Validation
from speakerlab.inference.batches import embed_pieces

RATE = 16000


@pytest.mark.parametrize(("head_rows", "copied"), [("match", 2), ("keep", 2), ("drop", 0)])
def test_the_embedder_and_rows_of_the_same_name_are_copied(
    publish_to, make_config, make_embedder, caplog, head_rows, copied
):
    folder, embedder, old_head = publish_to("model", classes=("a", "b", "c"))
    fresh = make_embedder("seed=9")
    classes = ["new", "c", "a", "c#0.9"]
    head = build.build_head(make_config("seed=9"), embed_dim=16, num_classes=4)
    before_CD = head.get_parameter("weight_CD").detach().clone()
    with caplog.at_level(logging.INFO):
        config = make_config(f"training.init_head={head_rows}")
        init_from(folder, embedder=fresh, head=head, classes=classes, config=config)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, embedder.state_dict()[name]), name
    wanted_CD = before_CD.clone()
    if copied:
        old_CD = old_head.get_parameter("weight_CD")
        wanted_CD[1], wanted_CD[2] = old_CD[2], old_CD[0]
    assert torch.equal(head.get_parameter("weight_CD"), wanted_CD)
    assert head.get_parameter("weight_CD").requires_grad
    line = f"head: {copied} of 4 rows loaded by name, {4 - copied} new, {3 - copied} rows of"
    assert line in caplog.text


@pytest.mark.parametrize("name", ["aam_softmax_subcenter_topk", "sphereface2", "softmax"])
def test_rows_of_every_parameter_of_a_head_are_copied(publish_to, make_config, make_embedder, name):
    settings = (f"head={{name: {name}}}", "training.margin={initial: 0, final: 0}")
    folder, *_ = publish_to("model", *settings, classes=("a", "b"))
    config = make_config(*settings)
    head = build.build_head(make_config("seed=9", *settings), embed_dim=16, num_classes=3)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    classes = ["x", "b", "y"]
    init_from(folder, embedder=make_embedder(), head=head, classes=classes, config=config)
    old = load_file(folder / "head.safetensors")
    for key, value in head.named_parameters():
        if value.dim():
            assert torch.equal(value[1], old[key][1]), key
            assert torch.equal(value[0], before[key][0]) and torch.equal(value[2], before[key][2])
        else:
            assert torch.equal(value, old[key]), key


def test_rows_of_another_head_are_not_copied(publish_to, make_config, make_embedder, caplog):
    folder, *_ = publish_to("model", classes=("a", "b"))
    config = make_config("head={name: aam_softmax_subcenter_topk}")
    head = build.build_head(config, embed_dim=16, num_classes=2)
    with caplog.at_level(logging.INFO):
        init_from(folder, embedder=make_embedder(), head=head, classes=["a", "b"], config=config)
    assert "head: 0 of 2 rows loaded by name, 2 new, 2 rows of" in caplog.text


@pytest.mark.parametrize(
    ("settings", "file", "values"),
    [
        (
            ["model.args.embed_dim=8"],
            "embedder.safetensors",
            ["3 tensors", "backbone.xvector.dense.linear.weight"],
        ),
        (["frontend.scale=32768.0", "frontend.dither=1.0"], "", ["scale: 1.0 -> 32768.0;"]),
    ],
)
def test_another_model_is_an_error(publish_to, make_config, make_embedder, settings, file, values):
    folder, _, head = publish_to("model")
    embedder, config = make_embedder(*settings), make_config(*settings)
    before = {name: tensor.clone() for name, tensor in embedder.state_dict().items()}
    with refuses(str(folder / file), *values):
        init_from(folder, embedder=embedder, head=head, classes=["a"], config=config)
    assert all(torch.equal(embedder.state_dict()[name], before[name]) for name in before)


def test_the_result_is_compared_with_the_initial_weights(
    make_config, make_data_dir, tmp_path, caplog
):
    manifest = read_manifest(
        [make_data_dir(speakers=range(5), seconds=[0.5] * 3)], sample_rate=RATE
    )
    validation, cpu = Validation(manifest), torch.device("cpu")

    def drawn(seed: int):
        return build_embedder(make_config(f"seed={seed}")).eval()

    def compare(before: int, after: int):
        """Seeds of the weights before and after training."""
        config, state = make_config(f"seed={before}"), drawn(after).state_dict()
        trained = drawn(after)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            facts = compare_with_initial(tmp_path, trained, validation, config, cpu)
        is_same = all(torch.equal(t, state[k]) for k, t in trained.state_dict().items())
        return facts, is_same, caplog.messages[-1]

    pieces = validation.pieces
    eers = [validation.measure(embed_pieces(drawn(seed), pieces, device=cpu)) for seed in range(2)]
    (low, good), (high, bad) = sorted(zip(eers, range(2)))
    assert low < high
    better = {"valid_eer_initial": high, "valid_eer_trained": low, "kept_initial": False}
    worse = {"valid_eer_initial": low, "valid_eer_trained": high, "kept_initial": False}
    assert compare(before=bad, after=good)[:2] == (better, True)
    facts, is_same, line = compare(before=good, after=bad)
    assert (facts, is_same) == (worse, True) and "no better than random" in line
    assert all(text in line for text in (f"{100 * low:.2f}", f"{100 * high:.2f}", "5 validation"))

    write_initial(tmp_path, drawn(bad))  # as --init does
    assert compare(before=2, after=good)[:2] == (better, True)
    write_initial(tmp_path, drawn(good))
    facts, is_same, line = compare(before=2, after=bad)
    assert (facts, is_same) == ({**worse, "kept_initial": True}, False)
    assert "initial model kept" in line
    assert compare(before=2, after=good)[0]["kept_initial"]  # not better

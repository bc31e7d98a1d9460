"""A head whose rows are split over ranks: trained, resumed, published, begun from."""

import pytest
from refusals import refused
from safetensors.torch import load_file
from tiny import cut, losses, slow, weights

SHORT = ["training.num_epochs=1", "training.global_batch=12", "runtime.micro_batch=2"]
SPLIT = [*SHORT, "runtime.split_head=on", "training.sampled_share=0.7"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    exp = tmp_path_factory.mktemp("split") / "whole"
    train(exp, *SPLIT, ranks=2)
    return exp


def test_it_resumes_bit_identically_and_is_published_whole(whole, tmp_path, train):
    copy = cut(whole, tmp_path / "cut")
    done = train(copy, *SPLIT, ranks=2)
    assert "resuming from step 2 of 4" in done.stderr
    assert weights(copy) == weights(whole)
    assert losses(copy) == losses(whole)
    assert load_file(whole / "model/head.safetensors")["weight_CD"].shape == (18, 32)
    assert len((whole / "model/speakers.txt").read_text().splitlines()) == 18


@pytest.mark.parametrize("ranks", [1, slow(3)])
def test_it_resumes_at_another_number_of_ranks(whole, tmp_path, train, ranks):
    copy = cut(whole, tmp_path / "cut")
    done = train(copy, *SPLIT, ranks=ranks)
    assert "resuming from step 2 of 4" in done.stderr
    expected = losses(whole).keys()
    assert losses(copy).keys() == expected


def test_a_training_begins_from_its_model(whole, tmp_path, train):
    finished = train(tmp_path / "next", *SPLIT, "--init", whole / "model")
    assert "head: 18 of 18 rows" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("on", "off"), ("off", "on")])
def test_a_head_may_be_split_or_joined_on_resume(ways, tmp_path, train):
    """Losses are those of the run whose head stayed as it was, to rounding."""
    exp = tmp_path / "whole"
    overrides = [*SHORT, "training.num_epochs=2"]
    train(exp, *overrides, f"runtime.split_head={ways[0]}", ranks=2)
    copy = cut(exp, tmp_path / "cut")
    train(copy, *overrides, f"runtime.split_head={ways[1]}", ranks=2)
    assert losses(copy) == pytest.approx(losses(exp), rel=1e-3)


def test_a_head_that_cannot_be_split_is_refused(tmp_path, train):
    overrides = [
        "runtime.split_head=on",
        "head={name: circle, args: {}}",
        "training.margin.final=0",
    ]
    finished = train(tmp_path / "exp", *overrides, code=1)
    assert refused(finished.stderr, "runtime.split_head", "circle")

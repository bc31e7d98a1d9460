"""--init: the better weights are published, or the trained ones if asked for."""

import pytest
from tiny import card, checkpoints, weights


@pytest.mark.slow
def test_a_finished_run_publishes_the_trained_weights_anyway(trained, train, tmp_path):
    exp = tmp_path / "exp"
    # So low a learning rate helps nobody.
    settings = ("training.num_epochs=1", "training.lr=1e-12", "training.final_lr=1e-12")
    command = (exp, *settings)
    init = ("--init", str(trained))
    text = train(*command, *init).stderr
    assert "initial model kept" in text
    assert "training.keep_better=false" in text
    assert card(exp)["kept_initial"]
    begun = weights(trained)[0]
    assert weights(exp)[0] == begun
    names = [path.name for path in checkpoints(exp)]

    anyway = "training.keep_better=false"
    text = train(*command, anyway, *init).stderr
    assert "trained weights used" in text
    assert not card(exp)["kept_initial"]
    assert weights(exp)[0] != begun
    assert card(exp)["steps"] == 6
    # Nothing was trained.
    assert [path.name for path in checkpoints(exp)] == names

    assert "nothing changed" in train(*command, anyway, *init).stderr
    train(*command, *init)
    assert weights(exp)[0] == begun


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_is_the_configured_one(train, tmp_path, num_threads):
    """The environment of the tests sets OMP_NUM_THREADS to 1."""
    exp = tmp_path / "exp"
    train(exp, "training.num_epochs=1", f"runtime.num_threads={num_threads}")
    facts = (exp / "run.json").read_text()
    assert f'"threads": {num_threads},' in facts

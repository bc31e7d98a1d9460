"""`speakerlab plan`: what fits a card, without the card and without a corpus."""

import re
from pathlib import Path

import pytest

from speakerlab.bin.plan import main

TINY = ["--model", "campplus_tiny", "--speakers", "10"]


def test_the_parts_of_a_card_add_up_and_the_plan_is_exact(capsys):
    main([*TINY, "--gpu-mem", "11", "--gpus", "2", "--precision", "fp32", "--bank-gb", "1"])
    text = capsys.readouterr().out
    assert text.startswith("campplus, ") and ", fp32\n" in text
    parts = [float(value) for value in re.findall(r"^ +([\d.]+)     \S", text, re.MULTILINE)]
    assert parts[4] == 1.0  # noise and rooms
    assert sum(parts) == pytest.approx(11.0, abs=0.05)  # what one more crop would take, at most
    sizes = re.search(r"global batch (\d+) = (\d+) a micro-batch x 2 ranks x (\d+)", text)
    assert sizes is not None
    total, micro, accumulation = map(int, sizes.groups())
    assert total == micro * 2 * accumulation


def test_without_a_size_every_card_has_a_line_in_each_format(capsys):
    main([*TINY, "--recipe", "mini", "--set", "training.global_batch=32", "training.bn_batch=16"])
    text = capsys.readouterr().out
    assert "global batch 32, training.bn_batch 16" in text
    rows = re.findall(r"^  (\d+) GB   (\w+) .* (\d+ x \d+ x \d+) +(\d+)$", text, re.MULTILINE)
    cards = ("11", "16", "24", "32", "40", "80")
    assert [row[:2] for row in rows] == [(c, f) for c in cards for f in ("fp32", "bf16")]
    assert {row[2:] for row in rows} == {("16 x 1 x 2", "16")}


def test_what_training_would_refuse_is_told_so(capsys):
    options = ["--gpu-mem", "4", "--precision", "fp32", "--set", "data.crop_seconds=60"]
    main(["--model", "campplus", "--speakers", "10", *options])
    assert "  refused: runtime.micro_batch: at least 16 crops must fit, got room for 1; use a" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--model", "eres2ne"],
            "--model: no conf/eres2ne.yaml, got eres2ne; did you mean eres2net",
        ),
        (
            [*TINY, "--recipe", "minni"],
            "--recipe: no egs/minni/conf.yaml, got minni; did you mean m",
        ),
        ([*TINY, "--gpu-mem", "0"], "--gpu-mem: must be a number above 0, got 0; correct it"),
        ([*TINY, "--bank-gb", "-1"], "--bank-gb: must not be below 0, got -1; correct it"),
    ],
)
def test_wrong_input_is_one_line(words, line):
    with pytest.raises(ValueError) as refused:
        main(words)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_table_of_three_cards_and_two_models(capsys):
    main(["--table"])
    text = capsys.readouterr().out
    plans = re.findall(r"^  (\d+) GB   (\w+) +[\d.]+ +(\d+)   (\d+) x 1", text, re.MULTILINE)
    campplus, eres2net = [[int(micro) for *_, micro in plans[i : i + 6]] for i in (0, 6)]
    assert campplus == [64] * 6
    assert eres2net == [16, 32, 32, 64, 64, 64]  # 11, 24 and 32 GB, fp32 and bf16 of each
    guide = (Path(__file__).parents[2] / "docs/hardware.md").read_text()
    for first in (0, 1, 6, 7):  # the guide tells what the command prints
        assert f"| {' / '.join(fit for *_, fit, _ in plans[first : first + 6 : 2])} |" in guide

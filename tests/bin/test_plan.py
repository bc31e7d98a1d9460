"""`speakerlab plan`: what fits a card, without the card and without a corpus."""

import re

import pytest
from tiny import ROOT

from speakerlab.bin.plan import main

TINY = ["--model", "campplus_tiny", "--speakers", "10"]


def test_the_parts_of_a_card_add_up(capsys):
    main([*TINY, "--gpu-mem", "11", "--gpus", "2", "--precision", "fp32", "--bank-gb", "1"])
    text = capsys.readouterr().out
    assert text.startswith("campplus, ") and ", fp32\n" in text
    parts = [float(value) for value in re.findall(r"^ +([\d.]+)     \S", text, re.MULTILINE)]
    assert parts[4] == 1.0  # noise and rooms
    assert sum(parts) == pytest.approx(11.0, abs=0.05)  # what one more crop would take, at most
    sizes = re.search(r"global batch (\d+) = micro-batch (\d+) x 2 ranks x (\d+)", text)
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


def test_a_plan_that_training_would_refuse_says_so(capsys):
    main([*TINY, "--gpu-mem", "0.5", "--precision", "fp32", "--set", "data.crop_seconds=60"])
    assert "  refused: runtime.micro_batch: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--model", "eres2ne"], ["--model: ", "eres2ne", "eres2net"]),
        ([*TINY, "--recipe", "minni"], ["--recipe: ", "minni", "mini"]),
        ([*TINY, "--gpu-mem", "0"], ["--gpu-mem: 0"]),
        ([*TINY, "--bank-gb", "-1"], ["--bank-gb: -1"]),
        ([*TINY, "--gpus", "many"], ["--gpus: ", "'many'"]),
    ],
)
def test_refusals(words, values, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        main(words)
    text = f"{caught.value}{capsys.readouterr().err}"
    assert all(value in text for value in values)


@pytest.mark.slow
def test_the_table_of_the_hardware_guide_is_what_the_command_prints(capsys):
    main(["--table"])
    text = capsys.readouterr().out
    plans = re.findall(r"^  (\d+) GB   (\w+) +[\d.]+ +(\d+)   (\d+) x 1", text, re.MULTILINE)
    campplus, eres2net = [[int(micro) for *_, micro in plans[i : i + 6]] for i in (0, 6)]
    assert campplus == [64] * 6
    assert eres2net == [16, 32, 32, 64, 64, 64]  # 11, 24 and 32 GB, fp32 and bf16 of each
    guide = (ROOT / "docs/hardware.md").read_text()
    for first in (0, 1, 6, 7):
        assert f"| {' / '.join(fit for *_, fit, _ in plans[first : first + 6 : 2])} |" in guide

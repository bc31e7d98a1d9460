"""`speakerlab plan`: what fits a card, without the card and without a corpus."""

import re
from pathlib import Path

import pytest
import torch
from refusals import refuses
from tiny import CONFIG, ROOT

from speakerlab.bin.plan import main
from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.experiments import planning
from speakerlab.experiments.planning import plan_batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import resolve_precision

TINY = ["--model", "campplus_tiny", "--speakers", "10"]


def test_the_parts_of_a_card_add_up(capsys):
    main([*TINY, "--gpu-mem", "11", "--gpus", "2", "--precision", "fp32", "--bank-gb", "1"])
    text = capsys.readouterr().out
    assert text.startswith("campplus, ") and re.search("11 GB +fp32", text)
    found = [re.findall(r"[\d.]+", line) for line in text.splitlines() if "for CUDA" in line]
    fixed, crops, _ = map(float, found[0])
    assert fixed >= 2.5  # with noise and rooms
    free = 0.92 * (11 - 0.25)  # what one more crop would take, at most
    assert free - 0.03 < fixed + crops < free + 0.01
    sizes = re.search(r"global batch (\d+) = micro-batch (\d+) x 2 ranks x (\d+)", text)
    assert sizes is not None
    total, micro, accumulation = map(int, sizes.groups())
    assert total == micro * 2 * accumulation
    assert "not counted" not in text


def test_without_a_size_every_card_has_a_line_in_each_format(capsys):
    main([*TINY, "--recipe", "mini", "--set", "training.global_batch=32", "training.bn_batch=16"])
    text = capsys.readouterr().out
    assert "global batch 32, training.bn_batch 16" in text
    rows = re.findall(r"^  (\d+) GB   (\w+) .* (\d+ x \d+ x \d+) +(\d+)$", text, re.MULTILINE)
    cards = ("11", "16", "24", "32", "40", "80")
    assert [row[:2] for row in rows] == [(c, f) for c in cards for f in ("fp32", "bf16")]
    assert {row[2:] for row in rows} == {("16 x 1 x 2", "16")}
    assert re.search("not counted: noise and rooms, up to 4 GB .*--bank-gb", text)


@pytest.fixture
def footprints(monkeypatch):
    """Compute each footprint of `campplus_tiny` once, which takes a second."""
    compute, known = planning.footprint, FOOTPRINTS

    def look_up(config, **how):
        key = (config.data.crop_seconds, how["num_classes"], how["precision"], how["split_over"])
        return known[key] if key in known else known.setdefault(key, compute(config, **how))

    monkeypatch.setattr(planning, "footprint", look_up)


FOOTPRINTS: dict[tuple[object, ...], planning.Footprint] = {}


class Alike(Ranks):
    """Ranks with equal GPUs."""

    def every(self, value):
        return [value] * self.world_size


# A crop of 60 s takes 170 MiB in fp32. Expected: micro-batch, accumulation, BatchNorm; or an error.
LONG = ("data.crop_seconds=60", "training.global_batch=256", "runtime.precision=fp32")
BF16 = (*LONG, "runtime.precision=bf16")
NEXT = "training.bn_batch=64"


@pytest.mark.parametrize(
    ("card_gb", "gpus", "settings", "expected"),
    [
        (0.1, 1, LONG, ("--gpu-mem", 16, 0.1, "0 do", "use 5 GB")),
        (4, 1, LONG, ("--gpu-mem", 16, "11 do", "micro_batch=8", "bf16", "5 GB", "crop_seconds")),
        (5, 1, LONG, (16, 16, 16)),
        (4, 1, (*LONG, "data.crop_seconds=40"), (16, 16, 16)),
        (4, 1, BF16, (16, 16, 16)),
        (11, 4, (*LONG, NEXT), (32, 2, 32)),
        (3, 4, (*LONG, NEXT), (4, 16, 16)),
        (11, 1, (*BF16, NEXT), (64, 4, 64)),
        (11, 3, LONG, ("training.global_batch", 256, 3)),
        (11, 1, (*LONG, "runtime.micro_batch=24"), ("runtime.micro_batch", 24, "16 and 32")),
        (
            11,
            1,
            (*LONG, "runtime.micro_batch=64"),
            ("runtime.micro_batch", 64, 52, "micro_batch=32"),
        ),
        (13.3, 1, (*LONG, "runtime.micro_batch=64"), (64, 4, 64)),  # auto takes 32
        (13.3, 1, LONG, (32, 8, 32)),
        (4, 1, (*LONG, "runtime.micro_batch={campplus: 8}"), (8, 32, 8)),
    ],
)
def test_a_plan_is_what_training_decides(
    footprints, monkeypatch, capsys, card_gb, gpus, settings, expected
):
    """Only the free memory of the GPU is simulated."""
    config, ranks = (
        load_config([Path(CONFIG)], settings),
        Alike(0, gpus, gpus, torch.device("cuda")),
    )
    task = build.build_task(config, num_classes=30, precision=resolve_precision("fp32", "cpu"))
    task.set_precision(resolve_precision(config.runtime.precision, "cpu"))
    free = int((card_gb - 0.25) * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    words = [*TINY, "--gpu-mem", f"{card_gb}", "--gpus", f"{gpus}", "--set", *settings]
    if isinstance(expected[0], int):
        plan = plan_batch(config, ranks, task)
        assert (plan.micro_batch, plan.accumulation, plan.bn_batch) == expected
        main(words)
        assert f"    {plan}\n" in capsys.readouterr().out
        return
    with refuses(*expected) as planned:
        main(words)
    with pytest.raises(type(planned.value)) as trained:
        plan_batch(config, ranks, task)
    (subject, reason), (_, trained_reason) = (
        re.sub(r"[\d.]+ GB|(?<=\d)\.\d", "", str(error.value)).split(":", 1)
        for error in (planned, trained)
    )
    assert trained_reason == reason, subject


def test_without_labels_an_utterance_is_planned_with_all_its_views(capsys):
    words = ["--config", "campplus_tiny", "ssl/sdpn", "--precision", "fp32", "--set"]
    words += ["objective.args.hidden_dim=16", "training.global_batch=16"]
    main([*words, "--gpu-mem", "11"])
    text = capsys.readouterr().out
    assert text.startswith(
        "campplus, sdpn, utterances (views: 1 of 4 s, 4 of 2 s), global batch 16"
    )
    assert "MiB/utterance   utterances that fit" in text
    assert re.search(r"for \d+ utterances\n", text)
    assert re.search("16 x 1 x 1 +16\n", text) and "crop" not in text
    with refuses("--gpu-mem", "16 utterances (views", "training.global_batch") as caught:
        main([*words, "--gpu-mem", "1"])
    assert "crop" not in str(caught.value)


@pytest.mark.usefixtures("footprints")
def test_a_table_shows_what_does_not_fit_and_refuses_only_if_nothing_does(capsys):
    main([*TINY, "--precision", "bf16", "--bank-gb", "9"])
    text = capsys.readouterr().out
    assert re.search(r"11 GB   bf16 .* 0   refused: --gpu-mem: 16 crops of 2 s in bf16", text)
    assert re.search(r"16 GB   bf16 .* 32 x 1 x 1", text)
    with refuses("--gpu-mem", 16, "do not fit in 80 GB"):
        main([*TINY, "--precision", "bf16", "--bank-gb", "99"])


@pytest.mark.parametrize("setting", ["task=identification", "augment.speed_classes=off"])
def test_classes_are_not_multiplied_by_speeds_that_make_none(setting, footprints, capsys):
    bare = [setting, "augment.noise_prob=0", "augment.room_prob=0"]
    main([*TINY, "--gpu-mem", "11", "--set", *bare])
    text = capsys.readouterr().out
    assert text.startswith("campplus, 10 classes") and "not counted" not in text


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--model", "eres2ne"], ["eres2ne: ", "eres2net"]),
        ([*TINY, "--recipe", "minni"], ["--recipe: ", "minni", "mini"]),
        ([*TINY, "--gpu-mem", "0"], ["--gpu-mem: 0"]),
        ([*TINY, "--bank-gb", "-1"], ["--bank-gb: -1"]),
        ([*TINY, "--gpus", "many"], ["--gpus: ", "'many'"]),
    ],
)
def test_refusals(words, values, capsys):
    with pytest.raises((ValueError, OSError, SystemExit)) as caught:
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
    assert eres2net == [32, 64, 64, 64, 64, 64]  # 11, 24 and 32 GB, fp32 and bf16 of each
    guide = (ROOT / "docs/hardware.md").read_text()
    for first in (0, 1, 6, 7):
        assert f"| {' / '.join(fit for *_, fit, _ in plans[first : first + 6 : 2])} |" in guide

"""`speakerlab plan`: what fits a card, without the card and without a corpus."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from refusals import refuses
from tiny import CONFIG, ROOT

from speakerlab.bin.plan import main
from speakerlab.config.schema import load_config
from speakerlab.experiments import footprint
from speakerlab.experiments.planning import BankBytes, plan_device
from speakerlab.training.distributed import Ranks

TINY = ["--model", "campplus_tiny", "--speakers", "10"]


def test_the_parts_of_a_card_add_up(capsys):
    card = ["--gpu-mem", "11", "--gpus", "2", "--precision", "fp32"]
    main([*TINY, *card, "--bank-gb", "1"])
    text = capsys.readouterr().out
    assert text.startswith("campplus, ")
    assert re.search("11 GB +fp32", text)
    rows = re.findall(r"^ +([\d.]+) GiB  (.*)$", text, re.MULTILINE)
    parts = {name: float(gib) for gib, name in rows}
    assert sum(parts.values()) == pytest.approx(11, abs=0.05)
    assert parts["driver"] == 0.25
    assert parts["CUDA context"] == 0.4
    assert parts["NCCL buffers"] == 0.25
    assert parts["noise and rooms"] == 1
    assert parts["libraries, weights, gradients and optimizer"] >= 1.1
    assert parts["reserve"] == pytest.approx(0.08 * 10.1, abs=0.01)
    (crops,) = [gib for name, gib in parts.items() if name.endswith(" crops")]
    assert crops > 0

    sizes = re.search(r"global batch (\d+) = micro-batch (\d+) x 2 ranks x (\d+)", text)
    assert sizes is not None
    global_batch, micro_batch, accumulation = map(int, sizes.groups())
    assert global_batch == micro_batch * 2 * accumulation
    assert "counted: 1 GB for noise and rooms (--bank-gb)" in text


def test_without_a_size_every_card_has_a_line_in_each_format(capsys):
    settings = ["training.global_batch=32", "training.bn_batch=16"]
    main([*TINY, "--recipe", "mini", "--set", *settings])
    text = capsys.readouterr().out
    assert "global batch 32, training.bn_batch 16" in text

    pattern = r"^  (\d+) GB   (\w+) .* (\d+ x \d+ x \d+) +(\d+) +[\d.]+$"
    rows = re.findall(pattern, text, re.MULTILINE)
    cards = ("16", "24", "32", "40", "80")
    # No card of 11 GB has bf16.
    expected = [("11", "fp32"), ("11", "fp16"), *product(cards, ("fp32", "bf16"))]
    assert [(card, precision) for card, precision, _, _ in rows] == expected
    for _, _, split, bn_batch in rows:
        assert split == "16 x 1 x 2"
        assert bn_batch == "16"
    assert "counted: 0.1 GB for rooms (see --bank-gb); noise may take the GiB" in text


@pytest.mark.parametrize("option", ["--gpu-mem", "--bank-gb"])
def test_mebibytes_are_refused(option):
    with refuses(option, "11000", "give 10.7"):
        main([*TINY, option, "11000"])


@pytest.mark.usefixtures("footprints")
@pytest.mark.parametrize(
    ("options", "banks_gib", "line"),
    [
        ([], 0.1, "counted: 0.1 GB for rooms"),
        (["--set", "augment.room_prob=0"], 0, None),
        (["--set", "runtime.bank_gb=3"], 3, "counted: 3 GB, the most for noise and"),
        (["--bank-gb", "2", "--set", "runtime.bank_gb=3"], 2, "counted: 2 GB for"),
        (["--bank-gb", "0"], 0, None),
    ],
)
def test_noise_and_rooms_are_counted(capsys, options, banks_gib, line):
    main([*TINY, "--gpu-mem", "24", "--precision", "fp32", *options])
    text = capsys.readouterr().out
    assert f"{banks_gib:6.2f} GiB  noise and rooms\n" in text
    assert ("counted: " in text) == (line is not None)
    assert line is None or line in text


def test_a_micro_batch_of_the_user_may_take_the_reserve(footprints, capsys):
    """Of 13.3 GB, `auto` takes 32 crops of 60 s, and leaves memory for noise."""
    card = ["--gpu-mem", "13.3", "--set", *LONG]
    main([*TINY, *card, "runtime.micro_batch=64"])
    rows = re.findall(r"([\d.]+) GiB  (\w+)", capsys.readouterr().out)
    reserve = {name: float(gib) for gib, name in rows}["reserve"]
    assert 0 < reserve < 0.08 * 13
    assert ("0.00", "left") in rows
    main([*TINY, *card])
    rows = re.findall(r"([\d.]+) GiB  (\w+)", capsys.readouterr().out)
    (left,) = [float(gib) for gib, name in rows if name == "left"]
    assert left > 4


@pytest.fixture
def footprints(monkeypatch):
    """Compute each footprint of `campplus_tiny` once, which takes a second."""
    compute = footprint.footprint

    def look_up(config, **options):
        key = (
            config.data.crop_seconds,
            options["num_classes"],
            options["precision"],
            options["split_over"],
        )
        if key not in FOOTPRINTS:
            FOOTPRINTS[key] = compute(config, **options)
        return FOOTPRINTS[key]

    monkeypatch.setattr(footprint, "footprint", look_up)


FOOTPRINTS: dict[tuple[object, ...], footprint.Footprint] = {}


class Alike(Ranks):
    """Ranks with equal GPUs."""

    def gather_objects(self, value):
        return [value] * self.world_size


# A crop of 60 s takes 170 MiB in fp32. Expected: micro-batch, accumulation, BatchNorm; or an error.
LONG = ("data.crop_seconds=60", "training.global_batch=256", "runtime.precision=fp32")
BF16 = (*LONG, "runtime.precision=bf16")
NEXT = "training.bn_batch=64"


@pytest.mark.parametrize(
    ("card_gb", "gpus", "settings", "expected"),
    [
        (0.1, 1, LONG, ("--gpu-mem", 16, 0.1, "0 do", "use 5 GB")),
        (
            4,
            1,
            LONG,
            ("--gpu-mem", 16, "10 do", "micro_batch=8", "bf16", "5 GB", "crop_seconds"),
        ),
        (5, 1, LONG, (16, 16, 16)),
        (4, 1, (*LONG, "data.crop_seconds=40"), (16, 16, 16)),
        (4, 1, BF16, (16, 16, 16)),
        (11, 4, (*LONG, NEXT), (32, 2, 32)),
        (3, 4, (*LONG, NEXT), (4, 16, 16)),
        (11, 1, (*BF16, NEXT), (64, 4, 64)),
        (11, 3, LONG, ("training.global_batch", 256, 3)),
        (
            11,
            1,
            (*LONG, "runtime.micro_batch=24"),
            ("runtime.micro_batch", 24, "16 and 32"),
        ),
        (
            12,
            1,
            (*LONG, "runtime.micro_batch=64"),
            ("runtime.micro_batch", 64, 57, "micro_batch=32"),
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
    config = load_config([Path(CONFIG)], settings)
    ranks = Alike(0, gpus, gpus, torch.device("cuda"))
    options = {
        "num_classes": 30,
        "precision": config.runtime.precision,
        "banks": BankBytes(rooms=int(0.1 * 2**30)),
    }
    # Of a card, the driver, CUDA and NCCL take their part before.
    taken_gb = 0.65 if gpus == 1 else 0.9
    free = max(int((card_gb - taken_gb) * 2**30), 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    card = ["--gpu-mem", f"{card_gb}", "--gpus", f"{gpus}"]
    arguments = [*TINY, *card, "--set", *settings]
    if isinstance(expected[0], int):
        plan = plan_device(config, ranks, **options).batch
        micro_batch, accumulation, bn_batch = expected
        assert plan.micro_batch == micro_batch
        assert plan.accumulation == accumulation
        assert plan.bn_batch == bn_batch
        main(arguments)
        assert f"    {plan}\n" in capsys.readouterr().out
        return
    with refuses(*expected) as planned:
        main(arguments)
    with pytest.raises(type(planned.value)) as trained:
        plan_device(config, ranks, **options)
    # Training gives the same reason, except for the sizes in it.
    subject, reason = without_sizes(planned.value).split(":", 1)
    _, trained_reason = without_sizes(trained.value).split(":", 1)
    assert trained_reason == reason, subject


def without_sizes(error: BaseException) -> str:
    """Return a message without its sizes in GB and without decimals."""
    return re.sub(r"[\d.]+ GB|(?<=\d)\.\d", "", str(error))


def test_without_labels_an_utterance_is_planned_with_all_its_views(capsys):
    model = ["--config", "campplus_tiny", "ssl/sdpn", "--precision", "fp32"]
    settings = ["objective.args.hidden_dim=16", "training.global_batch=16"]
    arguments = [*model, "--set", *settings, "--gpu-mem"]
    main([*arguments, "11"])
    text = capsys.readouterr().out
    views = "utterances (views: 1 of 4 s, 4 of 2 s)"
    assert text.startswith(f"campplus, sdpn, {views}, global batch 16")
    assert "MiB/utterance   utterances that fit" in text
    assert re.search(r"GiB  \d+ utterances\n", text)
    assert re.search("16 x 1 x 1 +16 ", text)
    assert "crop" not in text
    problem = ("--gpu-mem", "16 utterances (views", "training.global_batch")
    with refuses(*problem) as caught:
        main([*arguments, "1"])
    assert "crop" not in str(caught.value)


@pytest.mark.usefixtures("footprints")
def test_a_table_shows_what_does_not_fit_and_refuses_only_if_nothing_does(capsys):
    main([*TINY, "--precision", "bf16", "--bank-gb", "9"])
    text = capsys.readouterr().out
    problem = "--gpu-mem: 16 crops of 2 s in bf16"
    assert re.search(rf"11 GB   bf16 .* 0   refused: {problem}", text)
    assert "less than 9 GB of noise and rooms" in " ".join(text.split())
    assert re.search(r"16 GB   bf16 .* 32 x 1 x 1", text)
    with refuses("--gpu-mem", 16, "do not fit in 80 GB"):
        main([*TINY, "--precision", "bf16", "--bank-gb", "99"])


@pytest.mark.usefixtures("footprints")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--bank-gb", "15"],  # two cards are too small
        ["--gpu-mem", "10.75"],
        ["--gpu-mem", "24", "--gpus", "4"],
    ],
)
def test_the_table_fits_100_columns(capsys, options):
    main([*TINY, *options])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    # What the longest lines say is broken, not cut.
    if options[:1] == ["--bank-gb"]:
        text = " ".join(" ".join(lines).split())
        assert "refused: --gpu-mem: " in text
        assert "or a smaller model" in text
    of_11_gb = [line for line in lines if re.match("  (11|10.8) GB", line)]
    assert not any("bf16 " in line[:20] for line in of_11_gb)


def test_bf16_on_a_card_without_it_is_said_to_be_slow(footprints, capsys):
    for size, expected in (("11", 1), ("24", 0)):
        main([*TINY, "--gpu-mem", size, "--precision", "bf16"])
        assert capsys.readouterr().out.count("have no bf16") == expected


@pytest.mark.parametrize(
    "setting", ["task=identification", "augment.speed_classes=off"]
)
def test_classes_are_not_multiplied_by_speeds_that_make_none(
    setting, footprints, capsys
):
    bare = [setting, "augment.noise_prob=0", "augment.room_prob=0"]
    main([*TINY, "--gpu-mem", "11", "--set", *bare])
    text = capsys.readouterr().out
    assert text.startswith("campplus, 10 classes")
    assert "counted: " not in text


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--model", "eres2ne"], ["eres2ne: ", "eres2net"]),
        ([*TINY, "--recipe", "minni"], ["--recipe: ", "minni", "mini"]),
        ([*TINY, "--gpu-mem", "0"], ["--gpu-mem: 0"]),
        ([*TINY, "--bank-gb", "-1"], ["--bank-gb: -1"]),
        ([*TINY, "--gpus", "many"], ["--gpus: ", "'many'"]),
    ],
)
def test_refusals(arguments, values, capsys):
    with pytest.raises((ValueError, OSError, SystemExit)) as caught:
        main(arguments)
    text = f"{caught.value}{capsys.readouterr().err}"
    for value in values:
        assert value in text


@pytest.mark.slow
def test_the_table_of_the_hardware_guide_is_what_the_command_prints(capsys):
    main(["--table"])
    text = capsys.readouterr().out
    pattern = r"^  (\d+) GB   (\w+) +[\d.]+ +(\d+)   (\d+) x 1"
    plans = re.findall(pattern, text, re.MULTILINE)
    # 11, 24 and 32 GB, fp32 and bf16 of each; six lines of CAM++, then six of ERes2Net.
    micro_batches = [int(micro_batch) for *_, micro_batch in plans]
    assert micro_batches[:6] == [64] * 6
    assert micro_batches[6:12] == [32, 64, 64, 64, 64, 64]

    # A row of the guide has every card of a model and a precision.
    guide = (ROOT / "docs/hardware.md").read_text()
    for first in (0, 1, 6, 7):
        cells = [crops for *_, crops, _ in plans[first : first + 6 : 2]]
        assert f"| {' / '.join(cells)} |" in guide

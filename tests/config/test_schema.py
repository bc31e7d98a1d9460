"""Configuration: what is refused, by which line; how layers are merged; what is written."""

from pathlib import Path

import pytest
from refusals import refused, refuses

from speakerlab.config.schema import Config, differences, load_config, parse_config

ROOT = Path(__file__).parents[2]
TINY = "model: {name: campplus, args: {embed_dim: 64, blocks: [1, 1, 1]}}\n"


@pytest.fixture
def load(tmp_path: Path):
    """load("text of a layer", "of another", set=["a.b=1"]) -> Config; files are 0.yaml, 1.yaml."""

    def load_texts(*texts: str, set: tuple[str, ...] = ()) -> Config:
        layers = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
        for layer, text in zip(layers, texts):
            layer.write_text(text)
        return load_config(layers, set)

    return load_texts


@pytest.fixture
def refusal(load, tmp_path: Path):
    """The lines with which `load` refuses, without the folder of the layers."""

    def lines(*texts: str, set: tuple[str, ...] = ()) -> list[str]:
        with pytest.raises(ValueError) as refused:
            load(*texts, set=set)
        return str(refused.value).replace(f"{tmp_path}/", "").splitlines()

    return lines


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("trainning: {}", "trainning", "training"),
        ("Seed: 1", "Seed", "seed"),
        ("training: {num_epoch: 1}", "training.num_epoch", "num_epochs"),
        ("training: {margin: {finl: 0.2}}", "training.margin.finl", "final"),
        ("model: {args: {embd_dim: 64}}", "model.args.embd_dim", "embed_dim"),
        ("frontend: {num_mel_bin: 80}", "frontend.num_mel_bin", "num_mel_bins"),
        ("augment: {kind_odds: {hum: 1}}", "augment.kind_odds.hum", "noise"),
        (
            "augment: {spec: {freq_masks: 1}}",
            "augment.spec.freq_masks",
            "num_freq_masks",
        ),
        ("head: {args: {scal: 1.0}}", "head.args.scal", "scale"),
        ("model: {name: camplus}", "model.name", "campplus"),
        # an argument that the program gives, and a key like no other
        (
            "optimizer: {args: {lr: 0.1}}",
            "optimizer.args.lr",
            "momentum, nesterov, weight_decay",
        ),
        ("lr: 0.2", "lr", "did you mean training.lr?"),
        ("zzz-Q: 1", "zzz-Q", "augment, conversations, data, distil, "),
    ],
)
def test_unknown_key_or_name_is_refused_with_the_nearest(refusal, text, key, nearest):
    (message,) = refusal(TINY, text)
    assert refused(message, f"1.yaml: {key}", nearest)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training: {lr: many}", "training.lr", "'many'"),
        ("training: {lr: 0}", "training.lr", "0 is not greater than 0"),
        ("training: {num_epochs: 1.5}", "training.num_epochs", "1.5 "),
        ("training: {num_epochs: 010}", "training.num_epochs", "'010'"),
        ("training:", "training", "null is not a section of keys"),
        ("model: {args: 3}", "model.args", "3 is not a section of keys"),
        ("augment: {speeds: 1.0}", "augment.speeds", "1.0 is not a list"),
        ("augment: {snr_db: [5.0]}", "augment.snr_db.1", "is missing"),
        (
            "frontend: {window: hann}",
            "frontend.window",
            "'hann' is not 'povey' or 'hamming'",
        ),
        (
            "augment: {spec: {num_freq_masks: -1}}",
            "augment.spec.num_freq_masks",
            "-1 is not",
        ),
        ("model: {args: {blocks: [1, x]}}", "model.args.blocks.1", "'x'"),
        ("data: {noise: true}", "data.noise", "true "),
        ("runtime: {deterministic: on}", "runtime.deterministic", "'on'"),
        ("runtime: {micro_batch: true}", "runtime.micro_batch", "'auto' or a valid"),
        (
            "runtime: {micro_batch: {ERes-2: 0}}",
            "runtime.micro_batch.ERes-2",
            "0 is not",
        ),
        ("runtime: {num_workers: -1}", "runtime.num_workers", "-1 is not"),
        ("runtime: {precision: fp8}", "runtime.precision", "'auto', 'fp32', 'bf16'"),
        ("augment: {speeds: [0.9, 1.0]}", "augment.speeds", "[0.9, 1.0]"),
        ("augment: {speeds: [1.0, 1.1, 1.1]}", "augment.speeds", "[1.0, 1.1, 1.1]"),
        (
            "augment: {speed_classes: false}",
            "augment.speed_classes",
            "false is not 'auto', 'on'",
        ),
        ("augment: {snr_db: [15.0, 0.0]}", "augment.snr_db", "[15.0, 0.0]"),
        (
            "training: {margin: {start_epoch: 3, end_epoch: 2}}",
            "training.margin",
            "end_epoch",
        ),
        ("data: {labels: lang}", "data.labels", "'lang'"),
        ("data: {train: []}", "data.train", "[]"),
        ("augment: {babble_voices: [7, 3]}", "augment.babble_voices", "[7, 3]"),
        (
            "augment: {codecs: [gsm, mp3:20k]}",
            "augment.codecs.1",
            "'mp3:20k' is no codec; use",
        ),
        ("augment: {codecs: []}", "augment.codecs", "[]"),
    ],
)
def test_bad_value_is_one_line(refusal, text, key, value):
    (message,) = refusal(TINY, text)
    assert refused(message, f"1.yaml: {key}", value)


@pytest.mark.parametrize(
    ("component", "arg", "value", "complaint"),
    [
        ("model: resnet", "depth", 35, "35 is not 18, 34, 50, 101"),
        ("model: gemini_dfresnet", "depth", 34, "34 is not 60, 114"),
        ("model: simam_resnet", "depth", 50, "50 is not 34 or 100"),
        ("model: xvector", "pooling", "tap", "'tap' is not 'tstp' or 'astp'"),
        ("model: eres2net", "blocks", (1, 2, 3), "is missing"),
        ("head: sphereface2", "positive_weight", 1, "1 is not less than 1"),
        ("head: sphereface2", "exponent", 0, "0 is not"),
        ("head: aam_softmax_subcenter_topk", "num_centers", 0, "0 is not"),
        ("head: aam_softmax_subcenter_topk", "top_k", -1, "-1 is not"),
    ],
)
def test_an_argument_of_a_component_is_bounded_by_its_signature(
    refusal, component, arg, value, complaint
):
    section, name = component.split(": ")
    layer = f"{section}: {{name: {name}, args: {{{arg}: {value}}}}}".replace("(", "[")
    model = [] if section == "model" else [TINY]
    (message,) = refusal(*model, layer.replace(")", "]"))
    key = f"{section}.args.{arg}" + (".3" if arg == "blocks" else "")
    assert refused(message, f"{len(model)}.yaml: {key}", complaint)


def test_every_fault_in_one_go_each_naming_its_layer(refusal):
    messages = refusal(
        TINY,
        "training: {lr: many, epochs: 3}\naugment: {speeds: [0.9]}",
        "model: {args: {embed_dim: wide}}\ndata: {valid_speakers: -1}",
        set=("frontend.sampel_rate=8000", "runtime={bank_gb: 0}"),
    )
    assert sorted(line.split(": ", 2)[:2] for line in messages) == [
        [
            "--set frontend.sampel_rate=8000",
            "unknown key; did you mean frontend.sample_rate?",
        ],
        ["--set runtime={bank_gb", "0}"],
        ["1.yaml", "augment.speeds"],
        ["1.yaml", "training.epochs"],
        ["1.yaml", "training.lr"],
        ["2.yaml", "data.valid_speakers"],
        ["2.yaml", "model.args.embed_dim"],
    ]
    assert (
        "--set runtime={bank_gb: 0}: runtime.bank_gb: 0 is not 'auto' or greater than 0"
        in messages
    )


def test_sections_that_miss_or_contradict_are_one_line(refusal):
    assert refusal("seed: 1") == ["0.yaml: model: is missing; add it"]
    (message,) = refusal(TINY, "data: {labels: utt2lang}")  # verification has speakers
    assert refused(message, "data.labels", "utt2lang", "identification")
    (message,) = refusal(TINY, "{task: identification, augment: {speed_classes: on}}")
    assert refused(message, "augment.speed_classes", "on is", "verification")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("+2", 2.0),
        ("1.5e+1", 15.0),
    ],
)
def test_numbers_are_numbers(load, text, value):
    assert load(TINY, f"training: {{lr: {text}}}").training.lr == value


@pytest.mark.parametrize(
    "word",
    ["off", "no", "y", "True", "trueish", "010", "1:30", "1_000", "0x1F", "2020-01-01"],
)
def test_other_words_are_strings(load, word):
    assert load(TINY, f"data: {{dir: {word}}}").data.dir == word


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (
            "training:\n  lr: 0.1\n  num_epochs: 3\n  lr: 0.2\n",
            ":4",
            "key 'lr' occurs twice",
        ),
        ("seed: 1\n training: {}\n", ":2", "mapping values are not allowed"),
        ("seed: 1\ntraining: {lr: 0.1", ":2", "flow mapping of line 2)"),
        ("seed: 1\ntraining:\n\tlr: 0.1\n", ":3", r"'\t'"),
        ("seed: !!python/object/apply:os.getpid []", ":1", "python/object"),
        ("seed: \0", "", "#x0000"),
    ],
)
def test_a_yaml_error_is_one_line_with_file_line_problem(
    load, tmp_path, text, line, problem
):
    with refuses(f"{tmp_path / '0.yaml'}{line}", problem) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_a_folder_as_a_layer_is_called_a_folder(tmp_path: Path):
    with refuses(str(tmp_path), "folder"):
        load_config([tmp_path])
    (tmp_path / "conf.yaml").write_text(TINY)
    with refuses(str(tmp_path), "folder", tmp_path / "conf.yaml"):
        load_config([tmp_path])


def test_file_that_is_no_section_or_not_there(load, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"0.yaml: \['a'\] is not a set of 'section: ...' lines"
    ):
        load("- a")
    with refuses(f"{tmp_path / 'none.yaml'}", "conf", error=FileNotFoundError):
        load_config([tmp_path / "none.yaml"])


def test_a_layer_is_a_path_or_the_name_of_a_shipped_file(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eres2net").mkdir()  # an experiment of the user's
    config = load_config([Path("eres2net"), Path("hardware/gpu_11g")])
    assert config.model.name == "eres2net"
    assert config == load_config(
        [ROOT / "conf/eres2net.yaml", ROOT / "conf/hardware/gpu_11g.yaml"]
    )
    (tmp_path / "campplus").write_text(TINY)
    assert load_config([Path("campplus")]).model.args["embed_dim"] == 64
    for name, meant in (("eres2nt", "eres2net"), ("gpu_11", "hardware/gpu_11g")):
        with refuses(name, f"{meant}?", error=FileNotFoundError):
            load_config([Path(name)])


def test_layers_merge_deeply_and_empty_ones_change_nothing(load):
    config = load(
        TINY + "training: {lr: 0.1, margin: {final: 0.2, end_epoch: 3}}",
        "augment: {speeds: [1.0]}",  # a list is replaced
        "",
        "training: {margin: {final: 0.5}}\nmodel: {args: {growth_rate: 16}}",
    )
    assert (config.training.lr, config.augment.speeds) == (0.1, (1.0,))
    assert (config.training.margin.final, config.training.margin.end_epoch) == (
        0.5,
        3.0,
    )
    assert (config.model.args["embed_dim"], config.model.args["growth_rate"]) == (
        64,
        16,
    )


def test_another_name_replaces_the_arguments(load):
    config = load(TINY, "model: {name: eres2net, args: {embed_dim: 96}}")
    assert config.model.args["embed_dim"] == 96
    assert config.model.args["blocks"] == [3, 4, 6, 3]  # its own default
    same = load(TINY, "model: {name: campplus, args: {growth_rate: 16}}")
    assert (same.model.args["embed_dim"], same.model.args["growth_rate"]) == (64, 16)


def test_arguments_get_the_defaults_of_their_constructor(load):
    config = load(TINY, "head: {args: {scale: 20}}")
    args = config.model.args
    assert (args["init_channels"], args["blocks"]) == (
        128,
        [1, 1, 1],
    )
    assert "feat_dim" not in args
    assert config.head.name == "aam_softmax"
    assert config.head.args == {"scale": 20.0, "easy_margin": False}
    assert config.frontend["sample_rate"] == 16000
    assert config.augment.spec["max_time_width"] == 20
    assert config.optimizer.args == {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
    }


def test_overrides_come_last_and_are_yaml(load):
    config = load(
        TINY + "training: {lr: 0.1}",
        set=(
            "training.lr=1e-2",
            "augment.speeds=[1.0, 0.9]",
            "augment.speed_classes=off",
            "data.noise=null",
            "data.dir=/a=b/c d",
            "runtime.micro_batch.campplus=32",
            "training.lr=2e-2",
        ),
    )
    assert (config.training.lr, config.augment.speeds) == (0.02, (1.0, 0.9))
    assert config.augment.speed_classes == "off"
    assert (config.data.noise, config.data.dir) == (None, "/a=b/c d")
    assert config.runtime.micro_batch == {"campplus": 32}


@pytest.mark.parametrize("text", ["training.lr", "=3", "model..args=1"])
def test_override_without_key_or_value(load, text):
    with pytest.raises(ValueError, match=f"--set: '{text}' is not key.path=value"):
        load(TINY, set=(text,))


def test_a_model_whose_micro_batch_was_probed_still_loads(load):
    assert load(TINY, "runtime: {micro_batch: probe}").runtime.micro_batch == "auto"


@pytest.mark.parametrize(
    ("former", "mode"), [("off", False), ("auto", False), ("on", "reduce-overhead")]
)
def test_a_model_of_a_version_with_cuda_graphs_still_loads(load, former, mode):
    config = load(TINY, f"runtime: {{cuda_graph: {former}}}")
    assert config.runtime.compile == mode
    assert "cuda_graph" not in config.to_dict()["runtime"]


def test_an_old_setting_is_warned_of_but_not_one_that_a_model_has_recorded(
    tmp_path, caplog
):
    for name, num_warnings in (("config.yaml", 0), ("mine.yaml", 1)):
        caplog.clear()
        path = tmp_path / name
        path.write_text("model: {name: campplus}\nruntime: {cuda_graph: 'on'}\n")
        for _ in range(2):  # as a command does
            assert load_config([path]).runtime.compile == "reduce-overhead"
        assert len(caplog.records) == num_warnings
    assert str(path) in caplog.text
    assert "runtime.compile=reduce-overhead" in caplog.text
    assert load_config([path], ["runtime.micro_batch=probe"])
    assert "--set runtime.micro_batch=probe" in caplog.text


def test_a_former_argument_may_be_false(load):
    former = "model: {args: {memory_efficient: %s}}"
    assert load(TINY, former % "false") == load(TINY)
    with pytest.raises(ValueError, match="memory_efficient"):
        load(TINY, former % "true")


def test_what_is_written_is_read_back_the_same(load, tmp_path: Path):
    config = load(
        TINY,
        set=(
            (
                'data={dir: "1e3", noise: "off", rirs: null, train: ["010", "null",'
                ' "2020-01-01"]}'
            ),
            "runtime.micro_batch={campplus: 8}",
            "training.final_lr=1e-12",
        ),
    )
    config.write(tmp_path / "config.yaml")
    again = load_config([tmp_path / "config.yaml"])
    assert again == config
    assert (again.data.dir, again.data.train) == ("1e3", ("010", "null", "2020-01-01"))
    assert differences(config, again) == []
    assert parse_config(config.to_dict()) == config


def test_differences_are_those_that_change_what_is_learned(load):
    old = load(TINY)
    free = ("runtime.num_workers=3", "data.dir=elsewhere")
    fixed = ("training.lr=0.3", "data.train=[a, b]", "model.args.embed_dim=32")
    new = load(TINY, set=free + fixed)
    assert differences(old, new) == [
        "data.train: ['train'] -> ['a', 'b']",
        "model.args.embed_dim: 64 -> 32",
        "training.lr: 0.1 -> 0.3",
    ]

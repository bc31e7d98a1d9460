"""What README.md and docs/ name exists: files, links, commands, options and keys."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_commands import RECIPE_OPTIONS, parser_of

from speakerlab.__main__ import COMMANDS
from speakerlab.config.schema import FIXED, NAMED, Config

ROOT = Path(__file__).parents[2]
README, GUIDES = ROOT / "README.md", sorted(ROOT.glob("docs/*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *GUIDES]
MIGRATING = ROOT / "docs/migrating.md"
# Options of the scripts of 3D-Speaker at 09e7806 that docs/migrating.md maps, and keys of its
# conf/*.yaml. Those of diarization and self-supervised training are not here.
THEIR_OPTIONS = """
stage stop_stage gpus data exp exp_name exp_dir exp_lm_dir config gpu noise reverb seed resume
data_dir seg_dur sample_rate min_spkdur random_seg nj use_gpu enrol_data test_data scores_dir trials
p_target c_miss c_fa predict ground_truth out_dir model_id wavs local_model_dir feat_out_dir
feat_out_format batch_size diable_progress_bar experiment_path target_onnx_file
"""
THEIR_KEYS = """
data noise reverb exp_dir num_epoch save_epoch_freq log_batch_freq wav_len sample_rate aug_prob
speed_pertub lm lr min_lr batch_size num_workers fbank_dim embedding_size m_channels channels
baseWidth scale expansion num_classes wav_reader label_encoder feature_extractor augmentations
preprocessor epoch_counter dataset dataloader embedding_model classifier optimizer checkpointer
mean_nor n_mels duration limit pin_memory drop_last input_size lin_neurons embed_dim feat_dim
input_dim out_neurons easy_margin margin momentum nesterov weight_decay max_lr warmup_epoch
fix_epoch step_epoch_size step_per_epoch initial_margin final_margin increase_start_epoch
"""


def code_of(text: str) -> Iterator[str]:
    """Yield code without comments: lines of blocks, and spans."""
    block = r"^```[^\n]*\n(.*?)^```|^((?:    \S[^\n]*\n)+)"
    for match in re.finditer(block, text, re.M | re.S):
        lines = (match[1] or match[2]).replace("\\\n", " ").splitlines()
        yield from (re.sub(r"(^|\s)#\s.*", "", line) for line in lines)
    yield from re.findall(r"`([^`]+)`", re.sub(block, "", text, flags=re.M | re.S))


def options_in(code: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", code)


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Return command -> its options; run.sh is one of the commands."""
    with pytest.MonkeyPatch.context() as patch:
        found = {name: set(parser_of(name, patch)._option_string_actions) for name in COMMANDS}
    return {**found, "run.sh": {*RECIPE_OPTIONS.split(), "--help"}}


def test_the_readme_is_short():
    assert len(README.read_text().split()) < 1000


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(path):
    text = path.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        if name.startswith("http"):
            continue
        other = path.parent / name if name else path
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", other.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(path, options):
    for code in code_of(path.read_text()):
        found = re.search(r"(?:speakerlab (?=[a-z])|(?=run\.sh ))([a-z.-]+)\s(.*)", code)
        if found and not found[2].startswith("="):  # not `speakerlab = ...`
            assert found[1] in options, code
            assert set(options_in(found[2])) <= options[found[1]], code


def is_key(name: str) -> bool:
    """Return whether a configuration can have this key."""
    section, *rest = name.split(".")
    if (section,) in FIXED:
        return rest[0] in inspect.signature(FIXED[(section,)][0]).parameters
    if rest[:1] == ["args"] and len(rest) > 1:
        makers = NAMED[section][0].values()
        return any(rest[1] in inspect.signature(make).parameters for make in makers)
    place: Any = Config
    for part in (section, *rest):
        field = getattr(place, "model_fields", {}).get(part)
        if field is None:
            return False
        place = field.annotation
    return True


def test_migrating_names_our_options_and_keys(options):
    """The last column of its tables is about this repository."""
    known = set().union(*options.values())
    rows = [line for line in MIGRATING.read_text().splitlines() if line.startswith("|")]
    keys: list[str] = []
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row.split("|")[-2]):
            assert set(options_in(code)) <= known, code
            keys += re.findall(rf"(?<![\w/.])(?:{'|'.join(Config.model_fields)})\.[a-z_.]+", code)
    assert len(keys) > 40
    assert [key for key in keys if not is_key(key)] == []


def test_migrating_names_every_option_and_key_of_3dspeaker():
    code = [row.split("|")[1] for row in MIGRATING.read_text().splitlines() if row[:1] == "|"]
    words = set(re.findall(r"[\w-]+", " ".join([*code, MIGRATING.read_text().split("| key")[0]])))
    assert [name for name in THEIR_KEYS.split() if name not in words] == []
    assert [name for name in THEIR_OPTIONS.split() if f"--{name}" not in words] == []


def test_files_of_the_architecture_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    tree = next(block for block in blocks if "\nspeakerlab/" in block)
    names = re.findall(r"(?<!\S)(?:[\w.-]+/)+(?!\S)|[\w-]+\.(?:py|sh|md|yaml|cff)\b", tree)
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(names) > 30 and len(files) > 30
    places = ("", "*/", "*/*/")
    assert [n for n in names + files if not any(any(ROOT.glob(p + n)) for p in places)] == []

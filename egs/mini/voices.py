"""Voices and sentences of the mini corpus, drawn from a seed and a name.

A voice is an accent and a variant file of espeak-ng; a sentence takes three to five seconds.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

ACCENTS = (
    "en",  # British; espeak-ng 1.52 has no voice named en-gb
    "en-us",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
)

WORDS = {
    "who": (
        "the teacher|my brother|a farmer|the driver|our neighbour|the old captain|a"
        " young doctor|the painter|her uncle|the baker|a quiet student|the tall"
        " singer|their cousin|the new manager|a busy lawyer|the gardener|my"
        " grandmother|the postman|a little girl|the engineer|his friend|the cook|a"
        " stranger|the librarian"
    ),
    "did": (
        "found|carried|bought|painted|remembered|washed|borrowed|opened|forgot|moved|counted|"
        "described|followed|repaired|noticed|offered|photographed|pushed|returned|sold|finished|"
        "chose|watched|measured|explained|stole|cleaned|drew"
    ),
    "how": (
        "quickly|slowly|carefully|happily|often|quietly|suddenly|never|always|nearly|gladly|"
        "usually"
    ),
    "what": (
        "basket|letter|bicycle|window|blanket|machine|picture|garden|ladder|kettle|jacket|"
        "chicken|bridge|hammer|orange|mirror|village|engine|pocket|candle|violin|sandwich|"
        "umbrella|newspaper|chair|stone|clock|boat|fence|lamp|carpet|trumpet|bottle|parcel|curtain|saddle"
    ),
    "kind": (
        "red|heavy|broken|wooden|yellow|narrow|expensive|round|ancient|empty|bright|dusty|"
        "small|beautiful|cheap|frozen|green|shiny|strange|useful"
    ),
    "where": (
        "near the river|behind the school|under the table|across the street|beside the"
        " church|at the station|in the kitchen|on the roof|above the harbour|through"
        " the forest|along the beach|inside the museum|outside the office|over the"
        " hill|between two houses|by the fire"
    ),
    "when": (
        "yesterday morning|before lunch|after the storm|last winter|at five o'clock|"
        "every Sunday|in the evening|during the holidays|three days ago|this afternoon|"
        "at midnight|since April"
    ),
    "and": (
        "because it was raining|while the others slept|but nobody asked why|so they"
        " went home|and everyone laughed|although it was late|until the music"
        " stopped|and thanked us for it|but left the key behind|when the phone rang"
    ),
}
LISTS = {kind: tuple(text.split("|")) for kind, text in WORDS.items()}
TEMPLATES = (
    "{when} {who} {did} the {kind} {kind} {what} {where}.",
    "{who} {how} {did} a {kind} {what} {where} {when}.",
    "{who} and {who} {did} the {what} {where}, {and}.",
    "{where}, {who} {how} {did} a {what} and the {kind} {what}.",
    "I think {who} {did} this {kind} {what} {when}, {and}.",
    "did you hear that {who} {how} {did} the {kind} {what} {when}?",
    "{who} {how} {did} {kind} things {where}, {and}.",
    "there is a {kind} {what} {where}, and {who} {did} it {when}.",
)


@dataclass(frozen=True)
class Voice:
    """One synthetic speaker."""

    sex: str  # "male" or "female"
    language: str  # an accent of espeak-ng
    variant: str  # the text of an espeak-ng voice variant file


def draw_voice(name: str, *, seed: int, sex: str) -> Voice:
    """Draw a speaker: vocal tract, pitch, breath and accent."""
    rng = np.random.default_rng([seed, crc32(name.encode())])
    female = sex == "female"
    low = rng.uniform(155, 215) if female else rng.uniform(72, 125)
    high = low * rng.uniform(1.25, 1.75)
    # A longer vocal tract has lower formants.
    formant_scale = rng.uniform(1.04, 1.2) if female else rng.uniform(0.9, 1.05)
    lines = [
        "language variant",
        f"name {name}",
        f"gender {sex}",
        f"pitch {low:.0f} {high:.0f}",
        f"roughness {rng.integers(0, 5)}",
        f"voicing {rng.integers(75, 116)}",
        f"flutter {rng.integers(0, 7)}",
        f"consonants {rng.integers(75, 126)} {rng.integers(75, 126)}",
        f"speed {rng.integers(94, 112)}",
        f"stressAdd {' '.join(str(n) for n in rng.integers(-20, 21, size=8))}",
        (
            f"tone 600 {rng.integers(140, 190)} 1200 {rng.integers(95, 150)} "
            f"2000 {rng.integers(70, 125)} 3000 {rng.integers(50, 120)}"
        ),
        f"breath {' '.join(str(n) for n in rng.integers(0, 9, size=8))}",
    ]
    for formant in range(9):
        frequency = 100 * formant_scale * rng.uniform(0.95, 1.05)
        height = rng.integers(75, 126)
        width = rng.integers(80, 121)
        lines.append(f"formant {formant} {frequency:.0f} {height} {width}")
    return Voice(sex, str(rng.choice(ACCENTS)), "\n".join(lines) + "\n")


def draw_sentence(utterance: str, *, seed: int) -> str:
    """Draw a sentence of about a dozen words."""
    rng = np.random.default_rng([seed, crc32(utterance.encode()), 1])
    template = TEMPLATES[rng.integers(len(TEMPLATES))]
    # "{who} {did} it." -> "", "who} ", "did} it."
    beginning, *parts = template.split("{")
    text = beginning
    for part in parts:
        kind, _, rest = part.partition("}")
        phrase = rng.choice(LISTS[kind])
        text += f"{phrase}{rest}"
    return text[0].upper() + text[1:]

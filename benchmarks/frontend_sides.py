"""What both ends of frontend.py know: the peers, and our settings that compute what each does."""

from typing import Any

RATE = 16000
MARKS = {  # peer -> what only its checkout has
    "3dspeaker": "speakerlab/process/processor.py",
    "wespeaker": "wespeaker/dataset/processor.py",
    "speechbrain": "speechbrain/lobes/features.py",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "3dspeaker": {},
    "wespeaker": {"window": "hamming", "scale": 32768.0},
    "speechbrain": {},
}
# Largest difference of mean-normalised log mel features: the peers compute in fp32. SpeechBrain's
# features are others: the rows beside it compare the time of the same step, not the same numbers.
ALLOWED = {"3dspeaker": 1e-2, "wespeaker": 1e-2}

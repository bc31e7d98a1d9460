"""pyannote.metrics on the pairs of md_eval.json, written to pyannote_metrics.json.

    python tests/diarization/pyannote_metrics.py

needs `pip install pyannote.metrics` (stored with 4.2.0). For each pair: scored, missed, false alarm
and confusion in seconds under each of PROTOCOLS, then the JER.
"""

import json
from pathlib import Path

from md_eval import PROTOCOLS
from md_eval import STORED as PAIRS

from speakerlab.diarization.regions import Turn, merge_turns
from speakerlab.diarization.scoring import extent

STORED = Path(__file__).with_name("pyannote_metrics.json")
KINDS = ("total", "missed detection", "false alarm", "confusion")


def main() -> None:
    from pyannote.core import Annotation, Segment, Timeline  # pyright: ignore[reportMissingImports]
    from pyannote.metrics.diarization import (  # pyright: ignore[reportMissingImports]
        DiarizationErrorRate,
        JaccardErrorRate,
    )

    def annotate(turns: list[Turn]) -> Annotation:
        found = Annotation()
        for number, (start, end, speaker) in enumerate(merge_turns(turns)[0]):
            found[Segment(start, end), number] = speaker
        return found

    rows = []
    for *both, regions, _ in json.loads(PAIRS.read_text()):
        reference, hypothesis = ([Turn(*turn) for turn in turns] for turns in both)
        pair = annotate(reference), annotate(hypothesis)
        uem = Timeline([Segment(*region) for region in regions or extent(reference)])
        figures = []
        for collar, skip_overlap in PROTOCOLS:
            metric = DiarizationErrorRate(collar=2 * collar, skip_overlap=skip_overlap)
            found = metric(*pair, uem=uem, detailed=True)
            figures.append([found[kind] for kind in KINDS])
        rows.append([figures, JaccardErrorRate()(*pair, uem=uem)])
    STORED.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()

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
    from pyannote.core import (
        Annotation,
        Segment,
        Timeline,
    )  # pyright: ignore[reportMissingImports]
    from pyannote.metrics.diarization import (  # pyright: ignore[reportMissingImports]
        DiarizationErrorRate,
        JaccardErrorRate,
    )

    def annotate(turns: list[Turn]) -> Annotation:
        annotation = Annotation()
        merged, _ = merge_turns(turns)
        for number, (start, end, speaker) in enumerate(merged):
            annotation[Segment(start, end), number] = speaker
        return annotation

    rows = []
    for reference, hypothesis, regions, _ in json.loads(PAIRS.read_text()):
        reference_turns = [Turn(*turn) for turn in reference]
        hypothesis_turns = [Turn(*turn) for turn in hypothesis]
        pair = annotate(reference_turns), annotate(hypothesis_turns)
        regions = regions or extent(reference_turns)
        uem = Timeline([Segment(*region) for region in regions])
        figures = []
        for collar, skip_overlap in PROTOCOLS:
            # pyannote's collar is the whole width around a bound
            metric = DiarizationErrorRate(
                collar=2 * collar,
                skip_overlap=skip_overlap,
            )
            errors = metric(*pair, uem=uem, detailed=True)
            figures.append([errors[kind] for kind in KINDS])
        jer = JaccardErrorRate()(*pair, uem=uem)
        rows.append(json.dumps([figures, jer]))
    STORED.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()

"""Rows of results with distinct numbers."""

import numpy as np

from speakerlab.bin.classify import result_row
from speakerlab.scoring.identification import confusion


def row(**changes):
    """One of cosine scores on a list `mini`, but for the changes."""
    return {
        "trials": "mini",
        "system": "campplus_tiny",
        "eer": 0.0567,
        "eer_untrained": 0.3785,
        "eer_ci95": [0.0465, 0.0685],
        "min_dcf": {"0.01": 0.5, "0.05": 0.392},
        "cllr": None,
        "act_dcf": None,
        "num_target": 600,
        "num_nontarget": 5400,
        "num_speakers": 20,
        "backend": "cosine",
        "protocol": "all pairs of 20 unseen voices",
        "model_sha256": "ab" * 32,
        "commit": "1234567",
        **changes,
    }


def identified(true_N, found_N, classes, **changes):
    """One of an identification."""
    count_CC = confusion(np.array(true_N), np.array(found_N), len(classes))
    row = {"data": "test", "system": "exp", "accuracy_ci95": [0.25, 0.875]}
    row |= {"protocol": "by hand", "model_sha256": "0" * 64, "commit": None}
    return result_row(count_CC, classes, **{**row, **changes})

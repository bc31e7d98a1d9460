"""Training heads, which need labels, and self-supervised objectives, which need none.

The contract of a head, checked by a test over this registry (`head.py` has the shared parts):

- `Head(*, embed_dim, num_classes, ...)`, and `forward(emb_BD, label_B, margin)` -> mean loss and
  logits_BC, fp32. The logits carry no margin; the largest is the predicted class.
- It owns `weight_CD`. A parameter with axes has the classes on the first, so that rows can follow
  speakers by name; one without axes belongs to all classes.
- `takes_margin` is true if it uses a margin other than 0.

`sharded.py` splits the rows of the softmax heads over ranks; besides the loss it returns, instead
of the logits, the input of `count_correct`.

Objectives: embeddings of several views of each utterance -> loss. `Objective(*, embed_dim, shards,
...)`; the base class in `objective.py` is the interface.
"""

from collections.abc import Mapping

from speakerlab.core.registry import Registry
from speakerlab.losses.head import Head
from speakerlab.losses.objective import Objective

# The modules are imported when a name is first looked up, not here.
HEADS: Mapping[str, type[Head]] = Registry(
    __name__,
    {
        "softmax": "head:Softmax",
        "am_softmax": "margin:AMSoftmax",
        "aam_softmax": "margin:AAMSoftmax",
        "aam_softmax_subcenter_topk": "subcenter:SubcenterTopkAAMSoftmax",
        "sphereface2": "sphereface2:SphereFace2",
        "circle": "circle:CircleLoss",
    },
)
OBJECTIVES: Mapping[str, type[Objective]] = Registry(
    __name__,
    {
        "dino": "dino:DINO",
        "sdpn": "sdpn:SDPN",
        "simclr": "objective:SimCLR",
    },
)

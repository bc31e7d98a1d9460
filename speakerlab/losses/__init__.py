"""Heads: emb_BD and label_B -> loss and logits_BC, each owning the class weights.

The contract of a head, kept by a test over this registry (`head.py` has what is the same in all):

- `Head(*, embed_dim, num_classes, ...)`, and `forward(emb_BD, label_B, margin)` -> mean loss and
  logits_BC, fp32; the logits carry no margin, and their largest is the class it decides for.
- It owns `weight_CD`. A parameter that has axes has the classes on the first, so that rows can
  follow speakers by name; one without axes belongs to all classes.
- `takes_margin` says whether a margin other than 0 means something to it.

`sharded.py` splits the rows of some of them over ranks; what it gives beside the loss is not the
logits but what `count_correct` counts.
"""

from speakerlab.losses.circle import CircleLoss
from speakerlab.losses.head import Head
from speakerlab.losses.margin import AAMSoftmax, AMSoftmax
from speakerlab.losses.softmax import Softmax
from speakerlab.losses.sphereface2 import SphereFace2
from speakerlab.losses.subcenter import SubcenterTopkAAMSoftmax

HEADS: dict[str, type[Head]] = {
    "softmax": Softmax,
    "am_softmax": AMSoftmax,
    "aam_softmax": AAMSoftmax,
    "aam_softmax_subcenter_topk": SubcenterTopkAAMSoftmax,
    "sphereface2": SphereFace2,
    "circle": CircleLoss,
}

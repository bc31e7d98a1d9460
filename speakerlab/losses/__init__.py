"""Heads: emb_BD and label_B -> loss and logits_BC, each owning the class weights."""

from torch import nn

from speakerlab.losses.margin import AAMSoftmax

HEADS: dict[str, type[nn.Module]] = {
    "aam_softmax": AAMSoftmax,
}

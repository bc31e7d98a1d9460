"""Models of other toolkits. In: their checkpoints, or published names. Out: models of ours.

`files` and `archives` find the tensors, `recognise` tells by `architectures` and `names` what they
are, `toolkit_config` reads what else is known, `checkpoints` converts both ways, `hub` downloads.
"""

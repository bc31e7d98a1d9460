# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# 3dspeaker: the 3D-Speaker corpus with its three official trial lists.
model=campplus
trials=(test/trials_cross_device test/trials_cross_distance test/trials_cross_dialect)
untrained=false  # the network before training is not extracted
development=true # embeddings of training speakers, for the back ends that learn from them
backends=(cosine mean+cosine mean+cosine+asnorm)

# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# 3D-Speaker with its three official trial lists.
model=campplus
trials=(test/trials_cross_device test/trials_cross_distance test/trials_cross_dialect)
untrained=false  # do not extract with the initial weights
development=true # embeddings of training speakers, for back ends that learn
backends=(cosine mean+cosine mean+cosine+asnorm)

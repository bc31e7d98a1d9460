# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# Trained on VoxCeleb2, tested on the cleaned lists O, E and H of VoxCeleb1.
model=campplus
trials=(test/trials_O test/trials_E test/trials_H)
stage0_always=true  # download lists and unpack archives also with --corpus
allow_missing=0.001 # share of m4a files that cannot be decoded, listed in rejected.tsv
untrained=false     # do not extract with the initial weights
development=true    # embeddings of training speakers, for back ends that learn
backends=(cosine mean+cosine mean+cosine+asnorm)

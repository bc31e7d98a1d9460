# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# voxceleb: trained on VoxCeleb2, tested on the cleaned lists O, E and H of VoxCeleb1.
model=campplus
trials=(test/trials_O test/trials_E test/trials_H)
stage0_always=true  # the lists are downloaded, and archives unpacked, also where --corpus is given
allow_missing=0.001 # m4a files that cannot be decoded are listed in rejected.tsv
untrained=false     # the network before training is not extracted
development=true    # embeddings of training speakers, for the back ends that learn from them
backends=(cosine mean+cosine mean+cosine+asnorm)

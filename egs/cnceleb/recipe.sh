# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# cnceleb: CN-Celeb 1 and 2, tested with both ways of enrolling a speaker.
model=campplus
trials=(test/trials_concat test/trials_average)
prepare_args=(--join-seconds 5) # shorter utterances are joined by speaker and genre, 0: none
untrained=false                 # the network before training is not extracted
development=true                # embeddings of training speakers, for the back ends that learn from them
backends=(cosine mean+cosine mean+cosine+asnorm)

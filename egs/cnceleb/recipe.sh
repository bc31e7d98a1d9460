# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# CN-Celeb 1 and 2, tested with both ways of enrolling a speaker.
model=campplus
trials=(test/trials_concat test/trials_average)
prepare_args=(--join-seconds 5) # join shorter utterances of a speaker and genre, 0: do not join
untrained=false                 # do not extract with the initial weights
development=true                # embeddings of training speakers, for back ends that learn
backends=(cosine mean+cosine mean+cosine+asnorm)

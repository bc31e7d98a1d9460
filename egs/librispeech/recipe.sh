# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# Any corpus in the LibriSpeech layout; test subsets become trial lists.
model=campplus
trials=('test/trials*') # one list per test subset
development=true        # embeddings of training speakers, for the mean and the cohort
backends=(cosine mean+cosine mean+cosine+asnorm mean+cosine+asnorm+qmf)
default_noise=none # augmentation only with --noise DIR and --rirs DIR
durations=(2 3 full)

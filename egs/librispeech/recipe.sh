# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# librispeech: any corpus in the LibriSpeech layout; subsets named as test become trials.
model=campplus
trials=('test/trials*') # one list per test subset
development=true        # stage 5 embeds training speakers too: a mean and a cohort
backends=(cosine mean+cosine mean+cosine+asnorm mean+cosine+asnorm+qmf)

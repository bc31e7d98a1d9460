# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# librispeech: any corpus in the LibriSpeech layout; subsets named as test become trials.
model=campplus
trials=('test/trials*') # one list per test subset

# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# A synthetic corpus, to try everything within minutes.
model=campplus_tiny
stage0_always=true   # stage 0 installs the synthesizer
method=simclr        # of --task ssl, because dino learns too slowly here
default_noise=corpus # noise and rooms are synthesized with the corpus
durations=(1 2 full)
codecs=(none mp3:16k opus:8k gsm)

# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# mini: a corpus spoken by a synthesiser, for trying everything out within minutes.
model=campplus_tiny
stage0_always=true # stage 0 installs the synthesiser

# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# Diarization of AMI: meetings of four, in English.
task=diar
init=hub:voxceleb_resnet34_LM # --init MODEL: another model
default_noise=none

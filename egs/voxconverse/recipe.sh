# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# Diarization of VoxConverse: YouTube videos of debates and news.
task=diar
init=hub:voxceleb_resnet34_LM # --init MODEL: another model
default_noise=none

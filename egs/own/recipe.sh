# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# Your recordings, one folder per speaker, to fine-tune a trained model (--init).
model=campplus_tiny    # without --init
method=simclr          # of --task ssl, because dino needs more steps
init_overlay=own_data  # with --init: overlay on the configuration of that model
allow_missing=0.05     # share of unusable files, listed in rejected.tsv
allow_undecodable=0.05 # share of files that cannot be decoded
default_noise=none     # augmentation only with --noise DIR and --rirs DIR

# shellcheck shell=bash disable=SC2034 # read by egs/common/stages.sh
# own: your recordings, a folder a speaker, to fine-tune a trained model to (--init).
model=campplus
init_overlay=own_data  # with --init: that model's configuration, then conf/finetune/own_data.yaml
allow_missing=0.05     # files that cannot be used are listed in rejected.tsv ...
allow_undecodable=0.05 # ... those that only show it when they are decoded, too

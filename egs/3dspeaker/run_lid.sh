#!/usr/bin/env bash
# Language identification on 3D-Speaker: the classes are the dialects, as in the published recipe.
#   bash egs/3dspeaker/run_lid.sh                   # the same: bash egs/3dspeaker/run.sh --task lid
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
# shellcheck disable=SC2034 # run.sh hands --task over
task=lid              # lid: language identification
model=campplus        # NAME: conf/NAME.yaml, or one of its variants
seed=0                # 0-4294967295: random seed of weights, data order and augmentation
set=()                # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=                 # MODEL: start from this model
corpus=               # DIR: the corpus, if it is on disk; otherwise stage 0 downloads it
noise=auto            # DIR|none|auto: noise for augmentation; auto: musan, in or beside the corpus
rirs=auto             # DIR|none|auto: rooms; auto: RIRS_NOISES, in or beside the corpus
data=$recipe/data_lid # DIR: the data directories
exp=                  # DIR: the experiment (default: exp/MODEL_lid_sSEED)
features=wave         # wave|fbank: what stage 2 packs; fbank trains faster, without audio augmentation
codec=pcm             # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto         # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("$model" "$recipe/lid/conf.yaml")
machine=()
name=${model}_lid
if [[ $features == fbank ]]; then
  machine+=(features/fbank)
  name+=_fbank
fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}

settings=("data.dir=$data" "seed=$seed")
if [[ $noise == none ]]; then settings+=(augment.noise_prob=0); fi
if [[ $rirs == none ]]; then settings+=(augment.room_prob=0); fi
settings+=("${set[@]}")
stored=(--codec "$codec") # how stage 2 packs
if [[ $features == fbank ]]; then
  stored=(--features fbank --config "${config[@]}" "${machine[@]}" --set "${settings[@]}")
fi
check_training "${config[@]}" "${machine[@]}"
sources=(${corpus:+--corpus "$corpus"} --noise "$noise" --rirs "$rirs") # options of prepare.py

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then # with --corpus, only noise and rooms that are missing
  run python "$recipe/lid/prepare.py" "--download${corpus:+-noise}" "${sources[@]}" --data "$data"
fi

if stage 1 'data directories'; then
  run python "$recipe/lid/prepare.py" "${sources[@]}" --data "$data"
  run speakerlab check "$data/train" "$data/test" "${banks[@]}" --sample-rate "$rate"
fi

if stage 2 'decode and pack audio'; then
  run speakerlab pack "$data/train" "${stored[@]}" --sample-rate "$rate" ${job:+--job "$job"}
  run speakerlab check "$data/test" "${banks[@]}" --sample-rate "$rate" --decode
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if stage 5 embeddings; then
  run speakerlab extract --exp "$exp" --data "$data/test" "${processes[@]}"
fi

if stage 6 'scores and report'; then
  run speakerlab classify --exp "$exp" --data "$data/test" "${devices[@]}"
fi

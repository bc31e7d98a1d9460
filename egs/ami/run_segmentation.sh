#!/usr/bin/env bash
# A segmentation network for AMI, trained on its training meetings, and diarization with it.
#   bash egs/ami/run_segmentation.sh                # the same: bash egs/ami/run.sh --task segmentation
#   bash egs/ami/run_segmentation.sh --init MODEL   # fine-tune a published network
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
# shellcheck disable=SC2034 # run.sh hands --task over
task=segmentation                 # segmentation: a network that finds who speaks when in 10 s
seed=0                            # 0-4294967295: random seed of weights, data order and augmentation
set=()                            # KEY=VALUE: settings that override all files, such as training.lr=1e-4
init=                             # MODEL: fine-tune this network, an experiment or model folder (default: train from random weights)
embedder=hub:voxceleb_resnet34_LM # MODEL: the model whose embeddings diarize
corpus=                           # DIR: AMI, if it is on disk; otherwise stage 0 downloads it
microphone=Mix-Headset            # Mix-Headset|Array1-01: the sum of the headsets, or the first of the table array
data=$recipe/data_segmentation    # DIR: the data directories
exp=                              # DIR: the experiment (default: exp/segmentation_sSEED, with --init exp/segmentation_finetune_sSEED)
hardware=auto                     # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ -n $job || $nnodes -gt 1 ]]; then
  die '--job, --nnodes: not with --task segmentation, which one host runs'
fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=(segmentation/pyannet)
machine=()
name=segmentation
if [[ -n $init ]]; then
  config=(segmentation/pyannet_finetune)
  name=segmentation_finetune
fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}

# The recordings have rooms and noise of their own.
# shellcheck disable=SC2034 # check_training reads them
noise='' rirs=''
settings=("data.dir=$data" "data.train=[train]" "seed=$seed")
settings+=(augment.room_prob=0 augment.noise_prob=0 "${set[@]}")
check_training "${config[@]}" "${machine[@]}"
networks=("$exp") # that are compared, and with no network
if [[ -n $init ]]; then networks+=("$init"); fi

if stage 0 corpus; then
  if [[ -z $corpus ]]; then
    run python "$recipe/diar/prepare.py" --download --train --data "$data" --microphone "$microphone"
  fi
fi

if stage 1 'data directories'; then
  run python "$recipe/diar/prepare.py" --train ${corpus:+--corpus "$corpus"} --data "$data" --microphone "$microphone"
  run speakerlab check "$data/train" "$data/dev" "$data/test" --sample-rate "$rate"
fi

if stage 2 'decode all audio'; then
  run speakerlab check "$data/train" "$data/dev" "$data/test" --sample-rate "$rate" --decode
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if stage 5 diarization; then # speech found by energy; then speech and second speakers by each network
  for part in dev test; do
    files=(RECORDINGS)
    if [[ -f $data/$part/wav.scp ]]; then
      mapfile -t files < <(cut -d ' ' -f 2- "$data/$part/wav.scp")
    fi
    run speakerlab diarize "${files[@]}" --model "$embedder" --vad energy \
      --out "$exp/diarization/$part/energy" "${devices[@]}"
    for network in "${networks[@]}"; do
      folder=trained
      if [[ $network == "$init" ]]; then folder=initial; fi
      run speakerlab diarize "${files[@]}" --model "$embedder" --segmentation "$network" \
        --out "$exp/diarization/$part/$folder" "${devices[@]}"
    done
  done
fi

if stage 6 'scores and report'; then
  for part in dev test; do
    regions=()
    if [[ -f $data/$part/ref.uem ]]; then regions=(--uem "$data/$part/ref.uem"); fi
    for system in energy trained ${init:+initial}; do
      say "$part, $system"
      run speakerlab der "$data/$part/ref.rttm" "$exp/diarization/$part/$system" "${regions[@]}" \
        --json "$exp/diarization/${part}_$system.json" --report "$exp/diarization/${part}_$system.html" \
        --data "$data/$part"
    done
  done
fi

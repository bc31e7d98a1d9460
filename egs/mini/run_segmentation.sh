#!/usr/bin/env bash
# A segmentation network for synthetic conversations, trained on simulated ones, and diarization with it.
#   bash egs/mini/run_segmentation.sh                # the same: bash egs/mini/run.sh --task segmentation
#   bash egs/mini/run_segmentation.sh --init MODEL   # fine-tune a published network
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
# shellcheck disable=SC2034 # run.sh hands --task over
task=segmentation   # segmentation: a network that finds who speaks when in 10 s
model=campplus_tiny # NAME: conf/NAME.yaml of the embeddings that diarize
seed=0              # 0-4294967295: random seed of both trainings
set=()              # KEY=VALUE: settings of the segmentation network, such as training.lr=1e-4
init=               # MODEL: fine-tune this network, an experiment or model folder (default: train from random weights)
embedder=           # MODEL: whose embeddings diarize (default: exp/MODEL_sSEED, which stage 3 trains if it is missing)
corpus=             # DIR: where the recordings of single speakers are made (default: corpus)
noise=corpus        # DIR|none|corpus: noise for augmentation; corpus: synthesized with it
rirs=corpus         # DIR|none|corpus: room impulse responses; corpus: synthesized with it
data=$recipe/data   # DIR: the data directories of single speakers, to train on; conversations to test on: DIR_diar
exp=                # DIR: the experiment (default: exp/segmentation_sSEED, with --init exp/segmentation_finetune_sSEED)
hardware=auto       # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ -n $job || $nnodes -gt 1 ]]; then
  die '--job, --nnodes: not with --task segmentation, which one host runs'
fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=(segmentation/pyannet "$recipe/diar/segmentation.yaml")
machine=()
name=segmentation
if [[ -n $init ]]; then config[0]=segmentation/pyannet_finetune name=segmentation_finetune; fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}
trained=$recipe/exp/${model}_s$seed
embedder=${embedder:-$trained}
conversations=${data}_diar

settings=("data.dir=$data" "seed=$seed")
if [[ $noise == none ]]; then settings+=(augment.noise_prob=0); fi
if [[ $rirs == none ]]; then settings+=(augment.room_prob=0); fi
settings+=("${set[@]}")
check_training "${config[@]}" "${machine[@]}"
sources=(${corpus:+--corpus "$corpus"}) # options of prepare.py
if [[ $noise != corpus ]]; then sources+=(--noise "$noise"); fi
if [[ $rirs != corpus ]]; then sources+=(--rirs "$rirs"); fi
folders=("$data/train" "$conversations/dev" "$conversations/test" "${banks[@]}")
networks=("$exp") # that are compared, and with no network
if [[ -n $init ]]; then networks+=("$init"); fi

if stage 0 corpus; then
  run python "$recipe/prepare.py" --download "${sources[@]}" --data "$data" # installs the synthesizer
fi

if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data"
  run python "$recipe/diar/prepare.py" --data "$conversations"
  run speakerlab check "${folders[@]}" --sample-rate "$rate"
fi

if stage 2 'decode all audio'; then
  run speakerlab check "${folders[@]}" --sample-rate "$rate" --decode
fi

if stage 3 training; then # of the embeddings by the recipe of verification, if they are missing
  if [[ $embedder == "$trained" && ! -e $trained/model ]]; then
    run bash "$recipe/run.sh" --stop-stage 3 --data "$data" --exp "$trained" --model "$model" --seed "$seed" \
      "${sources[@]}" --hardware "${hardware#hardware/}" "${ranks[@]}"
  fi
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if stage 5 diarization; then # speech found by energy; then speech and second speakers by each network
  for part in dev test; do
    files=(RECORDINGS)
    if [[ -f $conversations/$part/wav.scp ]]; then
      mapfile -t files < <(cut -d ' ' -f 2- "$conversations/$part/wav.scp")
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
    for system in energy trained ${init:+initial}; do
      say "$part, $system"
      run speakerlab der "$conversations/$part/ref.rttm" "$exp/diarization/$part/$system" \
        --json "$exp/diarization/${part}_$system.json" --report "$exp/diarization/${part}_$system.html" \
        --data "$conversations/$part"
    done
  done
fi

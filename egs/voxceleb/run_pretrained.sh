#!/usr/bin/env bash
# VoxCeleb over a pretrained speech model, in up to three trainings: the network over its layers with
# adapters, all weights, and all weights with a large margin.
#   bash egs/voxceleb/run_pretrained.sh --corpus DIR --gpus "0 1 2 3" --pretrained DIR
# The same on the data of another recipe, such as cnceleb, 3dspeaker or own, after its stages 0 to 2:
#   bash egs/voxceleb/run_pretrained.sh --stage 3 --data egs/cnceleb/data --exp EXP --pretrained DIR
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
model=w2vbert2_mfa # w2vbert2_mfa|wavlm_large_ecapa|wavlm_base_plus_mhfa|whisper_pmfa: conf/NAME.yaml
pretrained=        # MODEL: a folder of Hugging Face, or hf:owner/name (default: of conf/NAME.yaml)
seed=0             # 0-4294967295: random seed of weights, data order and augmentation
set=()             # KEY=VALUE: settings of all stages that override all files
init=              # MODEL: start from this experiment or model folder, over the same pretrained model
corpus=            # DIR: VoxCeleb1 and 2; stage 0 gets the lists and unpacks archives
noise=auto         # DIR|none|auto: noise for augmentation; auto: musan, in or beside the corpus
rirs=auto          # DIR|none|auto: room impulse responses; auto: RIRS_NOISES, in or beside the corpus
data=$recipe/data  # DIR: the data directories
exp=               # DIR: the experiment (default: exp/MODEL_sSEED); stage 4 writes DIR-joint and DIR-lm
codec=pcm          # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto      # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("$model")
machine=()
joint=''
tuning='' # of stage 4, as published for each model
if [[ $model == w2vbert2_mfa ]]; then
  joint=pretrained/joint
  tuning=pretrained/large_margin
fi
if [[ $model == wavlm_large_ecapa ]]; then
  joint=pretrained/joint_wavlm
  tuning=pretrained/large_margin_wavlm
fi
if [[ $model == whisper_pmfa ]]; then joint=pretrained/joint_whisper; fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${model}_s$seed}
systems=("$exp")
if [[ -n $joint ]]; then systems+=("$exp-joint"); fi
if [[ -n $tuning ]]; then systems+=("$exp-lm"); fi

settings=("data.dir=$data" "seed=$seed" ${pretrained:+"frontend.model=$pretrained"})
if [[ $noise == none ]]; then settings+=(augment.noise_prob=0); fi
if [[ $rirs == none ]]; then settings+=(augment.room_prob=0); fi
settings+=("${set[@]}")
check_training "${config[@]}" "${machine[@]}"
sources=(${corpus:+--corpus "$corpus"} --noise "$noise" --rirs "$rirs") # options of prepare.py

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then
  run python "$recipe/prepare.py" --download "${sources[@]}" --data "$data"
fi

if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data"
  run speakerlab check "$data/train" "$data/test" "${banks[@]}" --sample-rate "$rate" \
    --allow-rejected 0.001 # m4a files that cannot be decoded, listed in rejected.tsv
fi

if stage 2 'decode and pack audio'; then
  run speakerlab pack "$data/train" --codec "$codec" --sample-rate "$rate" ${job:+--job "$job"}
  run speakerlab check "$data/test" "${banks[@]}" --sample-rate "$rate" --decode
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if [[ -n $joint ]] && stage 4 'joint training, then with a large margin'; then
  run speakerlab train --exp "$exp-joint" --config "${config[@]}" "$joint" "${machine[@]}" \
    --init "$exp/model" "${ranks[@]}" --set "${settings[@]}"
  if [[ -n $tuning ]]; then
    run speakerlab train --exp "$exp-lm" --config "${config[@]}" "$tuning" "${machine[@]}" \
      --init "$exp-joint/model" "${ranks[@]}" --set "${settings[@]}"
  fi
fi

if stage 5 embeddings; then
  for system in "${systems[@]}"; do
    run speakerlab extract --exp "$system" --data "$data/test" "${processes[@]}"
    run speakerlab extract --exp "$system" --data "$data/train" --per-speaker 10 "${processes[@]}"
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    run speakerlab score --exp "$system" --trials "$data"/test/trials* \
      --backend cosine mean+cosine mean+cosine+asnorm --development "$data/train" "${devices[@]}"
  done
  say "to compare two recordings: speakerlab verify A.wav B.wav --model ${systems[-1]}"
fi

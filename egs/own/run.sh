#!/usr/bin/env bash
# Your recordings, one folder per speaker: fine-tunes a trained model (--init), or trains one.
#   bash egs/own/run.sh --corpus DIR --init MODEL
#   bash egs/own/run.sh --corpus DIR --init MODEL --folds 5               # 5 to 20 speakers
#   bash egs/own/run.sh --corpus DIR --stage 3 --stop-stage 3 --dry-run   # print the command
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
task=sv             # sv|ssl|distil: verification, self-supervised, or distillation from --teacher
model=              # NAME: conf/NAME.yaml, or one of its variants (default: campplus_tiny, or that of --init)
seed=0              # 0-4294967295: random seed of weights, data order and augmentation
set=()              # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=               # MODEL: fine-tune this model
folds=1             # 1-20: cross-validation over speakers in so many parts; see README.md
large_margin=       # true|false: also run stage 4 (default: false)
method=             # dino|sdpn|simclr: with --task ssl (default: simclr)
teacher=            # MODEL: with --task distil, the model to learn from; also an .onnx file
corpus=             # DIR: your recordings, DIR/SPEAKER/*.wav or other formats
noise=              # DIR|none|auto: noise for augmentation (default: none, or what stage 1 was given)
rirs=               # DIR|none|auto: room impulse responses (default: none, or what stage 1 was given)
data=$recipe/data   # DIR: the data directories
allow_rejected=0.05 # SHARE: share of the recordings of a set that may be broken, in stages 1 and 2
exp=                # DIR: the experiment (default: exp/MODEL_sSEED; with --init exp/NAME_own_data_sSEED); stage 4 writes DIR-lm
features=wave       # wave|fbank: what stage 2 packs; fbank trains faster, without audio augmentation
codec=pcm           # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto       # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if ((folds > 1)) && [[ -z $init || $task$large_margin$job$nnodes != sv ]]; then
  die '--folds: needs --init, and one host; not with --task ssl, --large-margin or --job'
fi
if [[ -n $init && -n $model && $task == sv ]]; then
  die "--model $model: --init has a model of its own; leave it out"
fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("${model:=campplus_tiny}" "$recipe/conf.yaml")
machine=()
name=$model
tuning=finetune/large_margin
if [[ -n $init && $task == sv ]]; then
  init=${init%/}
  name=${init%/model}
  if [[ $init == @(hub|hf):* ]]; then name=${name%%@*}; fi # without digest or revision
  if [[ $init == @(hub|hf):* && $dry_run == false ]]; then init=$(run speakerlab import "$init"); fi
  name=${name##*[/:]}_own_data
  config=("$init/config.yaml" "$recipe/conf.yaml" finetune/own_data) # first the model's own
fi
if [[ $task == ssl ]]; then
  config+=("ssl/${method:=simclr}")
  name+=_$method
fi
if [[ $task == distil ]]; then
  config+=(distil)
  name+=_distil
fi
# In cross-validation, all other speakers train.
if ((folds > 1)); then
  name=${name/%_own_data/_folds}
  set=(data.valid_speakers=0 "${set[@]}")
fi
if [[ $features == fbank ]]; then
  machine+=(features/fbank)
  name+=_fbank
fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}
systems=("$exp")
if [[ $large_margin == true || -e $exp-lm/model ]]; then systems+=("$exp-lm"); fi

if [[ -z $noise && ($stage -le 1 || ! -d $data/noise) ]]; then noise=none; fi
if [[ -z $rirs && ($stage -le 1 || ! -d $data/rirs) ]]; then rirs=none; fi
settings=("data.dir=$data" "seed=$seed")
if [[ $noise == none ]]; then settings+=(augment.noise_prob=0); fi
if [[ $rirs == none ]]; then settings+=(augment.room_prob=0); fi
settings+=("${set[@]}")
stored=(--codec "$codec") # how stage 2 packs
if [[ $features == fbank ]]; then
  stored=(--features fbank --config "${config[@]}" "${machine[@]}" --set "${settings[@]}")
fi
if [[ $large_margin == true ]]; then
  exp=$exp-lm noise='' rirs='' check_training "${config[@]}" "$tuning" "${machine[@]}" >/dev/null
fi
check_training "${config[@]}" "${machine[@]}"
sources=(${corpus:+--corpus "$corpus"} ${noise:+--noise "$noise"} ${rirs:+--rirs "$rirs"}) # options of prepare.py

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then # with --corpus, only noise and rooms that are missing
  run python "$recipe/prepare.py" "--download${corpus:+-noise}" "${sources[@]}" --data "$data"
fi

too_few=$data/calibration_only # from stage 1, with the reason, if there are too few speakers to train
if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data" --sample-rate "$rate"
  sets=("$data/train" "$data/test")
  if [[ -f $too_few ]]; then sets=("$data/train"); fi
  run speakerlab check "${sets[@]}" "${banks[@]}" --sample-rate "$rate" --allow-rejected "$allow_rejected"
fi

if stage 2 'decode and pack audio'; then
  run speakerlab pack "$data/train" "${stored[@]}" --sample-rate "$rate" --allow-rejected "$allow_rejected" ${job:+--job "$job"}
  if [[ ! -f $too_few ]]; then banks+=("$data/test"); fi
  if ((${#banks[@]})); then
    run speakerlab check "${banks[@]}" --sample-rate "$rate" --decode --allow-rejected "$allow_rejected"
  fi
fi

# In place of the stages below.
if ((folds > 1)) || [[ -f $too_few ]]; then
  source "$recipe/few_speakers.sh"
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if [[ $large_margin == true ]] && stage 4 'large-margin fine-tuning'; then
  run speakerlab train --exp "$exp-lm" --config "${config[@]}" "$tuning" "${machine[@]}" \
    --init "$exp/model" "${ranks[@]}" --set "${settings[@]}"
fi

if stage 5 embeddings; then
  for system in "${systems[@]}"; do
    run speakerlab extract --exp "$system" --data "$data/test" "${processes[@]}"
    run speakerlab extract --exp "$system" --data "$data/test" --untrained "${processes[@]}"
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    run speakerlab score --exp "$system" --trials "$data/test/trials" --backend cosine "${devices[@]}"
  done
  say "to compare two recordings: speakerlab verify A.wav B.wav --model ${systems[-1]}"
fi

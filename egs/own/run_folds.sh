#!/usr/bin/env bash
# Fine-tunes a model on few speakers (5 to 20), and measures by cross-validation whether this helps.
#   bash egs/own/run_folds.sh --corpus DIR --init MODEL
# For each of --folds parts of the speakers, a model is trained on the other speakers and tested on
# these; the result is the model that is trained on all speakers.
# Read whole before it runs, so that you may edit it meanwhile.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
folds=5           # 2-20: parts of the speakers, each of at least two
seed=0            # 0-4294967295: random seed of weights, data order and augmentation
set=()            # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=             # MODEL: fine-tune this experiment, model folder or hub:NAME
corpus=           # DIR: your recordings, DIR/SPEAKER/*.wav or other formats
noise=            # DIR|none|auto: noise for augmentation (default: none, or what stage 1 was given)
rirs=             # DIR|none|auto: room impulse responses (default: none, or what stage 1 was given)
data=$recipe/data # DIR: the data directories
exp=              # DIR: the experiment (default: exp/NAME_folds_sSEED); the folds write DIR-fold1 and so on
hardware=auto     # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ -n $job || $nnodes != 1 ]]; then die '--job, --nnodes: not with run_folds.sh, which one host runs'; fi
if [[ -z $init && $dry_run == false ]]; then die '--init: missing; give the model to fine-tune'; fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
if [[ $init == hub:* && $dry_run == false ]]; then init=$(run speakerlab import "$init"); fi
init=${init:-MODEL} init=${init%/} name=${init%/model} name=${name##*[/:]} machine=()
config=("$init/config.yaml" "$recipe/conf.yaml" finetune/own_data) # first the model's own
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_folds_s$seed}

if [[ -z $noise && ($stage -le 1 || ! -d $data/noise) ]]; then noise=none; fi
if [[ -z $rirs && ($stage -le 1 || ! -d $data/rirs) ]]; then rirs=none; fi
settings=("data.dir=$data" 'data.train=[all]' "seed=$seed" data.valid_speakers=0) # the folds validate
if [[ $noise == none ]]; then settings+=(augment.noise_prob=0); fi
if [[ $rirs == none ]]; then settings+=(augment.room_prob=0); fi
settings+=("${set[@]}")
check_training "${config[@]}" "${machine[@]}"
sources=(${corpus:+--corpus "$corpus"} ${noise:+--noise "$noise"} ${rirs:+--rirs "$rirs"}) # options of prepare.py
parts=()
for ((part = 1; part <= folds; part++)); do parts+=("fold$part"); done

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then # with --corpus, only noise and rooms that are missing
  run python "$recipe/prepare.py" "--download${corpus:+-noise}" "${sources[@]}" --data "$data"
fi

if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data"
  sets=("$data/train")
  if [[ -d $data/test ]]; then sets+=("$data/test"); fi
  run speakerlab check "${sets[@]}" "${banks[@]}" --sample-rate "$rate" --decode --allow-rejected 0.05
fi

if stage 2 folds; then
  run python "$recipe/folds.py" split --data "$data" --folds "$folds"
  for part in "${parts[@]}"; do
    run speakerlab check "$data/$part/train" "$data/$part/test" --sample-rate "$rate"
  done
  run speakerlab check "$data/all" --sample-rate "$rate"
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if [[ $current == 3 ]]; then # also without the speakers of each fold
  for part in "${parts[@]}"; do
    run speakerlab train --exp "$exp-$part" --config "${config[@]}" "${machine[@]}" --init "$init" \
      "${ranks[@]}" --set "${settings[@]}" "data.train=[$part/train]"
  done
fi

if stage 5 embeddings; then
  for part in "${parts[@]}"; do
    run speakerlab extract --exp "$exp-$part" --data "$data/$part/test" "${processes[@]}"
    run speakerlab extract --exp "$exp-$part" --data "$data/$part/test" --untrained "${processes[@]}"
  done
fi

if stage 6 'scores of all folds, and the threshold'; then
  run python "$recipe/folds.py" pool --data "$data" --folds "$folds" --exp "$exp"
  say 'before and after fine-tuning, on speakers that the model was not trained on:'
  run speakerlab compare --trials "$data/all/trials" "$exp/folds/before.txt" "$exp/folds/after.txt"
  say "to compare two recordings: speakerlab verify A.wav B.wav --model $exp"
fi

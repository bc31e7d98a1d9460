#!/usr/bin/env bash
# 3D-Speaker: trains on 10,000 speakers and tests with the three trial lists of the corpus.
#   bash egs/3dspeaker/run.sh --model eres2net --gpus "0 1 2 3"    # from download to report
#   bash egs/3dspeaker/run.sh --stage 3 --stop-stage 3 --dry-run   # print the command of stage 3
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
task=sv           # sv|ssl|distil|lid: verification, self-supervised, distillation from --teacher, or language identification
model=campplus    # NAME: conf/NAME.yaml, or one of its variants
seed=0            # 0-4294967295: random seed of weights, data order and augmentation
set=()            # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=             # MODEL: start from this model
large_margin=     # true|false: also run stage 4 (default: false)
method=           # dino|sdpn|simclr: with --task ssl (default: dino)
teacher=          # MODEL: with --task distil, the model to learn from; also an .onnx file
corpus=           # DIR: the corpus, if it is on disk; otherwise stage 0 downloads it
noise=auto        # DIR|none|auto: noise for augmentation; auto: musan, in or beside the corpus
rirs=auto         # DIR|none|auto: room impulse responses; auto: RIRS_NOISES, in or beside the corpus
data=$recipe/data # DIR: the data directories
exp=              # DIR: the experiment (default: exp/MODEL_sSEED); stage 4 writes DIR-lm
features=wave     # wave|fbank: what stage 2 packs; fbank trains faster, without audio augmentation
codec=pcm         # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto     # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ $task == lid ]]; then exec bash "$recipe/run_lid.sh" "$@"; fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("$model" "$recipe/conf.yaml")
machine=()
name=$model
tuning=finetune/large_margin
if [[ -f $recipe/conf/$model.yaml ]]; then config+=("$recipe/conf/$model.yaml"); fi
# As published for these models.
if [[ $model == eres2netv2 ]]; then
  tuning=finetune/large_margin_eres2netv2
fi
if [[ $model == @(ecapa_tdnn*|resnet34) ]]; then tuning=finetune/large_margin_wespeaker; fi
backends=(cosine mean+cosine mean+cosine+asnorm) # of stage 6, a row of results each
learned_from=(--development "$data/train")       # what these back ends learn from
if [[ $task == ssl ]]; then
  config+=("ssl/${method:=dino}")
  name+=_$method
  backends=(cosine)
  learned_from=()
fi
if [[ $task == distil ]]; then
  config+=(distil)
  name+=_distil
  backends=(cosine)
  learned_from=()
fi
if [[ $features == fbank ]]; then
  machine+=(features/fbank)
  name+=_fbank
fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}
systems=("$exp")
if [[ $large_margin == true || -e $exp-lm/model ]]; then systems+=("$exp-lm"); fi

settings=("data.dir=$data" "seed=$seed") # with a second training set also "data.train=[train,NAME]"
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
sources=(${corpus:+--corpus "$corpus"} --noise "$noise" --rirs "$rirs") # options of prepare.py

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then # with --corpus, only noise and rooms that are missing
  run python "$recipe/prepare.py" "--download${corpus:+-noise}" "${sources[@]}" --data "$data"
fi

if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data"
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

if [[ $large_margin == true ]] && stage 4 'large-margin fine-tuning'; then
  run speakerlab train --exp "$exp-lm" --config "${config[@]}" "$tuning" "${machine[@]}" \
    --init "$exp/model" "${ranks[@]}" --set "${settings[@]}"
fi

if stage 5 embeddings; then
  for system in "${systems[@]}"; do
    run speakerlab extract --exp "$system" --data "$data/test" "${processes[@]}"
    if [[ $task != sv ]]; then continue; fi
    run speakerlab extract --exp "$system" --data "$data/train" --per-speaker 10 "${processes[@]}"
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    run speakerlab score --exp "$system" --trials "$data"/test/trials_cross_{device,distance,dialect} \
      --backend "${backends[@]}" "${learned_from[@]}" "${devices[@]}"
  done
  say "to compare two recordings: speakerlab verify A.wav B.wav --model ${systems[-1]}"
fi

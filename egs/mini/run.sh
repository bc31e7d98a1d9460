#!/usr/bin/env bash
# A synthetic corpus, to try everything within minutes on two CPU cores.
#   bash egs/mini/run.sh
#   bash egs/mini/run.sh --stage 3 --stop-stage 3 --dry-run   # print the command of stage 3
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
task=sv             # sv|ssl|distil|lid|diar|segmentation: verification, self-supervised, distillation from --teacher, language identification, diarization, segmentation network
model=campplus_tiny # NAME: conf/NAME.yaml, or one of its variants
seed=0              # 0-4294967295: random seed of weights, data order and augmentation
set=()              # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=               # MODEL: start from this model
large_margin=       # true|false: also run stage 4 (default: false)
method=             # dino|sdpn|simclr: with --task ssl (default: simclr)
teacher=            # MODEL: with --task distil, the model to learn from; also an .onnx file
embedder=           # MODEL: with --task segmentation, whose embeddings diarize (default: exp/MODEL_sSEED)
corpus=             # DIR: where the corpus is made (default: corpus)
noise=corpus        # DIR|none|corpus: noise for augmentation; corpus: synthesized with it
rirs=corpus         # DIR|none|corpus: room impulse responses; corpus: synthesized with it
data=$recipe/data   # DIR: the data directories
exp=                # DIR: the experiment (default: exp/MODEL_sSEED); stage 4 writes DIR-lm
features=wave       # wave|fbank: what stage 2 packs; fbank trains faster, without audio augmentation
codec=pcm           # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto       # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ $task == @(lid|diar|segmentation) ]]; then exec bash "$recipe/run_$task.sh" "$@"; fi
if [[ -n $embedder ]]; then die '--embedder: only with --task segmentation; leave it out'; fi

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("$model" "$recipe/conf.yaml")
machine=()
name=$model
tuning=finetune/large_margin
backends=(cosine)                                                   # of stage 6, a row of results each
treatments=(--durations 1 2 full --codecs none mp3:16k opus:8k gsm) # of the test side: more results
if [[ $task == ssl ]]; then
  config+=("ssl/${method:=simclr}" "$recipe/conf/ssl.yaml")
  name+=_$method
  if [[ -f $recipe/conf/$method.yaml ]]; then config+=("$recipe/conf/$method.yaml"); fi
fi
if [[ $task == distil ]]; then
  config+=(distil)
  name+=_distil
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
sources=(${corpus:+--corpus "$corpus"}) # options of prepare.py
if [[ $noise != corpus ]]; then sources+=(--noise "$noise"); fi
if [[ $rirs != corpus ]]; then sources+=(--rirs "$rirs"); fi

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then
  run python "$recipe/prepare.py" --download "${sources[@]}" --data "$data" # installs the synthesizer
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
    run speakerlab extract --exp "$system" --data "$data/test" "${treatments[@]}" "${processes[@]}"
    run speakerlab extract --exp "$system" --data "$data/test" --untrained "${processes[@]}"
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    run speakerlab score --exp "$system" --trials "$data/test/trials" \
      --backend "${backends[@]}" "${treatments[@]}" --reference "$recipe/reference.json" "${devices[@]}"
  done
  say "to compare two recordings: speakerlab verify A.wav B.wav --model ${systems[-1]}"
fi

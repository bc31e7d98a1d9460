#!/usr/bin/env bash
# VoxBlink2: trains on 111,284 speakers, and tests with the cleaned lists O, E and H of VoxCeleb1;
# stage 4 fine-tunes on VoxCeleb2. First, egs/voxceleb prepares VoxCeleb.
#   bash egs/voxceleb/run.sh --stop-stage 2 --corpus DIR
#   bash egs/voxblink2/run.sh --corpus DIR --gpus "0 1 2 3 4 5 6 7" --large-margin true
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
task=sv              # sv|ssl|distil: verification, self-supervised, or distillation from --teacher
model=simam_resnet34 # NAME: conf/NAME.yaml, or one of its variants
seed=0               # 0-4294967295: random seed of weights, data order and augmentation
set=()               # KEY=VALUE: settings that override all files, such as training.lr=0.1
init=                # MODEL: start from this model
large_margin=        # true|false: also run stage 4 (default: false)
method=              # dino|sdpn|simclr: with --task ssl (default: dino)
teacher=             # MODEL: with --task distil, the model to learn from; also an .onnx file
corpus=              # DIR: the utterances of VoxBlink2, where its scripts have written them
voxceleb=            # DIR: the data of egs/voxceleb, after its stages 0 to 2 (default: egs/voxceleb/data)
noise=auto           # DIR|none|auto: noise for augmentation; auto: musan, in or beside the corpus
rirs=auto            # DIR|none|auto: room impulse responses; auto: RIRS_NOISES, in or beside the corpus
data=$recipe/data    # DIR: the data directories
exp=                 # DIR: the experiment (default: exp/MODEL_sSEED); stage 4 writes DIR-lm
features=wave        # wave|fbank: what stage 2 packs; fbank trains faster, without audio augmentation
codec=pcm            # pcm|flac: of packed audio; flac takes two thirds of the disk
hardware=auto        # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
voxceleb=${voxceleb:-$root/egs/voxceleb/data}

# The configuration: names in conf/ or paths; a later file overrides earlier ones.
config=("$model" "$recipe/conf.yaml")
machine=()
name=$model
tuning=finetune/large_margin
if [[ $model == @(simam_resnet34|ecapa_tdnn*|resnet34) ]]; then
  tuning=finetune/large_margin_wespeaker
fi
if [[ $model == redimnet2_* ]]; then tuning=finetune/large_margin_redimnet2; fi
if [[ $model == eres2netv2 ]]; then tuning=finetune/large_margin_eres2netv2; fi
backends=(cosine mean+cosine mean+cosine+asnorm) # of stage 6, a row of results each
# What these back ends learn from, for each system: what it was trained on.
declare -A learned_from
if [[ $task == ssl ]]; then
  config+=("ssl/${method:=dino}")
  name+=_$method
  backends=(cosine)
fi
if [[ $task == distil ]]; then
  config+=(distil)
  name+=_distil
  backends=(cosine)
fi
if [[ $features == fbank ]]; then
  machine+=(features/fbank)
  name+=_fbank
fi
if [[ $hardware != auto ]]; then machine+=("$hardware"); fi
exp=${exp:-$recipe/exp/${name}_s$seed}
systems=("$exp")
if [[ $large_margin == true || -e $exp-lm/model ]]; then systems+=("$exp-lm"); fi
if [[ $task == sv ]]; then learned_from=(["$exp"]=$data/train ["$exp-lm"]=$voxceleb/train); fi
needed=("$voxceleb/test")
if ((stop_stage > 3 && ${#systems[@]} > 1)); then needed+=("$voxceleb/train"); fi
# A training alone needs nothing of VoxCeleb.
if [[ $dry_run == true || ($stage == 3 && $stop_stage == 3) ]]; then needed=(); fi
for folder in "${needed[@]}"; do
  if [[ ! -f $folder/wav.scp ]]; then
    die "--voxceleb: no data directory $folder; run egs/voxceleb/run.sh --stop-stage 2 first"
  fi
done

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
sources=(${corpus:+--corpus "$corpus"} --noise "$noise" --rirs "$rirs") # options of prepare.py

# From setup.sh: rate, of all audio; ranks, processes and devices, options of train, extract and others.
if stage 0 corpus; then
  run python "$recipe/prepare.py" --download "${sources[@]}" --data "$data"
fi

if stage 1 'data directories'; then
  run python "$recipe/prepare.py" "${sources[@]}" --data "$data"
  run speakerlab check "$data/train" "$voxceleb/test" "${banks[@]}" --sample-rate "$rate" \
    --allow-rejected 0.01 # utterances of videos that were cut short, listed in rejected.tsv
fi

if stage 2 'decode and pack audio'; then
  run speakerlab pack "$data/train" "${stored[@]}" --sample-rate "$rate" ${job:+--job "$job"}
  run speakerlab check "$voxceleb/test" "${banks[@]}" --sample-rate "$rate" --decode
fi

if stage 3 training; then
  run speakerlab train --exp "$exp" --config "${config[@]}" "${machine[@]}" ${init:+--init "$init"} \
    "${ranks[@]}" --set "${settings[@]}"
fi

if [[ $large_margin == true ]] && stage 4 'large-margin fine-tuning on VoxCeleb2'; then
  run speakerlab train --exp "$exp-lm" --config "${config[@]}" "$tuning" "$recipe/voxceleb2.yaml" "${machine[@]}" \
    --init "$exp/model" "${ranks[@]}" --set "${settings[@]}" "data.train=[{dir: \"$voxceleb/train\"}]"
fi

if stage 5 embeddings; then
  for system in "${systems[@]}"; do
    run speakerlab extract --exp "$system" --data "$voxceleb/test" "${processes[@]}"
    if [[ $task != sv ]]; then continue; fi
    run speakerlab extract --exp "$system" --data "${learned_from[$system]}" --per-speaker 10 "${processes[@]}"
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    run speakerlab score --exp "$system" --trials "$voxceleb"/test/trials_{O,E,H} \
      --backend "${backends[@]}" ${learned_from[$system]:+--development "${learned_from[$system]}"} "${devices[@]}"
  done
  say "to compare two recordings: speakerlab verify A.wav B.wav --model ${systems[-1]}"
fi

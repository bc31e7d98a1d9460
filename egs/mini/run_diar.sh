#!/usr/bin/env bash
# Diarization of synthetic conversations with the model of verification, within minutes.
#   bash egs/mini/run_diar.sh                  # the same: bash egs/mini/run.sh --task diar
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
# shellcheck disable=SC2034 # run.sh hands --task over
task=diar              # diar: diarization
model=campplus_tiny    # NAME: conf/NAME.yaml of the model that stage 3 trains
seed=0                 # 0-4294967295: random seed of that training
set=()                 # KEY=VALUE: settings of that training, such as training.lr=0.1
init=                  # MODEL: diarize with this model instead
large_margin=          # true|false: also fine-tune the model, and diarize with both (default: false)
corpus=                # DIR: where the conversations are made (default: corpus_diar)
noise=corpus           # DIR|none|corpus: noise for augmentation of that training
rirs=corpus            # DIR|none|corpus: room impulse responses for that training
data=$recipe/data_diar # DIR: the data directories
exp=                   # DIR: the experiment (default: exp/MODEL_sSEED, that of verification)
hardware=auto          # PRESET: conf/hardware/PRESET.yaml, or the path of a file like it
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ -n $job || $nnodes -gt 1 ]]; then
  die '--job, --nnodes: not with --task diar, which one host runs'
fi
if [[ -n $init && $large_margin == true ]]; then
  die "--large-margin, --stage 4: no model is trained with --init $init; leave it out"
fi

name=${init%/}
name=${name%/model}
name=${name##*[/:]}
exp=${exp:-$recipe/exp/${name:-${model}_s$seed}}
systems=("$exp")
if [[ $large_margin == true || (-z $init && -e $exp-lm/model) ]]; then systems+=("$exp-lm"); fi

if stage 0 corpus; then
  run python "$recipe/diar/prepare.py" --download ${corpus:+--corpus "$corpus"} --data "$data" # installs the synthesizer
fi

if stage 1 'data directories'; then
  run python "$recipe/diar/prepare.py" ${corpus:+--corpus "$corpus"} --data "$data"
  run speakerlab check "$data/dev" "$data/test" --sample-rate "$rate"
fi

if stage 2 'decode all audio'; then
  run speakerlab check "$data/dev" "$data/test" --sample-rate "$rate" --decode
fi

if stage 3 'training of the model'; then # and 4, by the recipe of verification
  until_stage=3
  if [[ $large_margin == true ]]; then until_stage=4; fi
  if [[ -n $init || (-e ${systems[-1]}/model) ]]; then
    say "stage 3: skipped, the model is ${init:-${systems[-1]}}"
  else
    run bash "$recipe/run.sh" --stop-stage "$until_stage" --exp "$exp" --model "$model" --seed "$seed" \
      --noise "$noise" --rirs "$rirs" --hardware "${hardware#hardware/}" "${ranks[@]}" ${set[0]:+--set "${set[@]}"}
  fi
fi

if stage 5 diarization; then # with the true regions of speech, and with those found by energy
  for system in "${systems[@]}"; do
    run speakerlab calibrate --for diarization --model "${init:-$system}" --data "$data/dev" \
      --out "$system" --force "${devices[@]}"
    for set in dev test; do
      files=(RECORDINGS)
      if [[ -f $data/$set/wav.scp ]]; then
        mapfile -t files < <(cut -d ' ' -f 2- "$data/$set/wav.scp")
      fi
      run speakerlab diarize "${files[@]}" --model "$system" --vad "$data/$set/ref.rttm" \
        --out "$system/diarization/$set/oracle" "${devices[@]}"
      run speakerlab diarize "${files[@]}" --model "$system" --vad energy \
        --out "$system/diarization/$set/energy" "${devices[@]}"
    done
  done
fi

if stage 6 'scores and report'; then
  for system in "${systems[@]}"; do
    for set in dev test; do
      regions=()
      if [[ -f $data/$set/ref.uem ]]; then regions=(--uem "$data/$set/ref.uem"); fi
      for vad in oracle energy; do
        say "$set, regions of speech: $vad"
        run speakerlab der "$data/$set/ref.rttm" "$system/diarization/$set/$vad" "${regions[@]}" \
          --json "$system/diarization/${set}_$vad.json" --report "$system/diarization/${set}_$vad.html" \
          --data "$data/$set"
      done
    done
  done
fi

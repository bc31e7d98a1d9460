#!/usr/bin/env bash
# Diarization of AMI: meetings of four, in English.
#   bash egs/ami/run.sh                      # from download to DER
#   bash egs/ami/run.sh --init MODEL         # with your model
# Read whole before it runs, so you may edit it during a run.
[ -n "${BASH_EXECUTION_STRING:-}" ] || exec bash -c 'source "$0"' "$(dirname "$0")/${0##*/}" "$@"
recipe=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$recipe/../common/setup.sh"

# Options: --NAME VALUE, with - for _. Here: name=default # KIND: what it is
# shellcheck disable=SC2034 # run_segmentation.sh reads it
seed=0                        # 0-4294967295: with --task segmentation, random seed of the training
task=diar                     # diar|segmentation: diarization, or a segmentation network for it
init=hub:voxceleb_resnet34_LM # MODEL: the model that diarizes
corpus=                       # DIR: AMI, if it is on disk; otherwise stage 0 downloads it
microphone=Mix-Headset        # Mix-Headset|Array1-01: the sum of the headsets, or the first of the table array
data=$recipe/data_diar        # DIR: the data directories
exp=                          # DIR: the experiment, with a calibrated copy of the model (default: exp/NAME of the model)
development=                  # DATA: checked data of 80 speakers or more, such as data/train of voxceleb: also compare vbx
embedder=                     # MODEL: with --task segmentation, whose embeddings diarize
hardware=auto                 # PRESET: cpu: the same as --gpus ""
set=()                        # KEY=VALUE: frontend.sample_rate=8000, if the model is for another rate
parse_options "${BASH_SOURCE[0]}" "$@"
if [[ $task == segmentation ]]; then exec bash "$recipe/run_segmentation.sh" "$@"; fi
if [[ -n $embedder ]]; then
  die '--embedder: only with --task segmentation; --init is the model that diarizes'
fi
if [[ -n $job || $nnodes -gt 1 ]]; then
  die '--job, --nnodes: not with --task diar, which one host runs'
fi

name=${init%/}
name=${name%/model}
exp=${exp:-$recipe/exp/${name##*[/:]}}

if stage 0 corpus; then
  if [[ -z $corpus ]]; then
    run python "$recipe/diar/prepare.py" --download --data "$data" --microphone "$microphone"
  fi
fi

if stage 1 'data directories'; then
  run python "$recipe/diar/prepare.py" ${corpus:+--corpus "$corpus"} --data "$data" --microphone "$microphone"
  run speakerlab check "$data/dev" "$data/test" --sample-rate "$rate"
fi

if stage 2 'decode all audio'; then
  run speakerlab check "$data/dev" "$data/test" --sample-rate "$rate" --decode
fi

if stage 5 diarization; then # with the true regions of speech, and with those found by energy
  run speakerlab calibrate --for diarization --model "$init" --data "$data/dev" --out "$exp" --force \
    ${development:+--development "$development"} "${devices[@]}"
  for set in dev test; do
    files=(RECORDINGS)
    if [[ -f $data/$set/wav.scp ]]; then
      mapfile -t files < <(cut -d ' ' -f 2- "$data/$set/wav.scp")
    fi
    run speakerlab diarize "${files[@]}" --model "$exp" --vad "$data/$set/ref.rttm" \
      --out "$exp/diarization/$set/oracle" "${devices[@]}"
    run speakerlab diarize "${files[@]}" --model "$exp" --vad energy \
      --out "$exp/diarization/$set/energy" "${devices[@]}"
  done
fi

if stage 6 'scores and report'; then
  for set in dev test; do
    regions=()
    if [[ -f $data/$set/ref.uem ]]; then regions=(--uem "$data/$set/ref.uem"); fi
    for vad in oracle energy; do
      say "$set, regions of speech: $vad"
      run speakerlab der "$data/$set/ref.rttm" "$exp/diarization/$set/$vad" "${regions[@]}" \
        --json "$exp/diarization/${set}_$vad.json" --report "$exp/diarization/${set}_$vad.html" \
        --data "$data/$set"
    done
  done
fi

# shellcheck shell=bash disable=SC2154 # run.sh sets what is read here
# Sourced by run.sh instead of stages 3 to 6 where there are few speakers: with --folds, cross-validation
# over speakers (5 to 20 of them); else the calibration of --init. A student needs no speakers: stage 3.
if [[ $task == distil ]]; then stop_stage=$((stop_stage < 3 ? stop_stage : 3)) && return; fi # no test set
if ((folds == 1)); then
  if stage 3 calibration; then
    if [[ -z $init ]]; then die "stage 3: $(<"$too_few"); give a model with --init, or more recordings"; fi
    run speakerlab calibrate --model "$init" --data "$data/train" --out "$exp"
  fi
  ((stop_stage < 3)) || say "stages 4 to 6: skipped, $(<"$too_few"); to fine-tune on 5 speakers or more: --folds 5;" \
    "to compare two recordings: speakerlab verify A.wav B.wav --model $exp"
  exit
fi

# A fold has data directories of its own, where run.sh trains without its speakers, and embeds these.
repeat() { # LAST DATA EXP OPTION...: run stages 2 to LAST of this recipe again, with other folders
  local first=$((stage > 2 ? stage : 2)) last=$((stop_stage < $1 ? stop_stage : $1))
  local command=(bash "$recipe/run.sh" --set data.valid_speakers=0 "${@:4}" --folds 1)
  command+=(${noise:+--noise "$noise"} ${rirs:+--rirs "$rirs"} --stage "$first" --stop-stage "$last" --data "$2" --exp "$3")
  if ((first <= last)); then say "${2##*/}:"; else return 0; fi
  run speakerlab check "$2/train" --sample-rate "$rate"
  run speakerlab check "$2/test" --sample-rate "$rate" # alone, as all/test has the speakers of all/train
  if [[ $dry_run == true ]]; then "${command[@]}"; else run "${command[@]}"; fi
}

if ((stage <= 3 && stop_stage >= 2)); then run python "$recipe/folds.py" split --data "$data" --folds "$folds"; fi
for ((part = 1; part <= folds; part++)); do
  repeat 5 "$data/fold$part" "$exp-fold$part" "$@"
done
repeat 3 "$data/all" "$exp" "$@"
if stage 6 'scores of all folds, and the threshold'; then
  run python "$recipe/folds.py" pool --data "$data" --folds "$folds" --exp "$exp"
  say 'before and after fine-tuning, on speakers that the model was not trained on:'
  run speakerlab compare --trials "$data/all/test/trials" "$exp/folds/before.txt" "$exp/folds/after.txt"
  say "if the EER has not fallen, keep $init; else: speakerlab verify A.wav B.wav --model $exp"
fi
exit

# shellcheck shell=bash disable=SC2154 # options.py sets the variables of the options
# The stages of every recipe. Sourced by egs/<recipe>/run.sh, which sets recipe_dir.
# Stages 1 and 2 write data directories, 3 the model, 4 the fine-tuned model <exp>-lm, 5 embeddings,
# 6 scores and the report. With --task ssl, stage 3 trains without labels, and 4 is skipped. With
# --task diar, stage 3 trains the model of verification unless it is there or given with --init, 5
# calibrates it and diarizes, and 6 scores the turns.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf 'run.sh: needs bash 4.4 or newer, this is %s; start run.sh with a newer one\n' \
    "$BASH_VERSION" >&2
  exit 1
fi
set -euo pipefail
recipe_dir=${recipe_dir:?is set by run.sh}

# shellcheck source=egs/common/env.sh
source "$recipe_dir/../common/env.sh"

# recipe.sh sets these variables, and defaults of the options in options.py.
train_sets=(train) test_sets=(test) trials=(test/trials) prepare_args=()
diar_sets=(dev test)   # of --task diar; the clustering is calibrated on the first one
backends=(cosine)      # of stage 6, one row of results each; see docs/scoring.md
durations=()           # of stages 5 and 6: results with the test side cut to so many seconds
codecs=()              # of stages 5 and 6: results with the test side encoded and decoded
overlay=''             # conf/finetune/<overlay>.yaml, added to the configuration of every training
init_overlay=''        # with --init: overlay on the configuration of that model (not conf/<model>.yaml)
default_noise=download # without --noise and --rirs: "download" MUSAN and RIRS_NOISES to the corpus
#                        in stage 0, noise and rooms that stage 1 makes with the "corpus", or "none"
untrained=true         # stage 5 also extracts with the initial weights
development=false      # stage 5 also extracts from the first training set, for back ends that learn
stage0_always=false    # run stage 0 even if --corpus is given
allow_missing=0        # share of a set's recordings that may be missing in stage 1
allow_undecodable=0.01 # share that may fail to decode in stage 2
# shellcheck source=egs/mini/recipe.sh
source "$recipe_dir/recipe.sh"

stage_names=(corpus 'data directories' 'decode and pack audio' training 'large-margin fine-tuning'
  embeddings 'scores and report')
current=''   # the running stage
stopped=''   # the signal that asked the training to stop
num_passed=0 # signals forwarded to the training
stop_signals=(TERM INT HUP USR1)

say() {
  if [[ $dry_run == true ]]; then printf '# '; fi
  printf '%s\n' "$*"
}

# run ARGUMENT...: run Python with the arguments, or print the command.
run() {
  if [[ $dry_run == true ]]; then
    printf 'python' && printf ' %q' "$@" && printf '\n'
  else
    if [[ -z $python ]]; then find_python; fi
    "$python" "$@"
  fi
}

# run_stoppable ARGUMENT...: as run, for commands that save before they stop: forward signals (USR1 is
# Slurm's warning) and wait. The command runs in the background, because bash handles no signal while
# it waits for a command in the foreground.
run_stoppable() {
  local child code=0 name
  if [[ $dry_run == true ]]; then
    run "$@"
    return
  fi
  if [[ -z $python ]]; then find_python; fi
  # Background commands ignore Ctrl-C by default.
  (trap - INT QUIT && exec "$python" "$@") </dev/null &
  child=$!
  # After the fork: a child that has inherited these traps loses signals until it runs Python.
  for name in "${stop_signals[@]}"; do
    # shellcheck disable=SC2064 # expand the name now
    trap "pass_on $name" "$name"
  done
  wait_for "$child" || code=$?
  trap - "${stop_signals[@]}"
  heed_sigint
  # It may have ended just before, or by the SIGTERM for a SIGINT.
  if [[ -n $stopped && $code =~ ^(0|143)$ ]]; then code=$((128 + $(kill -l "$stopped"))); fi
  return "$code"
}

# heed_sigint: exit after the command in the foreground if the shell got a SIGINT. Without a trap, bash
# ignores a SIGINT that has not also ended that command.
heed_sigint() { trap 'exit 130' INT; }

# pass_on SIGNAL: forward it to the child. A Ctrl-C has reached the child already, and a second SIGINT
# would make it exit without saving, so it gets a SIGTERM.
pass_on() {
  stopped=$1 num_passed=$((num_passed + 1))
  kill -s "${1/INT/TERM}" "$child" 2>/dev/null || true
}

# wait_for PROCESS: return its exit code, also if signals interrupt the waiting.
wait_for() {
  local before code
  while :; do
    before=$num_passed code=0
    wait "$1" || code=$?
    if ((num_passed == before)); then return "$code"; fi
  done
}

# give NAME VALUE: export a variable to the commands.
give() {
  export "$1=$2"
  if [[ $dry_run == true ]]; then printf 'export %s=%q\n' "$1" "$2"; fi
}

set_environment() {
  local num_cores
  export SPEAKERLAB_PARENT=$$
  give PYTHONPATH "$PYTHONPATH"
  give PYTHONSAFEPATH 1 # do not import a folder named speakerlab in the current directory
  if [[ -n $plugins ]]; then give SPEAKERLAB_PLUGINS "$plugins"; fi
  if [[ -n $cuda_devices ]]; then give CUDA_VISIBLE_DEVICES "$cuda_devices"; fi
  if ((nproc > 1)) && [[ -z ${OMP_NUM_THREADS-} ]]; then
    num_cores=$(command nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    give OMP_NUM_THREADS $((num_cores > nproc ? num_cores / nproc : 1))
  fi
  # Limit spinning of waiting threads: it slows training tenfold when other processes use the cores.
  if [[ -z ${OMP_WAIT_POLICY-}${GOMP_SPINCOUNT-} ]]; then give GOMP_SPINCOUNT 2000; fi
  # Otherwise a second rendezvous finds the store of the first and hangs (torch 2.11, 2.13).
  give TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1
}

# need PATH EARLIER_STAGE STAGE: fail unless the earlier stage has written PATH.
need() {
  if [[ $dry_run == true || -e $1 ]]; then return; fi
  die "stage $3: missing $1, written by stage $2; run --stage $2 with the same options first"
}

# Check that options of stage 1 given to a later stage are those stage 1 was run with.
check_recorded() {
  local name marker=$data/.stage1
  if [[ $dry_run == true || ! -s $marker ]]; then return; fi
  for name in corpus noise rirs; do
    if [[ -n ${!name} ]] && ! grep -qxF -- "$name=${!name}" "$marker"; then
      die "--$name: stage 1 was run with another value than ${!name}; run --stage 1 with it first"
    fi
  done
}

check_order() {
  local system set_name
  if (($1 > 1)); then check_recorded; fi
  case $1 in
    2) need "$data/.stage1" 1 2 ;;
    3 | 4) need "$data/.stage1" 1 "$1" && need "$data/.stage2" 2 "$1" ;;&
    4) need "$exp/model" 3 4 ;;
    5)
      if [[ $task == diar && -n $init ]]; then return; fi
      need "$exp/model" 3 5
      for system in "${systems[@]}"; do need "$system/model" 4 5; done
      ;;
    6)
      for system in "${systems[@]}"; do
        if [[ $task == diar ]]; then
          for set_name in "${diar_sets[@]}"; do need "$system/diarization/$set_name" 5 6; done
        else
          for set_name in "${test_sets[@]}"; do need "$system/embeddings/$set_name" 5 6; done
        fi
      done
      ;;
  esac
}

# unchanged STAGE INPUTS: test whether the stage was completed with these inputs.
unchanged() {
  local marker=$data/.stage$1 folder
  if [[ $dry_run == true || ! -f $marker || $(<"$marker") != "$2" ]]; then return 1; fi
  for folder in "${data_dirs[@]}"; do
    if [[ ! -f $folder/utt2dur ]]; then return 1; fi
  done
  say "stage $1: skipped, done with the same options (remove $marker to run it again)"
}

# hold_data: keep another run.sh from writing the data directories until stage 2 has ended; --job is
# for several at a time.
hold_data() {
  if [[ $dry_run == true ]]; then return; fi
  if [[ -z $python ]]; then find_python; fi
  local kind=EX
  if [[ -n $job ]]; then kind=SH; fi
  hold "$data/.lock" "$kind" "$data: another run.sh prepares it"
}

# finish STAGE INPUTS: write the marker that `unchanged` reads.
finish() {
  if [[ $dry_run == true ]]; then return; fi
  printf '%s\n' "$2" >"$data/.stage$1.new"
  mv -f "$data/.stage$1.new" "$data/.stage$1"
}

# digest FILE...: print one SHA-256 of the existing files.
digest() {
  local file
  for file in "$@"; do
    if [[ -f $file ]]; then printf '%s\n' "${file##*/}" && cat -- "$file"; fi
  done | if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

prepare() {
  local name arguments=()
  for name in corpus noise rirs; do
    if [[ -n ${!name} ]]; then arguments+=("--$name" "${!name}"); fi
  done
  run "$task_dir/prepare.py" "$@" "${arguments[@]}" --data "$data" "${prepare_args[@]}"
}

stage_0() {
  if [[ -z $corpus || $stage0_always == true ]]; then
    begin
    if [[ ! -f $data/.stage1 ]]; then hold_data; fi
    prepare --download
  elif [[ -n $noise && ! -d $noise || -n $rirs && ! -d $rirs ]]; then
    begin
    if [[ ! -f $data/.stage1 ]]; then hold_data; fi
    prepare --download-noise
  else
    say "stage 0: skipped, the corpus is $corpus"
  fi
}

# Set the data directories: data_dirs are packed and others (test sets), `checked` also has noise and
# rooms. If stage 1 found the corpus too small to train on, there is only a training set.
list_data_dirs() {
  packed=("${train_sets[@]/#/$data/}") others=("${test_sets[@]/#/$data/}")
  if [[ -f $data/calibration_only ]]; then packed=("${packed[0]}") others=(); fi
  if [[ $task == diar ]]; then packed=() others=("${diar_sets[@]/#/$data/}"); fi
  data_dirs=("${packed[@]}" "${others[@]}")
  if [[ -n $noise || -d $data/noise ]]; then others+=("$data/noise"); fi
  if [[ -n $rirs || -d $data/rirs ]]; then others+=("$data/rirs"); fi
  checked=("${packed[@]}" "${others[@]}")
}

stage_1() {
  local inputs
  inputs=$(printf '%s\n' "corpus=$corpus" "noise=$noise" "rirs=$rirs" "allowed=$allow_missing" "rate=$sample_rate" &&
    digest "$recipe_dir"/{recipe.sh,*.py} "$recipe_dir/$task"/*.py "$recipe_dir/../common/corpus"/*.py)
  if unchanged 1 "$inputs" || { hold_data && unchanged 1 "$inputs"; }; then return; fi
  begin
  if [[ $dry_run == false ]]; then rm -f "$data"/.stage[12]; fi
  prepare
  list_data_dirs
  run -m speakerlab check "${checked[@]}" --sample-rate "$sample_rate" \
    --allow-rejected "$allow_missing"
  finish 1 "$inputs"
}

# Pack the training sets; decode all other audio once to find broken files.
stage_2() {
  local inputs folder kind=shards feature_inputs=() arguments=(--codec "$codec")
  if [[ $features == fbank ]]; then
    list_layers ${overlay:+"$overlay"}
    kind=features arguments=(--features fbank --config "${layers[@]}" --set "data.dir=$data" "${settings[@]}")
    hardware=auto list_layers ${overlay:+"$overlay"} # stored features do not depend on the machine
    feature_inputs=("model=$model" "${settings[@]}" "$(digest "${layers[@]}")")
  fi
  inputs=$(printf '%s\n' "allowed=$allow_undecodable" "rate=$sample_rate" "packed=$features $codec" \
    "${feature_inputs[@]}" &&
    for folder in "${checked[@]}"; do digest "$folder"/{wav.scp,segments,utt2spk,trials*}; done)
  for folder in "${packed[@]}"; do
    if [[ $dry_run == false && ! -f $folder/$kind/index.safetensors ]]; then rm -f "$data/.stage2"; fi
  done
  if unchanged 2 "$inputs" || { hold_data && unchanged 2 "$inputs"; }; then return; fi
  begin
  if [[ $dry_run == false ]]; then rm -f "$data/.stage2"; fi
  if ((${#others[@]})) && [[ -z $job || $job == 1/* ]]; then
    run -m speakerlab check "${others[@]}" --decode --sample-rate "$sample_rate" \
      --allow-rejected "$allow_undecodable"
  fi
  if ((${#packed[@]})); then
    run -m speakerlab pack "${packed[@]}" "${arguments[@]}" --sample-rate "$sample_rate" \
      --allow-rejected "$allow_undecodable" ${job:+--job "$job"}
  fi
  if [[ -z $job ]]; then finish 2 "$inputs"; fi
}

stage_3() {
  begin
  if [[ ! -f $data/calibration_only ]]; then
    train "$exp" "$init" ${overlay:+"$overlay"}
  elif [[ -z $init ]]; then
    die "stage 3: $(<"$data/calibration_only"); give a trained model with --init, or more recordings"
  else
    say "stage 3: $(<"$data/calibration_only")"
    run -m speakerlab calibrate --model "$init" --data "${data_dirs[0]}" --out "$exp"
  fi
}

stage_4() {
  if [[ $task == ssl ]]; then
    say 'stage 4: skipped, it needs labels'
    return
  elif [[ $large_margin == false ]]; then
    say 'stage 4: skipped; to run it, use --large-margin true or --stage 4'
    return
  fi
  begin
  train "$exp-lm" "$exp/model" ${overlay:+"$overlay"} large_margin
}

# train EXPERIMENT INIT OVERLAY...: run one training, with one process per rank. If it runs out of
# memory (exit code 5), start it once more with a smaller micro-batch.
train() {
  local options values code=0 too_large
  list_layers "${@:3}"
  options=(--exp "$1" --config "${layers[@]}")
  if [[ -n $2 ]]; then options+=(--init "$2"); fi
  values=(--set "data.dir=$data" "seed=$seed" "${without[@]}" "${settings[@]}")
  start_training 1 "${options[@]}" "${values[@]}" || code=$?
  if [[ $code == 5 && -z $stopped && -s $1/out_of_memory ]]; then
    too_large=$(<"$1/out_of_memory") code=0
    say "stage $current: out of memory with a micro-batch of $too_large; retrying with a smaller one"
    start_training 2 "${options[@]}" --below-micro-batch "$too_large" "${values[@]}" || code=$?
    if [[ $code == 5 ]]; then
      say "stage $current: out of memory again with a micro-batch of $(<"$1/out_of_memory"); use a" \
        'shorter data.crop_seconds, a smaller model or a lower runtime.precision' >&2
    fi
  fi
  return "$code"
}

# start_training ATTEMPT OPTION...: ATTEMPT is 1, or 2 after running out of memory.
start_training() {
  if ((nproc * nnodes == 1)); then
    run_stoppable -m speakerlab train "${@:2}"
  else
    if ((nnodes > 1)); then
      say "stage $current: begins when all $nnodes hosts have run this command, at most 10 minutes apart"
    fi
    list_launch_options "$1"
    run_stoppable -m speakerlab launch "${launch[@]}" -m speakerlab train "${@:2}"
  fi
}

# list_layers OVERLAY...: set `layers`, the files of the configuration.
list_layers() {
  local name
  layers=("$base_layer" "$task_dir/conf.yaml")
  if [[ $base_layer == "$root/conf/$model.yaml" ]]; then add_own_layer "$model"; fi
  for name in "$@"; do
    if [[ $task == ssl ]]; then
      layers+=("$root/conf/ssl/$name.yaml")
      add_own_layer ssl
    else
      layers+=("$root/conf/finetune/$name.yaml")
    fi
    add_own_layer "$name"
    add_own_layer "${model}_$name"
  done
  if [[ $features == fbank ]]; then layers+=("$root/conf/features/fbank.yaml"); fi
  if [[ $hardware != auto ]]; then layers+=("$hardware"); fi
}

# add_own_layer NAME: add the recipe's file for a model or an overlay, if there is one.
add_own_layer() {
  if [[ -f $task_dir/conf/$1.yaml ]]; then layers+=("$task_dir/conf/$1.yaml"); fi
}

# list_launch_options ATTEMPT: set `launch`. A dead rank ends the run without restarts; the same
# command resumes from the checkpoint.
list_launch_options() {
  launch=(--nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts 0)
  if ((nnodes == 1)); then
    launch+=(--standalone) # on a free port, so that several runs can share a host
  else
    # is_host is explicit, because rank 0's own host may resolve its name to 127.0.0.1.
    launch+=(--node-rank "$node_rank" --rdzv-backend c10d --rdzv-endpoint "$rdzv"
      --rdzv-id "speakerlab-$1"
      --rdzv-conf "is_host=$((node_rank == 0)),timeout=300,read_timeout=600,join_timeout=600")
    if ((node_rank == 0)); then launch+=(--local-addr "${rdzv%:*}"); fi
    if (($1 > 1 && node_rank > 0)); then sleep 5; fi # until the first rendezvous is closed
  fi
}

# as_verification STAGE: train or fine-tune the model of verification, which is that of diarization.
as_verification() {
  local number task=sv task_dir=$recipe_dir data=$recipe_dir/data corpus='' stage=0 stop_stage=$1
  if [[ -n $init || ($1 == 3 && -e $exp/model) ]]; then
    say "stage $1: skipped, the model is ${init:-$exp/model}"
    return
  fi
  say "stage $1: the model is that of verification"
  for number in 0 1 2 "$1"; do run_stage "$number"; done
}

stage_5() {
  local system set_name
  begin
  if [[ $task == diar ]]; then
    diarize
    return
  fi
  for system in "${systems[@]}"; do
    for set_name in "${test_sets[@]}"; do
      extract "$system" "$data/$set_name" "${treatments[@]}"
      if [[ $untrained == true ]]; then extract "$system" "$data/$set_name" --untrained; fi
    done
    if [[ $development == true ]]; then
      extract "$system" "$data/${train_sets[0]}" --per-speaker 10
    fi
  done
}

# extract SYSTEM DATA_DIR OPTION...: write one table of embeddings. With several hosts each is a job;
# the first waits for the others, because it continues with stage 6.
extract() {
  local share=$job waiting=()
  if ((nnodes > 1)); then
    share=$((node_rank + 1))/$nnodes
    if ((node_rank == 0)); then waiting=(--wait-minutes "$wait_minutes"); fi
  fi
  run -m speakerlab extract --exp "$1" --data "$2" "${@:3}" --nproc "$nproc" \
    ${share:+--job "$share"} "${waiting[@]}"
}

# diarize: with the true regions of speech, and with those found by energy. The clustering is that
# with the lowest DER on the first set; a model of --init is copied, to store it there.
diarize() {
  local system set_name vad regions files
  need "$data/${diar_sets[0]}/ref.rttm" 1 5
  for system in "${systems[@]}"; do
    run -m speakerlab calibrate --for diarization --model "${init:-$system}" \
      --data "$data/${diar_sets[0]}" --out "$system" --force
  done
  for set_name in "${diar_sets[@]}"; do
    need "$data/$set_name/ref.rttm" 1 5
    files=(RECORDINGS)
    if [[ -f $data/$set_name/wav.scp ]]; then
      mapfile -t files < <(cut -d ' ' -f 2- "$data/$set_name/wav.scp")
    fi
    for system in "${systems[@]}"; do
      for vad in oracle energy; do
        regions=$vad
        if [[ $vad == oracle ]]; then regions=$data/$set_name/ref.rttm; fi
        run -m speakerlab diarize "${files[@]}" --model "$system" --vad "$regions" \
          --out "$system/diarization/$set_name/$vad"
      done
    done
  done
}

stage_6() {
  local system pattern file command=() lists=() learned_from=() reference=()
  begin
  if [[ $task == diar ]]; then
    score_turns
    return
  fi
  if [[ -f $recipe_dir/reference.json ]]; then reference=(--reference "$recipe_dir/reference.json"); fi
  if [[ $development == true ]]; then learned_from=(--development "$data/${train_sets[0]}"); fi
  for pattern in "${trials[@]}"; do
    for file in "$data"/$pattern; do lists+=("$file"); done
  done
  for system in "${systems[@]}"; do
    if [[ $task == lid ]]; then # an identification task has classes instead of trials
      run -m speakerlab classify --exp "$system" --data "${test_sets[@]/#/$data/}"
    else
      run -m speakerlab score --exp "$system" --trials "${lists[@]}" --backend "${backends[@]}" \
        "${learned_from[@]}" "${treatments[@]}" "${reference[@]}"
    fi
  done
  if [[ $task == lid || $dry_run == true ]]; then return; fi
  command=("${python%/*}/speakerlab") # which an active environment may lack
  if [[ ! -x ${command[0]} ]]; then command=(env "PYTHONPATH=$root" "$python" -m speakerlab); fi
  say "to compare two recordings:$(printf ' %q' "${command[@]}" verify A.wav B.wav --model "$system")"
}

score_turns() {
  local system set_name vad regions
  for system in "${systems[@]}"; do
    for set_name in "${diar_sets[@]}"; do
      regions=()
      if [[ -f $data/$set_name/ref.uem ]]; then regions=(--uem "$data/$set_name/ref.uem"); fi
      for vad in oracle energy; do
        say "$set_name, regions of speech: $vad"
        run -m speakerlab der "$data/$set_name/ref.rttm" "$system/diarization/$set_name/$vad" \
          "${regions[@]}" --json "$system/diarization/${set_name}_$vad.json" \
          --report "$system/diarization/${set_name}_$vad.html" --data "$data/$set_name"
      done
    done
  done
}

run_stage() {
  local began='' packed others data_dirs checked systems=("$exp")
  if [[ $large_margin == true || (-e $exp-lm/model && ($task != diar || -z $init)) ]]; then
    systems+=("$exp-lm")
  fi
  list_data_dirs
  if ((nnodes > 1 && node_rank > 0)) && [[ $1 != [345] ]]; then
    say "stage $1: runs on node rank 0 only"
    return
  fi
  if (($1 > 3)) && [[ -f $data/calibration_only ]]; then
    say "stage $1: skipped, $(<"$data/calibration_only")"
    return
  fi
  if [[ $1 != 4 || $large_margin == true ]]; then check_order "$1"; fi
  if [[ $task == diar ]] && [[ $1 == 3 || ($1 == 4 && $large_margin == true) ]]; then
    as_verification "$1"
    return
  fi
  if [[ -z $device && $task != diar ]]; then check_run; fi
  current=$1
  "stage_$1"
  current=''
  if [[ $1 == 2 ]]; then let_go; fi
  if [[ -n $began && $dry_run == false ]]; then say "stage $1: took $((SECONDS - began)) s"; fi
}

# begin: print the headline of the current stage, which has work to do.
begin() {
  began=$SECONDS
  say "stage $current: ${stage_names[$current]}"
}

# choose_source OPTION ARCHIVE KEY: set --noise or --rirs to a folder, in or beside the corpus, or to
# nothing; `without` holds the settings that switch the augmentation off.
choose_source() {
  local folder=${corpus:-$recipe_dir/corpus}/$2
  if [[ -n $corpus && ! -d $folder ]]; then folder=${corpus%/*}/$2; fi
  if [[ -n ${!1} && ${!1} != none ]]; then given+=("$1"); fi
  if [[ -z ${!1} && $default_noise == none && (! -d $data/$1 || $stage -le 1) ]]; then
    printf -v "$1" none
  elif [[ -z ${!1} && $default_noise == download && $stage -le 1 ]]; then
    if [[ -z $corpus || -d $folder ]]; then
      printf -v "$1" %s "$folder"
    else
      searched=("$corpus" "$(dirname "$corpus")")
    fi
  fi
  if [[ ${!1} == none ]]; then
    without+=("augment.$3=0")
    printf -v "$1" ''
  fi
}

# Check devices, configurations and their noise once, before the first stage that has work. Sets
# `device`, and removes --noise and --rirs that no training uses.
check_run() {
  local name found trainings used=() missing=()
  device=unknown
  if [[ -n $corpus && $stage0_always == false && $stage == 0 && ! -d $corpus ]]; then
    die "--corpus: no such folder: $corpus"
  fi
  if ((stage <= 4 && stop_stage >= 4 && ${#settings[@]})) && [[ $large_margin == true ]]; then
    say "--set: ${settings[*]} also overrides conf/finetune/large_margin.yaml in stage 4"
  fi
  if [[ $dry_run == true ]]; then
    say 'device, configuration, noise and rooms: not checked in a dry run'
    return
  fi
  # A single rank that starts with its training checks the same by itself.
  if ((stage == 3 && nproc * nnodes == 1)) && [[ $large_margin == false ]]; then return; fi
  list_layers ${overlay:+"$overlay"}
  trainings=(--config "${layers[@]}")
  if [[ $large_margin == true ]]; then
    list_layers ${overlay:+"$overlay"} large_margin
    trainings+=(--config "${layers[@]}")
  fi
  for name in noise rirs; do
    if [[ -z ${!name} && $default_noise != corpus ]]; then missing+=("$name"); fi
  done
  if [[ -z $python ]]; then find_python; fi
  found=$(trap '' INT && "$python" "$recipe_dir/../common/check_run.py" "${trainings[@]}" --nproc "$nproc" \
    --set "data.dir=$data" "${without[@]}" "${settings[@]}" --stage "$stage" \
    --given "${given[@]}" --missing "${missing[@]}" --searched "${searched[@]}" ${init:+--init "$init"}) || exit 1
  eval "$found" # device and used
  say "device: $device"
  if ((stage > 1)); then return; fi
  for name in noise rirs; do
    if [[ " ${used[*]} " != *" $name "* ]]; then
      say "--$name: none"
      printf -v "$name" ''
    else
      say "--$name: ${!name:-made by stage 1}"
    fi
  done
}

report_failure() {
  local code=$? name where=${current:+stage $current: }
  if [[ $code == 0 ]]; then return; fi
  for name in "${stop_signals[@]}"; do
    if ((code == 128 + $(kill -l "$name"))); then
      printf '%sstopped by SIG%s; run the same command again to resume\n' "$where" "$name" >&2
      return
    fi
  done
  if [[ -n $where ]]; then printf '%sfailed with exit code %s\n' "$where" "$code" >&2; fi
}

main() {
  local options number base_layer name layers stored='' task_dir=$recipe_dir task_tag='' device='' init_name
  local given=() without=() searched=() treatments=()
  trap report_failure EXIT
  heed_sigint
  find_recent || die "env: Python 3.10 or newer is needed; install it"
  # Ctrl-C ends the shell after these: Python would print a traceback while it starts.
  options=$(trap '' INT && "$base" -I -S "$recipe_dir/../common/options.py" "$recipe_dir" "$@") || exit 1
  eval "$options"
  if [[ $task == ssl ]]; then # back ends that learn need speakers
    overlay=$method init_overlay='' backends=(cosine) development=false
  elif [[ $task != sv ]]; then
    task_dir=$recipe_dir/$task task_tag=_$task
  fi
  if [[ $task == lid ]]; then
    train_sets=(train) test_sets=(test) trials=() prepare_args=() overlay='' init_overlay='' durations=() codecs=()
    untrained=false development=false
  fi
  set_environment
  init_name=${init%/} init_name=${init_name%/model} init_name=${init_name##*[/:]}
  if [[ $init == hub:* && $dry_run == false ]]; then
    find_python
    init=$("$python" -m speakerlab import "$init") || exit 1
  fi
  base_layer=$root/conf/$model.yaml name=$model
  if [[ -n $init && -n $init_overlay ]]; then
    overlay=$init_overlay base_layer=$init/config.yaml name=$init_name
    [[ -f $base_layer || $dry_run == true ]] ||
      die "--init: not a model: there is no $base_layer; give an experiment or its folder model/"
  fi
  if ((${#durations[@]})); then treatments+=(--durations "${durations[@]}"); fi
  if ((${#codecs[@]})); then treatments+=(--codecs "${codecs[@]}"); fi
  data=${data:-$recipe_dir/data$task_tag}
  if [[ $task == diar ]]; then task_tag='' stage_names[5]=diarization; fi # exp is that of verification
  if [[ $task == diar && -n $init ]]; then exp=${exp:-$recipe_dir/exp/$init_name}; fi
  if [[ $features != wave ]]; then stored=_$features; fi
  exp=${exp:-$recipe_dir/exp/$name${overlay:+_$overlay}$task_tag${stored}_s$seed}
  data=${data%/} exp=${exp%/} corpus=${corpus%/}
  choose_source noise musan noise_prob
  choose_source rirs RIRS_NOISES room_prob
  for ((number = stage; number <= stop_stage; number++)); do run_stage "$number"; done
}

main "$@"

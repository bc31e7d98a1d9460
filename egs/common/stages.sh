# shellcheck shell=bash
# The stages of every recipe and their only option parser. Sourced by egs/<recipe>/run.sh.
# In: recipe_dir, its recipe.sh, the user's options. Out: data directories (stages 1, 2), the model
# (3), its fine-tuned sibling <exp>-lm (4), embeddings (5), scores and the report (6).

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf 'run.sh: needs bash 4.4 or newer, got %s; install one and start run.sh with it\n' \
    "$BASH_VERSION" >&2
  exit 1
fi
set -euo pipefail
recipe_dir=${recipe_dir:?is set by run.sh}

# shellcheck source=egs/common/env.sh
source "$recipe_dir/../common/env.sh"

# shellcheck source=egs/common/options.sh
source "$recipe_dir/../common/options.sh"

# What recipe.sh may set, beside the defaults of options.
train_sets=(train) test_sets=(test) trials=(test/trials) prepare_args=()
backends=(cosine)      # of stage 6, one row of results each: see docs/scoring.md
overlay=''             # conf/finetune/<overlay>.yaml, a layer of every training
init_overlay=''        # with --init: that model's configuration instead of conf/<model>.yaml, and this overlay
untrained=true         # stage 5 also extracts with the weights that training began with
development=false      # stage 5 also extracts from the first training set: what back ends learn from
stage0_always=false    # stage 0 has something to do although --corpus is given
allow_missing=0        # share of a set's audio that may be missing in stage 1 ...
allow_undecodable=0.01 # ... and broken in stage 2
# shellcheck source=egs/mini/recipe.sh
source "$recipe_dir/recipe.sh"

recipe=${recipe_dir##*/} # also named by usage
stage_names=(corpus 'data directories' 'audio decoded and packed' training 'large-margin fine-tuning'
  embeddings 'scores and report')
current=''        # the stage that runs
stopped=''        # the signal that a training was told to stop by
num_passed=0      # signals passed on
sample_rate=16000 # of all audio; --set frontend.sample_rate=8000 changes it
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

# run_stoppable ARGUMENT...: as run, for what saves when it is told to stop: signals (Slurm's is USR1)
# are passed on and waited for. While bash waits for a command in the foreground it heeds no signal,
# so this one is in the background.
run_stoppable() {
  local child='' code=0 name
  if [[ $dry_run == true ]]; then
    run "$@"
    return
  fi
  if [[ -z $python ]]; then find_python; fi
  for name in "${stop_signals[@]}"; do
    # shellcheck disable=SC2064 # the name of now
    trap "pass_on $name" "$name"
  done
  # What is in the background ignores Ctrl-C, unless told.
  (trap - INT QUIT && exec "$python" "$@") </dev/null &
  child=$!
  if [[ -n $stopped ]]; then pass_on "$stopped"; fi # came before there was a child
  wait_for "$child" || code=$?
  trap - "${stop_signals[@]}"
  if [[ $code == 0 && -n $stopped ]]; then code=$((128 + $(kill -l "$stopped"))); fi
  return "$code"
}

# A Ctrl-C has reached the child too, which takes a second one as an order to leave without saving.
pass_on() {
  stopped=$1 num_passed=$((num_passed + 1))
  if [[ -n $child ]]; then kill -s "${1/INT/TERM}" "$child" 2>/dev/null || true; fi
}

# wait_for PROCESS: return its exit code, however many signals cut the waiting short.
wait_for() {
  local before code
  while :; do
    before=$num_passed code=0
    wait "$1" || code=$?
    if ((num_passed == before)); then return "$code"; fi
  done
}

# give NAME VALUE: put a variable into the environment of the commands.
give() {
  export "$1=$2"
  if [[ $dry_run == true ]]; then printf 'export %s=%q\n' "$1" "$2"; fi
}

set_environment() {
  local num_cores
  export SPEAKERLAB_PARENT=$$
  give PYTHONPATH "$PYTHONPATH"
  give PYTHONSAFEPATH 1 # else a folder named speakerlab where the user stands would be imported
  if [[ -n $cuda_devices ]]; then give CUDA_VISIBLE_DEVICES "$cuda_devices"; fi
  if ((nproc > 1)) && [[ -z ${OMP_NUM_THREADS-} ]]; then
    num_cores=$(command nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    give OMP_NUM_THREADS $((num_cores > nproc ? num_cores / nproc : 1))
  fi
  # Threads that wait may spin but briefly: else they slow a training tenfold beside other processes.
  if [[ -z ${OMP_WAIT_POLICY-}${GOMP_SPINCOUNT-} ]]; then give GOMP_SPINCOUNT 2000; fi
  # A retried rendezvous would else find the store of the attempt before and hang (torch 2.11, 2.13).
  give TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1
}

# need PATH EARLIER_STAGE STAGE: refuse STAGE unless the earlier one has left PATH.
need() {
  if [[ $dry_run == true || -e $1 ]]; then return; fi
  die "stage $3: stage $2 has to be run first, got no $1; use --stage $2 with the same options"
}

# Options of stage 1 that a later stage is given must be those that stage 1 was run with.
check_recorded() {
  local name marker=$data/.stage1
  if [[ $dry_run == true || ! -s $marker ]]; then return; fi
  for name in corpus noise rirs; do
    if [[ -n ${!name} ]] && ! grep -qxF -- "$name=${!name}" "$marker"; then
      die "--$name: is not what stage 1 was run with, got ${!name}; use --stage 1 with it first"
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
      need "$exp/model" 3 5
      for system in "${systems[@]}"; do need "$system/model" 4 5; done
      ;;
    6)
      for system in "${systems[@]}"; do
        for set_name in "${test_sets[@]}"; do need "$system/embeddings/$set_name" 5 6; done
      done
      ;;
  esac
}

# unchanged STAGE INPUTS: whether the stage was finished with these inputs and its output is there.
unchanged() {
  local marker=$data/.stage$1 folder
  if [[ $dry_run == true || ! -f $marker || $(<"$marker") != "$2" ]]; then return 1; fi
  list_data_dirs
  for folder in "${data_dirs[@]}"; do
    if [[ ! -f $folder/utt2dur ]]; then return 1; fi
  done
  say "stage $1: done before with the same options, skipped (remove $marker to redo it)"
}

# finish STAGE INPUTS: leave the marker that `unchanged` looks for.
finish() {
  if [[ $dry_run == true ]]; then return; fi
  printf '%s\n' "$2" >"$data/.stage$1.new"
  mv -f "$data/.stage$1.new" "$data/.stage$1"
}

# digest FILE...: print one SHA-256 of the files that there are.
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
  if [[ -n $corpus && $stage0_always == false ]]; then
    [[ -d $corpus || $dry_run == true ]] || die "--corpus: no such folder, got $corpus; correct it"
    say "stage 0: nothing to do, the corpus is $corpus"
    if [[ -n $noise && ! -d $noise || -n $rirs && ! -d $rirs ]]; then prepare --download-noise; fi
  else
    prepare --download
  fi
}

# What stage 1 found too small to train on is one data directory: the first training set.
list_data_dirs() {
  local name
  data_dirs=()
  for name in "${train_sets[@]}" "${test_sets[@]}"; do data_dirs+=("$data/$name"); done
  if [[ -f $data/calibration_only ]]; then data_dirs=("${data_dirs[0]}"); fi
}

# Audio to augment with is checked too: what a recipe makes itself, or what the options name.
list_checked() {
  list_data_dirs
  checked=("${data_dirs[@]}")
  if [[ -n $noise || -d $data/noise ]]; then checked+=("$data/noise"); fi
  if [[ -n $rirs || -d $data/rirs ]]; then checked+=("$data/rirs"); fi
}

stage_1() {
  local inputs checked
  inputs=$(printf '%s\n' "corpus=$corpus" "noise=$noise" "rirs=$rirs" "allowed=$allow_missing" "rate=$sample_rate" &&
    digest "$recipe_dir"/{recipe.sh,*.py} "$recipe_dir/$task"/*.py "$recipe_dir/../common"/*.py)
  if unchanged 1 "$inputs"; then return; fi
  if [[ $dry_run == false ]]; then rm -f "$data"/.stage[12]; fi
  prepare
  list_checked
  run -m speakerlab check "${checked[@]}" --sample-rate "$sample_rate" \
    --allow-rejected "$allow_missing"
  finish 1 "$inputs"
}

# Training reads what is packed; everything else that has audio is decoded once.
stage_2() {
  local inputs checked folder packed=() others=() arguments=(--codec "$codec")
  list_checked
  for folder in "${checked[@]}"; do
    if is_training_set "$folder"; then packed+=("$folder"); else others+=("$folder"); fi
  done
  inputs=$(printf '%s\n' "allowed=$allow_undecodable" "rate=$sample_rate" "packed=$features $codec" &&
    if [[ $features == fbank ]]; then describe_features; fi &&
    for folder in "${checked[@]}"; do digest "$folder"/{wav.scp,segments,utt2spk,trials*}; done)
  if all_packed "${packed[@]}" && unchanged 2 "$inputs"; then return; fi
  if [[ $dry_run == false ]]; then rm -f "$data/.stage2"; fi
  if ((${#others[@]})) && [[ -z $job || $job == 1/* ]]; then
    run -m speakerlab check "${others[@]}" --decode --sample-rate "$sample_rate" \
      --allow-rejected "$allow_undecodable"
  fi
  if [[ $features == fbank ]]; then
    list_layers ${overlay:+"$overlay"}
    arguments=(--features fbank --config "${layers[@]}" --set "data.dir=$data" "${settings[@]}")
  fi
  run -m speakerlab pack "${packed[@]}" "${arguments[@]}" --sample-rate "$sample_rate" \
    --allow-rejected "$allow_undecodable" ${job:+--job "$job"}
  if [[ -z $job ]]; then finish 2 "$inputs"; fi
}

# describe_features: print what stored features follow from. The machine is not in it.
describe_features() {
  local hardware=auto layers
  list_layers ${overlay:+"$overlay"}
  printf '%s\n' "model=$model" "${settings[@]}"
  digest "${layers[@]}"
}

# all_packed DIR...: whether each has its shards, or its features.
all_packed() {
  local folder kind=shards
  if [[ $features == fbank ]]; then kind=features; fi
  for folder in "$@"; do
    if [[ ! -f $folder/$kind/index.safetensors ]]; then return 1; fi
  done
}

# is_training_set DIR: whether it is the data directory of a training set.
is_training_set() {
  local name
  for name in "${train_sets[@]}"; do
    if [[ $1 == "$data/$name" ]]; then return; fi
  done
  return 1
}

stage_3() {
  if [[ ! -f $data/calibration_only ]]; then
    train "$exp" "$init" ${overlay:+"$overlay"}
  elif [[ -z $init ]]; then
    die "stage 3: $(<"$data/calibration_only"); give a trained model by --init, or more recordings"
  else
    say "stage 3: $(<"$data/calibration_only")"
    run -m speakerlab calibrate --model "$init" --data "${data_dirs[0]}" --out "$exp"
  fi
}

stage_4() {
  if [[ $fine_tuned == false ]]; then
    say 'stage 4: left out; use --large-margin true or --stage 4'
  else
    if ((${#settings[@]})); then
      say "stage 4: --set ${settings[*]} holds here too, over conf/finetune/large_margin.yaml"
    fi
    train "$exp-lm" "$exp/model" ${overlay:+"$overlay"} large_margin
  fi
}

# train EXPERIMENT INIT OVERLAY...: one training, in as many processes as there are ranks. What did
# not fit the memory (exit code 5) is begun once more with a smaller micro-batch.
train() {
  local options values code=0 too_large
  list_layers "${@:3}"
  options=(--exp "$1" --config "${layers[@]}")
  if [[ -n $2 ]]; then options+=(--init "$2"); fi
  values=(--set "data.dir=$data" "seed=$seed" "${settings[@]}")
  start_training 1 "${options[@]}" "${values[@]}" || code=$?
  if [[ $code == 5 && -z $stopped && -s $1/out_of_memory ]]; then
    too_large=$(<"$1/out_of_memory") code=0
    say "stage $current: a micro-batch of $too_large did not fit the memory; once more with a smaller one"
    start_training 2 "${options[@]}" --below-micro-batch "$too_large" "${values[@]}" || code=$?
    if [[ $code == 5 ]]; then
      say "stage $current: out of memory again, got micro-batches of $(<"$1/out_of_memory"); use a" \
        'shorter data.crop_seconds, a smaller model or a lower runtime.precision' >&2
    fi
  fi
  return "$code"
}

# start_training ATTEMPT OPTION...: ATTEMPT is 1, or 2 after one that ran out of memory.
start_training() {
  if ((nproc * nnodes == 1)); then
    run_stoppable -m speakerlab train "${@:2}"
  else
    list_launch_options "$1"
    run_stoppable -m speakerlab.bin.launch "${launch[@]}" -m speakerlab.bin.train "${@:2}"
  fi
}

# list_layers OVERLAY...: the configuration, file by file.
list_layers() {
  local name
  layers=("$base_layer" "$task_dir/conf.yaml")
  if [[ $base_layer == "$root/conf/$model.yaml" ]]; then add_own_layer "$model"; fi
  for name in "$@"; do
    layers+=("$root/conf/finetune/$name.yaml")
    add_own_layer "$name"
    add_own_layer "${model}_$name"
  done
  if [[ $features == fbank ]]; then layers+=("$root/conf/features/fbank.yaml"); fi
  if [[ $hardware != auto ]]; then layers+=("$root/conf/hardware/$hardware.yaml"); fi
}

# add_own_layer NAME: what the recipe has of its own for a model or an overlay, if it has.
add_own_layer() {
  if [[ -f $task_dir/conf/$1.yaml ]]; then layers+=("$task_dir/conf/$1.yaml"); fi
}

# list_launch_options ATTEMPT: a dead rank ends the run (no restarts): the same command again goes on
# from the checkpoint.
list_launch_options() {
  launch=(--nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts 0)
  if ((nnodes == 1)); then
    launch+=(--standalone) # a port that the system picks: runs side by side do not meet
  else
    # Rank 0 must be told that it is the host: its name may resolve to 127.0.0.1.
    launch+=(--node-rank "$node_rank" --rdzv-backend c10d --rdzv-endpoint "$rdzv"
      --rdzv-id "speakerlab-$1"
      --rdzv-conf "is_host=$((node_rank == 0)),timeout=300,read_timeout=600,join_timeout=600")
    if ((node_rank == 0)); then launch+=(--local-addr "${rdzv%:*}"); fi
    if (($1 > 1 && node_rank > 0)); then sleep 5; fi # the meeting point of the attempt before closes
  fi
}

stage_5() {
  local system set_name
  for system in "${systems[@]}"; do
    for set_name in "${test_sets[@]}"; do
      extract "$system" "$data/$set_name"
      if [[ $untrained == true ]]; then extract "$system" "$data/$set_name" --untrained; fi
    done
    if [[ $development == true ]]; then
      extract "$system" "$data/${train_sets[0]}" --per-speaker 10
    fi
  done
}

# extract SYSTEM DATA_DIR OPTION...: one table of embeddings. Several hosts are a job each; the first,
# which goes on to stage 6, waits for the others.
extract() {
  local share=$job waiting=()
  if ((nnodes > 1)); then
    share=$((node_rank + 1))/$nnodes
    if ((node_rank == 0)); then waiting=(--wait-minutes "$wait_minutes"); fi
  fi
  run -m speakerlab extract --exp "$1" --data "$2" "${@:3}" --nproc "$nproc" \
    ${share:+--job "$share"} "${waiting[@]}"
}

stage_6() {
  local system pattern file lists=() learned_from=()
  if [[ $task != sv ]]; then
    name_classes
    return
  fi
  if [[ $development == true ]]; then learned_from=(--development "$data/${train_sets[0]}"); fi
  for pattern in "${trials[@]}"; do
    for file in "$data"/$pattern; do lists+=("$file"); done
  done
  for system in "${systems[@]}"; do
    run -m speakerlab score --exp "$system" --trials "${lists[@]}" --backend "${backends[@]}" \
      "${learned_from[@]}"
  done
}

# name_classes: stage 6 of an identification, which has classes in the place of trials.
name_classes() {
  local system
  for system in "${systems[@]}"; do
    run -m speakerlab classify --exp "$system" --data "${test_sets[@]/#/$data/}"
  done
}

# choose_task: what differs in another task than speaker verification, before the user's folders.
choose_task() {
  task_dir=$recipe_dir task_tag=''
  if [[ $task != sv ]]; then
    task_dir=$recipe_dir/$task task_tag=_$task
    train_sets=(train) test_sets=(test) trials=() prepare_args=() overlay='' init_overlay=''
    untrained=false development=false
  fi
}

# The systems that stages 5 and 6 are about: the model, and its fine-tuned sibling where there is one.
list_systems() {
  systems=("$exp")
  if [[ $fine_tuned == true || -e $exp-lm/model ]]; then systems+=("$exp-lm"); fi
}

run_stage() {
  local began=$SECONDS
  list_systems
  list_data_dirs
  if ((nnodes > 1 && node_rank > 0)) && [[ $1 != [345] ]]; then
    say "stage $1: left to node rank 0"
    return
  fi
  if (($1 > 3)) && [[ -f $data/calibration_only ]]; then
    say "stage $1: left out, $(<"$data/calibration_only")"
    return
  fi
  if [[ $1 != 4 || $fine_tuned == true ]]; then check_order "$1"; fi
  current=$1
  say "stage $1: ${stage_names[$1]}"
  "stage_$1"
  current=''
  if [[ $dry_run == false ]]; then say "stage $1: took $((SECONDS - began)) s"; fi
}

report_failure() {
  local code=$? name
  if [[ -z $current || $code == 0 ]]; then return; fi
  for name in "${stop_signals[@]}"; do
    if ((code == 128 + $(kill -l "$name"))); then
      printf 'stage %s: stopped by SIG%s; run the same command again to go on\n' "$current" "$name" >&2
      return
    fi
  done
  printf 'stage %s: failed with exit code %s\n' "$current" "$code" >&2
}

main() {
  local number name fine_tuned data_dirs=() systems cuda_devices launch base_layer layers stored=''
  local task_dir task_tag
  parse_options "$@"
  check_options
  check_machines
  choose_task
  for name in corpus noise rirs init data exp; do # a recorded path must mean the same from anywhere
    if [[ -n ${!name} && ${!name} != /* ]]; then printf -v "$name" '%s' "$PWD/${!name}"; fi
  done
  base_layer=$root/conf/$model.yaml
  if [[ -n $init && -n $init_overlay ]]; then
    overlay=$init_overlay base_layer=$init/config.yaml
    [[ -f $base_layer || $dry_run == true ]] ||
      die "--init: is no model, got no $base_layer; give an experiment or its model/"
  fi
  data=${data:-$recipe_dir/data$task_tag}
  if [[ $features != wave ]]; then stored=$features; fi
  exp=${exp:-$recipe_dir/exp/$model${overlay:+_$overlay}$task_tag${stored:+_$stored}_s$seed}
  data=${data%/} exp=${exp%/}
  fine_tuned=$large_margin
  for name in "${settings[@]}"; do
    if [[ $name == frontend.sample_rate=* ]]; then sample_rate=${name#*=}; fi
  done
  if [[ $stage == 4 || $stop_stage == 4 ]]; then fine_tuned=true; fi
  trap report_failure EXIT
  set_environment
  for ((number = stage; number <= stop_stage; number++)); do run_stage "$number"; done
}

main "$@"

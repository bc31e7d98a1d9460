# shellcheck shell=bash disable=SC2034,SC2064,SC2154 # the recipes read what is set here, and set the rest
# Shared by egs/<recipe>/run*.sh, which set `recipe`, their folder: options, Python, running a command.
set -euo pipefail
root=$(CDPATH='' cd -- "$recipe/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
rate=16000 python='' current='' child='' stopped='' # sample rate; interpreter; what runs; signal
# Options of every recipe, beside those in its run.sh: name=default # KIND: what it is
stage=0         # 0-6: first stage
stop_stage=6    # 0-6: last stage
dry_run=false   # true|false: print the commands; runs and checks nothing, not even settings of --set
gpus=auto       # NUMBERS: "0 1 2 3", a rank on each; "" for the CPU; auto: the first GPU, if any
nproc=          # 1-1024: ranks on this host (default: one for each of --gpus)
nnodes=         # 1-4096: hosts; run the same command on each, with its own --node-rank (default: 1)
node_rank=      # 0-4095: number of this host, from 0
rdzv=           # HOST:PORT: address of node rank 0
max_restarts=   # 0-1000: restarts of stages 3 and 4 after losing a rank or a host (default: 0)
wait_minutes=10 # 0-100000: stage 5 on node rank 0 fails if other hosts finish nothing for so long
job=            # I/N: run part I of N of stage 2 or 5; the jobs may run on any hosts
torch=auto      # auto|cpu: PyTorch of a new environment; cpu: without CUDA, 1 GB instead of 5
plugins=        # DIR: modules of parts that --set names module:Class
die() { printf '%s\n' "$*" >&2 || true && exit 1; }
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die "run.sh: needs bash 4.4 or newer, not $BASH_VERSION"
find_python() { [[ -n $python ]] || python=$(python3 "$root/egs/common/environment.py" run --torch "$torch") || exit 1; }
say() { printf '%s%s\n' "$([[ $dry_run == false ]] || echo '# ')" "$*"; } # a comment in a dry run

parse_options() { # FILE OPTION...: set the options that are declared above and in FILE
  local file=$1 lines option name kind
  lines=$(grep -hE '^[a-z_]+=.* # [^ ]+: ' "$1" "${BASH_SOURCE[0]}")
  while shift && (($#)); do
    option=${1%%=*} name=${1#--} name=${name%%=*} name=${name//-/_} kind=''
    if [[ $option == --help ]]; then
      sed -nE '/^# Read whole/q; 2,$s/^# ?//p' "$file" && sed -E ':a; s/^([a-z-]*)_/\1-/; ta; s/^/  --/' <<<"$lines"
      exit # with the code of sed, which a closed pipe ends
    fi
    if [[ $option =~ ^--[a-z-]+$ ]]; then kind=$(sed -nE "s/^$name=.* # ([^ ]+): .*/\1/p" <<<"$lines"); fi
    if [[ -z $kind ]]; then
      die "${0##*/}: unknown option $option; $(nearest "$option" <<<"$lines")"
    elif [[ $1 == *=* ]]; then
      set -- "$option" "${1#*=}" "${@:2}"
    elif [[ $kind == 'true|false' && ($# == 1 || $2 == --[a-z]*) ]]; then
      set -- "$option" true "${@:2}"
    elif [[ $# == 1 || $2 == --[a-z]* ]]; then
      die "$option: needs a value, $kind; see --help"
    fi
    set_option "$option" "$name" "$kind" "$2"
    shift
    while [[ $kind == KEY=VALUE && $# -gt 1 && $2 != --[a-z]* ]]; do # which has several values
      set_option "$option" "$name" "$kind" "$2"
      shift
    done
  done
  check_options
}

nearest() { # OPTION <DECLARATIONS: print a hint, the declared option that is most similar
  python3 -ISc 'import difflib, sys
word, known = sys.argv[1].lstrip("-"), [line.split("=")[0].replace("_", "-") for line in sys.stdin]
found = word and [k for k in known if k.startswith(word)] or difflib.get_close_matches(word, known, 1)
print(f"did you mean --{found[0]}?" if found else "see --help")' "${1,,}"
}

set_option() { # OPTION NAME KIND VALUE: check a value of this kind, and set the variable
  local kind=$3 value=$4 pattern='.+'
  case $kind in
    *DIR* | *MODEL*) # absolute, because a path that is recorded must mean the same from any folder
      if [[ $value == *[[:cntrl:]]* ]] || ! iconv -f UTF-8 -t UTF-8 <<<"$value" &>/dev/null; then
        die "$1: must be one line of UTF-8, not $(printf %q "$value"); rename it"
      fi
      if [[ "|$kind|" != *"|$value|"* && $value != @(|hub:*|hf:*) ]]; then value=$(realpath -sm -- "$value"); fi
      ;;
    [a-z]* | *'|'*) pattern=$kind ;; # choices
    [0-9]*-[0-9]*) pattern='0|[1-9][0-9]{0,9}' ;;
    KEY=VALUE) pattern='[^=]+=.+' ;;
    NUMBERS) pattern='.*' ;;
  esac
  if [[ ! $value =~ ^($pattern)$ ]] ||
    [[ $kind == [0-9]*-[0-9]* && ($value -lt ${kind%-*} || $value -gt ${kind#*-}) ]]; then
    die "$1: must be $kind, not '$value'; see --help"
  elif [[ $kind == KEY=VALUE && $value == @(seed|data.dir)=* ]]; then
    die "--set $value: would only change training; use --${value%%[.=]*} ${value#*=}"
  fi
  if [[ $value == frontend.sample_rate=* ]]; then rate=${value#*=}; fi
  if [[ $kind == KEY=VALUE ]]; then set+=("$value"); else printf -v "$2" %s "$value"; fi
}

check_options() { # set `ranks`, the options of train, `processes`, of extract, and `devices`, of others
  if [[ ${task-} != ssl && -n ${method-} ]]; then die "--method $method: only with --task ssl; leave it out"; fi
  if ((stop_stage < stage)); then die "--stop-stage: $stop_stage is before --stage $stage"; fi
  if ((stage == 4 || stop_stage == 4)) && [[ ${large_margin:=true} == false ]]; then die '--large-margin false: not with stage 4'; fi
  if [[ ${task-} == @(ssl|distil) && $large_margin == true ]]; then die "--large-margin, --stage 4: not with --task $task"; fi
  if [[ -n $job && ($stage != "$stop_stage" || $stage != [25] || $nnodes -gt 1) ]]; then
    die "--job $job: needs exactly stage 2 or 5 of one host; add --stage 2 --stop-stage 2"
  fi
  if [[ ${hardware:=auto} == cpu && $gpus == auto ]]; then gpus=''; fi
  if [[ $hardware != auto && ! -f $hardware ]]; then hardware=hardware/$hardware; fi
  devices=(--gpus "$gpus" ${plugins:+--plugins "$plugins"}) ranks=("${devices[@]}" ${nproc:+--nproc "$nproc"})
  processes=("${ranks[@]}" ${job:+--job "$job"})
  if [[ -n $plugins ]]; then export SPEAKERLAB_PLUGINS=$plugins; fi # for the commands without options of parts
  if ((nnodes > 1)) && [[ -z $node_rank ]]; then die '--node-rank: missing; number the hosts from 0'; fi
  if ((nnodes > 1)); then processes+=(--job "$((node_rank + 1))/$nnodes"); fi
  if ((nnodes > 1)) && [[ $node_rank == 0 ]]; then processes+=(--wait-minutes "$wait_minutes"); fi
  ranks+=(${nnodes:+--nnodes "$nnodes"} ${node_rank:+--node-rank "$node_rank"} ${rdzv:+--rdzv "$rdzv"} ${max_restarts:+--max-restarts "$max_restarts"} ${teacher:+--teacher "$teacher"})
}

check_training() { # LAYER...: check the training before hours of work; set `banks`, noise and rooms to check
  local needs='' place
  for place in corpus noise rirs; do # a later stage must not mean other data than stage 1
    [[ $stage -lt 2 || ${!place} != /* || ! -f $data/.prepared ]] || grep -qxF "$place=${!place}" "$data/.prepared" ||
      die "--$place: stage 1 was run with another value than ${!place}; run --stage 1 with it first"
  done
  if [[ $dry_run == false && ($stage -lt 3 || ($stage == 3 && ${large_margin-} == true)) ]]; then
    find_python
    needs=$(run speakerlab train --check --exp "$exp" --config "$@" ${init:+--init "$init"} \
      "${ranks[@]}" --set "${settings[@]}") || exit 1
    say "${needs%%$'\n'*}"
  fi
  banks=()
  for place in noise rirs; do
    if [[ $needs == *"$place: used"* && ${!place} == none ]]; then die "--$place none: not with this --set; leave out one"; fi
    if [[ $needs == *"$place: not used"* && ${!place} == /* ]]; then die "--$place: not used in training; leave it out"; fi
    if [[ $needs == *"$place: not used"* ]]; then printf -v "$place" none; fi
    if [[ ${!place} != none ]]; then banks+=("$data/$place"); fi
  done
}

stage() { # NUMBER TITLE: begin a stage; false if it is not to run, here
  if (($1 < stage || $1 > stop_stage)); then return 1; else current=$1; fi
  if [[ ${node_rank:-0} == 0 || $1 == [345] ]]; then say "stage $1: $2" || true; else say "stage $1: runs on node rank 0 only" && false; fi
}

run() { # COMMAND...: run it, where speakerlab and python are those of the environment, or print it
  local code is_interrupted
  if [[ $dry_run == true ]]; then printf '%s\n' "$1$(printf ' %q' "${@:2}")" || true && return; fi
  find_python
  export SPEAKERLAB_PARENT=$BASHPID # the command ends with this shell
  if [[ $1 == speakerlab ]]; then set -- python -m "$@"; fi
  if [[ $1 == python ]]; then set -- "$python" "${@:2}"; fi
  # In the background, where it would ignore Ctrl-C, because bash heeds signals only in `wait`.
  (trap - INT QUIT && exec "$@") </dev/null &
  child=$! is_interrupted=true
  while [[ $is_interrupted == true ]]; do
    is_interrupted=false code=0
    wait "$child" || code=$?
  done && child=''
  if [[ -n $stopped && $code == @(0|143) ]]; then code=$((128 + $(kill -l "$stopped"))); fi
  return "$code"
}

pass_on() { # SIGNAL: let the running command save and end
  # A Ctrl-C has reached it already. A second SIGINT would end it without saving: it gets a SIGTERM.
  stopped=$1 is_interrupted=true
  if [[ -z $child ]]; then exit $((128 + $(kill -l "$1"))); fi
  kill -s "${1/INT/TERM}" "$child" || true
}
report_end() {
  local code=$? end="failed with exit code $?"
  if [[ $code == @(129|130|138|143) ]]; then end="stopped by SIG$(kill -l "$code"); run the same command again to resume"; fi
  if ((code)) && [[ -n $current$stopped ]]; then echo "${current:+stage $current: }$end" >&2; fi
}
trap report_end EXIT && for signal in TERM INT HUP USR1; do trap "pass_on $signal" "$signal"; done

# shellcheck shell=bash disable=SC2034,SC2064,SC2154 # the recipes read what is set here, and set the rest
# Shared by egs/<recipe>/run*.sh, which set `recipe` to their folder: options, Python, running a command.
set -euo pipefail
root=$(CDPATH='' cd -- "$recipe/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

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
plugins=        # DIR: folder of your own parts, which --set names module:Class

rate=16000 # sample rate of all audio; --set frontend.sample_rate changes it
inputs=()  # paths of options that must exist, as OPTION=PATH
python=''  # the interpreter, once it is known
current='' # number of the stage that runs
child=''   # process of the command that runs
stopped='' # signal that has arrived

die() { # MESSAGE: end with an error
  printf '%s\n' "$*" >&2 || true
  exit 1
}

say() { # MESSAGE: print it, in a dry run as a comment between the commands
  if [[ $dry_run == false ]]; then
    printf '%s\n' "$*"
  else
    printf '# %s\n' "$*"
  fi
}

find_python() { # set `python`; in an environment without the packages, make .venv
  if [[ -z $python ]]; then
    python=$(python3 "$root/egs/common/environment.py" run --torch "$torch") || exit 1
  fi
}

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  die "run.sh: needs bash 4.4 or newer, not $BASH_VERSION"
fi

# Options

parse_options() { # FILE OPTION...: set the options that are declared above and in FILE
  local file=$1 lines option name kind
  shift
  lines=$(grep -hE '^[a-z_]+=.* # [^ ]+: ' "$file" "${BASH_SOURCE[0]}")
  while (($#)); do
    option=${1%%=*}
    name=${option#--}
    name=${name//-/_}
    kind=''
    if [[ $option == --help ]]; then
      print_help "$file" "$lines"
      exit # with the code of what prints, which a closed pipe ends
    fi
    if [[ $option =~ ^--[a-z-]+$ ]]; then
      kind=$(sed -nE "s/^$name=.* # ([^ ]+): .*/\1/p" <<<"$lines")
    fi
    if [[ -z $kind ]]; then
      die "${0##*/}: unknown option $option; $(nearest "$option" <<<"$lines")"
    fi

    # Make it --OPTION VALUE, whether it was --OPTION=VALUE or a --OPTION that needs no value.
    if [[ $1 == *=* ]]; then
      set -- "$option" "${1#*=}" "${@:2}"
    elif [[ $# == 1 || $2 == --[a-z]* ]]; then
      if [[ $kind != 'true|false' ]]; then
        die "$option: needs a value, $kind; see --help"
      fi
      set -- "$option" true "${@:2}"
    fi
    set_option "$option" "$name" "$kind" "$2"
    shift 2
    # --set takes several values.
    while [[ $kind == KEY=VALUE && $# -gt 0 && $1 != --[a-z]* ]]; do
      set_option "$option" "$name" "$kind" "$1"
      shift
    done
  done
  check_options
}

print_help() { # FILE DECLARATIONS: print the comment at the top of FILE, and the options
  sed -nE '/^# Read whole/q; 2,$s/^# ?//p' "$1" &&
    sed -E ':a; s/^([a-z-]*)_/\1-/; ta; s/^/  --/' <<<"$2" &&
    echo 'MODEL: an experiment, a model folder, hub:NAME or hf:owner/name'
}

nearest() { # OPTION <DECLARATIONS: print a hint, the declared option that is most similar
  python3 -ISc 'import difflib, sys
word = sys.argv[1].lstrip("-")
names = [line.split("=")[0].replace("_", "-") for line in sys.stdin]
similar = [name for name in names if word and name.startswith(word)]
similar = similar or difflib.get_close_matches(word, names, 1)
print(f"did you mean --{similar[0]}?" if similar else "see --help")' "${1,,}"
}

set_option() { # OPTION NAME KIND VALUE: check a value of this kind, and set the variable
  local kind=$3 value=$4 pattern='.+'
  case $kind in
    *DIR* | *DATA* | *MODEL*)
      if [[ $value == *[[:cntrl:]]* ]] || ! iconv -f UTF-8 -t UTF-8 <<<"$value" &>/dev/null; then
        die "$1: must be one line of UTF-8, not $(printf %q "$value"); rename it"
      fi
      # Absolute, because a path that is recorded must mean the same from any folder. In a kind such
      # as DIR|none, the words in lower case are no paths.
      if [[ "|$kind|" != *"|$value|"* && $value != @(|hub:*|hf:*) ]]; then
        value=$(realpath -sm -- "$value")
      fi
      if [[ $kind == MODEL && $value == /* ]]; then inputs+=("$1=$value"); fi
      if [[ $kind == DATA && -n $value ]]; then inputs+=("$1=$value/wav.scp"); fi
      ;;
    [a-z]* | *'|'*) pattern=$kind ;; # choices
    [0-9]*-[0-9]*) pattern='0|[1-9][0-9]{0,9}' ;;
    KEY=VALUE) pattern='[^=]+=.+' ;;
    NUMBERS) pattern='.*' ;;
  esac
  if [[ ! $value =~ ^($pattern)$ ]]; then
    die "$1: must be $kind, not '$value'; see --help"
  fi
  if [[ $kind == [0-9]*-[0-9]* && ($value -lt ${kind%-*} || $value -gt ${kind#*-}) ]]; then
    die "$1: must be $kind, not '$value'; see --help"
  fi

  if [[ $kind != KEY=VALUE ]]; then
    printf -v "$2" %s "$value"
    return
  fi
  case $value in
    seed=* | data.dir=*)
      die "--set $value: would only change training; use --${value%%[.=]*} ${value#*=}"
      ;;
    frontend.sample_rate=*) rate=${value#*=} ;;
  esac
  set+=("$value")
}

check_options() { # refuse what does not fit together; set the options of the commands
  local input
  # Before stage 0, because a later stage needs these paths only after hours.
  if [[ $dry_run == false ]]; then
    for input in "${inputs[@]}"; do
      if [[ ! -e ${input#*=} ]]; then
        die "${input%%=*}: ${input#*=} does not exist; correct the path"
      fi
    done
  fi
  if [[ ${task-} != ssl && -n ${method-} ]]; then
    die "--method $method: only with --task ssl; leave it out"
  fi
  if ((stop_stage < stage)); then
    die "--stop-stage: $stop_stage is before --stage $stage"
  fi
  if ((stage == 4 || stop_stage == 4)); then
    if [[ ${large_margin:=true} == false ]]; then
      die '--large-margin false: not with stage 4'
    fi
  fi
  if [[ ${task-} == @(ssl|distil) && $large_margin == true ]]; then
    die "--large-margin, --stage 4: not with --task $task"
  fi
  if [[ -n $job && ($stage != "$stop_stage" || $stage != [25] || $nnodes -gt 1) ]]; then
    die "--job $job: needs exactly stage 2 or 5 of one host; add --stage 2 --stop-stage 2"
  fi
  if ((nnodes > 1)) && [[ -z $node_rank ]]; then
    die '--node-rank: missing; number the hosts from 0'
  fi

  if [[ ${hardware:=auto} == cpu && $gpus == auto ]]; then gpus=''; fi
  if [[ $hardware != auto && ! -f $hardware ]]; then hardware=hardware/$hardware; fi
  # For the commands without an option for it.
  if [[ -n $plugins ]]; then export SPEAKERLAB_PLUGINS=$plugins; fi

  devices=(--gpus "$gpus" ${plugins:+--plugins "$plugins"}) # of score and others
  ranks=("${devices[@]}" ${nproc:+--nproc "$nproc"})        # of train
  processes=("${ranks[@]}" ${job:+--job "$job"})            # of extract
  if ((nnodes > 1)); then
    processes+=(--job "$((node_rank + 1))/$nnodes")
    if ((node_rank == 0)); then processes+=(--wait-minutes "$wait_minutes"); fi
  fi
  ranks+=(
    ${nnodes:+--nnodes "$nnodes"}
    ${node_rank:+--node-rank "$node_rank"}
    ${rdzv:+--rdzv "$rdzv"}
    ${max_restarts:+--max-restarts "$max_restarts"}
    ${teacher:+--teacher "$teacher"}
  )
}

check_training() { # LAYER...: check the training before hours of work; set `banks`, noise and rooms to check
  local needs='' place
  # A later stage must not mean other data than stage 1.
  if [[ $stage -ge 2 && -f $data/.prepared ]]; then
    for place in corpus noise rirs; do
      if [[ ${!place} == /* ]] && ! grep -qxF "$place=${!place}" "$data/.prepared"; then
        die "--$place: stage 1 was run with another value than ${!place}; run --stage 1 with it first"
      fi
    done
  fi

  if [[ $dry_run == false && ($stage -lt 3 || ($stage == 3 && ${large_margin-} == true)) ]]; then
    find_python
    needs=$(run speakerlab train --check --exp "$exp" --config "$@" ${init:+--init "$init"} \
      "${ranks[@]}" --set "${settings[@]}") || exit 1
    say "${needs%%$'\n'*}"
  fi

  banks=()
  for place in noise rirs; do
    if [[ $needs == *"$place: used"* && ${!place} == none ]]; then
      die "--$place none: not with this --set; leave out one"
    fi
    if [[ $needs == *"$place: not used"* ]]; then
      if [[ ${!place} == /* ]]; then
        die "--$place: not used in training; leave it out"
      fi
      printf -v "$place" none
    fi
    if [[ ${!place} != none ]]; then banks+=("$data/$place"); fi
    if [[ $dry_run == false && $stage == 2 && ${!place} != @(|none) && ! -f $data/$place/wav.scp ]]; then
      die "--$place ${!place}: stage 1 has prepared none in $data; run --stage 1 first, or use --$place none"
    fi
  done
}

# Stages

stage() { # NUMBER TITLE: begin a stage; false if it is not to run, here
  if (($1 < stage || $1 > stop_stage)); then return 1; fi
  current=$1
  # Training and extraction are divided between hosts.
  if [[ ${node_rank:-0} != 0 && $1 != [345] ]]; then
    say "stage $1: runs on node rank 0 only"
    return 1
  fi
  say "stage $1: $2" || true
}

run() { # COMMAND...: run it, where speakerlab and python are those of the environment, or print it
  local code
  if [[ $dry_run == true ]]; then
    printf '%s\n' "$1$(printf ' %q' "${@:2}")" || true
    return
  fi
  find_python
  export SPEAKERLAB_PARENT=$BASHPID # the command ends with this shell
  if [[ $1 == speakerlab ]]; then set -- python -m "$@"; fi
  if [[ $1 == python ]]; then set -- "$python" "${@:2}"; fi
  # In the background, where it would ignore Ctrl-C, because bash heeds signals only in `wait`.
  (trap - INT QUIT && exec "$@") </dev/null &
  child=$!
  is_interrupted=true
  while [[ $is_interrupted == true ]]; do
    is_interrupted=false # `pass_on` sets it, and `wait` ends
    code=0
    wait "$child" || code=$?
  done
  child=''
  if [[ -n $stopped && $code == @(0|143) ]]; then
    code=$((128 + $(kill -l "$stopped")))
  fi
  return "$code"
}

pass_on() { # SIGNAL: let the running command save and end
  stopped=$1
  is_interrupted=true
  if [[ -z $child ]]; then
    exit $((128 + $(kill -l "$1")))
  fi
  # A Ctrl-C has reached it already. A second SIGINT would end it without saving: it gets a SIGTERM.
  kill -s "${1/INT/TERM}" "$child" || true
}

report_end() {
  local code=$? end
  if ((code == 0)) || [[ -z $current$stopped ]]; then return; fi
  end="failed with exit code $code"
  if [[ $code == @(129|130|138|143) ]]; then
    end="stopped by SIG$(kill -l "$code"); run the same command again to resume"
  fi
  echo "${current:+stage $current: }$end" >&2
}

trap report_end EXIT
for signal in TERM INT HUP USR1; do
  trap "pass_on $signal" "$signal"
done

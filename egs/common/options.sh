# shellcheck shell=bash disable=SC2034,SC2154 # shares its variables with stages.sh
# The only option parser. Sourced by stages.sh, before recipe.sh and the user have their say.
# In: the user's options. Out: one variable for each, "-" turned into "_"; the values of --set in the
# array `settings`. Whatever is wrong with them ends the run in one line.

stage=0 stop_stage=6 model=campplus hardware=auto gpus='' nproc='' corpus='' noise='' rirs=''
data='' exp='' seed=0 init='' large_margin=false features=wave codec=pcm job='' task=sv
nnodes=1 node_rank='' rdzv='' wait_minutes=10 settings=() dry_run=false
option_names=(stage stop-stage model hardware gpus nproc corpus data exp seed init large-margin
  features codec job task nnodes node-rank rdzv wait-minutes noise rirs set dry-run help)

usage() {
  cat <<END
Usage: bash egs/$recipe/run.sh [options]

Stages: 0 get the corpus, 1 prepare and check data directories, 2 decode and pack all audio,
        3 train, 4 large-margin fine-tuning, 5 extract embeddings, 6 score and report
  --stage N, --stop-stage N    first and last stage (0, 6); a training that was cut off goes on
  --dry-run                    print every command, whatever was done before, and run none

What is trained
  --model NAME                 one of conf/*.yaml ($model)
  --seed N                     initial weights and everything drawn ($seed)
  --init MODEL                 start from a published model
  --large-margin true|false    whether stage 4 runs without being asked for by number ($large_margin)
  --set section.key=value ...  change the configuration, after all files
  --features wave|fbank        what stage 2 packs: audio, augmented and turned into features while
                               training, or stored features, which are never augmented ($features)
  --task sv|lid                speaker verification, or language identification where the recipe
                               has a folder lid/ ($task)

Where things are
  --corpus DIR                 the audio, if it is here already
  --noise DIR, --rirs DIR      recordings of noise and room impulse responses, to augment with
  --data DIR                   data directories (egs/$recipe/data; another task's: data_<task>)
  --codec pcm|flac             how stage 2 packs audio; flac takes two thirds of the room ($codec)
  --exp DIR                    the experiment (egs/$recipe/exp/<model>_s<seed>); stage 4: <DIR>-lm

What it runs on
  --hardware auto|NAME         one of conf/hardware/*.yaml, or measured ($hardware)
  --gpus "0 1 2 3"             GPUs of this host
  --nproc N                    ranks on this host (one per GPU listed, else 1)
  --job I/N                    stage 2, or stage 5, as one of N jobs at a time, on any hosts that
                               see --data and --exp
  --nnodes N --node-rank I --rdzv HOST:PORT
                               several hosts: the same command on each, HOST being that of rank 0;
                               export GLOO_SOCKET_IFNAME where a host has several networks
  --wait-minutes M             stage 5 of rank 0 gives up when for so long no other host has
                               finished a piece ($wait_minutes)
END
}

parse_options() {
  local name value
  while (($#)); do
    case $1 in
      --*) ;;
      -h) set -- --help ;;
      *) die "run.sh: not an option, got $1; options begin with --, see --help" ;;
    esac
    name=${1%%=*} name=${name#--}
    check_known "--$name" "${option_names[@]/#/--}"
    value=''
    if [[ $1 == *=* ]]; then
      value=${1#*=}
    elif [[ ${2-} != --* && $name != help && $name != dry-run ]]; then
      value=${2-}
      shift $(($# > 1))
    fi
    shift
    take_option "$name" "$value"
    while [[ $name == set && $# -gt 0 && $1 != --* ]]; do
      take_option set "$1"
      shift
    done
  done
}

take_option() {
  case $1 in
    help) usage && exit 0 ;;
    dry-run)
      [[ -z $2 ]] || die "--dry-run: takes no value, got $2; leave it out"
      dry_run=true
      ;;
    *)
      [[ -n $2 ]] || die "--$1: has no value; give one, see --help"
      if [[ $1 == set ]]; then settings+=("$2"); else printf -v "${1//-/_}" '%s' "$2"; fi
      ;;
  esac
}

check_options() {
  local name
  check_number --stage "$stage" 0 6
  check_number --stop-stage "$stop_stage" "$stage" 6
  check_number --seed "$seed" 0 4294967295
  [[ $features == wave || $features == fbank ]] ||
    die "--features: is wave or fbank, got $features; see --help"
  [[ $codec == pcm || $codec == flac ]] || die "--codec: is pcm or flac, got $codec; see --help"
  if [[ -n $job ]]; then
    if [[ ! $job =~ ^[1-9][0-9]*/[1-9][0-9]*$ ]] || ((${job%/*} > ${job#*/})); then
      die "--job: is I/N with I from 1 to N, got $job; see --help"
    fi
    ((stage == stop_stage && (stage == 2 || stage == 5))) ||
      die "--job $job: is for stage 2 or 5 alone, got stages $stage to $stop_stage; add --stage 2 --stop-stage 2, say"
  fi
  check_task
  [[ $large_margin == true || $large_margin == false ]] ||
    die "--large-margin: is true or false, got $large_margin; see --help"
  check_file_name --model "$model" "$root"/conf/*.yaml
  [[ $hardware == auto ]] || check_file_name --hardware "$hardware" "$root"/conf/hardware/*.yaml
  for name in "${settings[@]}"; do
    case $name in
      data.dir=*) die "--set $name: would miss the other stages; use --data ${name#*=}" ;;
      seed=*) die "--set $name: would miss the experiment's name; use --seed ${name#*=}" ;;
      *?=*) ;;
      *) die "--set: takes section.key=value, got $name; see --help" ;;
    esac
  done
}

# A task other than speaker verification is a folder of the recipe, with its own prepare and YAML.
check_task() {
  local prepare names=()
  [[ $task == sv || $task == lid ]] || die "--task: is sv or lid, got $task; see --help"
  if [[ $task == sv || -f $recipe_dir/$task/prepare.py ]]; then return; fi
  for prepare in "$root"/egs/*/"$task"/prepare.py; do
    prepare=${prepare%"/$task/prepare.py"}
    if [[ $prepare != *'*' ]]; then names+=("${prepare##*/}"); fi
  done
  die "--task $task: this recipe has no folder $task/, got $recipe; there is one in ${names[*]:-none}"
}

check_machines() {
  local gpu_list
  read -r -a gpu_list <<<"${gpus//,/ }"
  nproc=${nproc:-$((${#gpu_list[@]} > 0 ? ${#gpu_list[@]} : 1))}
  check_number --nproc "$nproc" 1 1024
  check_number --nnodes "$nnodes" 1 4096
  check_number --wait-minutes "$wait_minutes" 0 100000
  ((nnodes == 1)) || [[ -z $job ]] ||
    die "--job $job: a host of several is a job by itself, got --nnodes $nnodes; leave one of them out"
  ((${#gpu_list[@]} == 0 || nproc <= ${#gpu_list[@]})) ||
    die "--nproc: has more ranks than --gpus has GPUs, got $nproc; use ${#gpu_list[@]} or fewer"
  if ((nnodes > 1)); then
    check_number --node-rank "${node_rank:-none}" 0 $((nnodes - 1))
    [[ $rdzv =~ ^.+:[0-9]+$ ]] || die "--rdzv: is HOST:PORT of node rank 0, got ${rdzv:-none}; add it"
  elif [[ -n $node_rank$rdzv ]]; then
    die "--node-rank, --rdzv: are for several hosts, got one; add --nnodes N"
  fi
  cuda_devices=$(IFS=, && printf '%s' "${gpu_list[*]}")
}

# check_known WORD NAME...: refuse WORD unless it is a NAME.
check_known() {
  local word=$1 name
  shift
  for name in "$@"; do
    if [[ $name == "$word" ]]; then return; fi
  done
  die "run.sh: unknown option, got $word; did you mean $(nearest "$word" "$@")? --help lists all"
}

# check_file_name OPTION NAME FILE...: refuse NAME unless it is that of a FILE without its .yaml.
check_file_name() {
  local option=$1 name=$2 names=() file
  for file in "${@:3}"; do
    file=${file##*/}
    names+=("${file%.yaml}")
    if [[ ${file%.yaml} == "$name" ]]; then return; fi
  done
  die "$option: unknown name, got $name; did you mean $(nearest "$name" "${names[@]}")?" \
    "There are ${names[*]}"
}

check_number() {
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,9})$ ]] || (($2 < $3 || $2 > $4)); then
    die "$1: is a whole number from $3 to $4, got $2; see --help"
  fi
}

# nearest WORD NAME...: print the NAME that WORD begins, else the one at the smallest edit distance.
nearest() {
  local word=${1:0:40} name best='' smallest=1000 distance
  for name in "${@:2}"; do
    if [[ $name == "$word"* ]]; then distance=0; else measure_edits "$word" "$name"; fi
    if ((distance < smallest)); then best=$name smallest=$distance; fi
  done
  printf '%s' "$best"
}

# measure_edits A B: set `distance` to the Levenshtein distance.
measure_edits() {
  local a=$1 b=$2 i j diagonal cost row=()
  for ((j = 0; j <= ${#b}; j++)); do row[j]=$j; done
  for ((i = 1; i <= ${#a}; i++)); do
    diagonal=${row[0]} row[0]=$i
    for ((j = 1; j <= ${#b}; j++)); do
      cost=$diagonal diagonal=${row[j]}
      if [[ ${a:i-1:1} != "${b:j-1:1}" ]]; then
        if ((row[j] < cost)); then cost=${row[j]}; fi
        if ((row[j - 1] < cost)); then cost=${row[j - 1]}; fi
        cost=$((cost + 1))
      fi
      row[j]=$cost
    done
  done
  distance=${row[${#b}]}
}

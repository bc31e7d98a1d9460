#!/usr/bin/env bash
# Ten jobs of the first hour with a trained model, on the voices of egs/mini.
#   bash examples/first_hour.sh OUT [MINI]
# OUT: folder for the results. MINI: egs/mini after its recipe (default: that of this clone; trains
# what is missing, in five to fifteen minutes on two cores). Needs: pip install ".[report,serve]"
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
out=$(mkdir -p "${1:?name a folder for the results}" && cd "$1" && pwd)
mini=${2:-$root/egs/mini}
voices=$mini/corpus/test
exp=$mini/exp/campplus_tiny_s0
other=$mini/exp/short

# Job 9 needs a free port: another program on it would answer in place of the service.
export SERVE_PORT=${SERVE_PORT:-8765}
if (: <>"/dev/tcp/127.0.0.1/$SERVE_PORT") 2>/dev/null; then
  echo "SERVE_PORT: a program already listens on $SERVE_PORT; set another port" >&2
  exit 1
fi

job() { printf '\n== %s\n' "$*"; }

[ -e "$exp/results.json" ] || bash "$mini/run.sh"
# A second system to compare with: the same network after a third of the epochs.
[ -e "$other/results.json" ] ||
  bash "$mini/run.sh" --stage 3 --exp "$other" --set training.num_epochs=4
cd "$out"

job "1. Embed a stereo call in windows, each channel by itself"
python3 - "$voices" <<'END'
import sys
from pathlib import Path

import numpy as np
import soundfile

voices = Path(sys.argv[1])
sides = []
for voice in ("spk080", "spk082"):
    waves = [soundfile.read(path) for path in sorted((voices / voice).glob("*.wav"))]
    rate = waves[0][1]
    sides.append(np.concatenate([wave for wave, _ in waves[:4]]))
length = min(len(side) for side in sides)
soundfile.write("call.wav", np.stack([side[:length] for side in sides], axis=1), rate)
END
speakerlab embed call.wav --model "$exp" --channel each --window 1.5 --step 0.75 --out windows

job "2. Verify a pair, with JSON for a program"
speakerlab verify "$voices"/spk080/spk080-0{0,1}.wav --model "$exp" --json

job "3. Enrol three speakers"
for voice in spk080 spk081 spk082; do
  speakerlab enroll "$voice" "$voices/$voice/$voice"-0{0,1,2}.wav --model "$exp" \
    --speakers speakers.safetensors
done

job "4. Identify a folder of recordings"
speakerlab identify "$voices/spk081" --model "$exp" --speakers speakers.safetensors --json

job "5. Diarize a conversation"
python3 - "$voices" <<'END'
import sys
from pathlib import Path

import numpy as np
import soundfile

voices = Path(sys.argv[1])
turns = []
for turn in range(8):
    voice = ("spk080", "spk082")[turn % 2]
    wave, rate = soundfile.read(sorted((voices / voice).glob("*.wav"))[turn // 2])
    turns += [wave, np.zeros(rate // 2)]
soundfile.write("conversation.wav", np.concatenate(turns), rate)
END
speakerlab diarize conversation.wav --model "$exp" --out diarization

job "6. DET curves of two systems, as wide as a column"
speakerlab plot det Twelve="$exp" Four="$other" --out det.pdf

job "7. A table for a paper"
speakerlab table Twelve="$exp" Four="$other" --format latex --out table.tex
cat table.tex

job "8. Choose a model for these voices"
speakerlab choose --data "$voices" --models "$exp" "$other" --utterances 200 --out choice

job "9. Serve the model, and ask it"
export SERVE_MODEL=$exp SERVE_FOLDER=$out/service
(cd "$root" && exec python3 -m examples.service) &
service=$!
trap 'kill $service 2>/dev/null || true' EXIT
url=http://127.0.0.1:$SERVE_PORT
curl -fsS --retry 60 --retry-delay 1 --retry-connrefused -o health.json "$url/health"
curl -fsS "$url/speakers/ann" -F recordings=@"$voices/spk080/spk080-00.wav" \
  -F recordings=@"$voices/spk080/spk080-01.wav"
curl -fsS "$url/identify" -F recording=@"$voices/spk080/spk080-02.wav" | tee identified.json
kill $service
wait $service || true

job "10. Publish a model, and load it back"
speakerlab publish "$exp" --to published --licence cc-by-4.0
speakerlab verify "$voices"/spk080/spk080-0{0,1}.wav --model published

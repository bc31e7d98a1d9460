"""Synthesize a list of sentences with espeak-ng: a separate program, run by making.py.

Its argument is a JSON file {"voices": {name: {"language", "variant"}}, "jobs": [{"path", "voice",
"text", "seed"}]} with absolute paths; `variant` is the text of a voice variant file. Writes a
16-bit wav at 16 kHz per job. espeak-ng is under the GPL, so only this process loads it.
"""

import _ctypes
import ctypes
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import resample_poly

SAMPLE_RATE = 16_000
TOOLS = Path(__file__).resolve().parent / "tools"
SYNCHRONOUS = 2  # enum espeak_AUDIO_OUTPUT of espeak-ng's speak_lib.h
CHARS_UTF8 = 1
POSITION_CHARACTER = 1

Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)  # samples, their number, events


class Synthesizer:
    """espeak-ng with a data folder of only these voices and their languages; changes to it.

    With the full data, many voices would exceed espeak-ng's limit of 350 voice files.
    """

    def __init__(self, voices: dict[str, dict[str, str]], folder: Path) -> None:
        sys.path.insert(0, str(TOOLS))
        loader = importlib.import_module("espeakng_loader")
        _write_data(Path(loader.get_data_path()), folder / "espeak-ng-data", voices)
        self._path = loader.get_library_path()
        self._languages = {name: voice["language"] for name, voice in voices.items()}
        self._pieces: list[bytes] = []  # int16
        self._callback = Callback(
            self._receive
        )  # kept: espeak-ng holds no reference to it
        os.chdir(
            folder
        )  # espeak-ng truncates long paths, and opens its data when a voice needs it

    def _receive(
        self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: int
    ) -> int:
        if samples and count > 0:
            self._pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    def speak(self, text: str, *, voice: str, seed: int) -> np.ndarray:
        """Return the sentence as float32 at 16 kHz; equal arguments give equal samples.

        The library is loaded again for each sentence: its state (phases of the flutter and of the
        voice) survives even espeak_Terminate, and a sentence would depend on those before it.
        """
        library = ctypes.CDLL(self._path)
        try:
            wave_S, sample_rate = self._run(library, text, voice=voice, seed=seed)
        finally:
            library.espeak_Terminate()
            _unload(library)
        return resample_poly(wave_S, SAMPLE_RATE, sample_rate).astype(np.float32)

    def _run(
        self, library: ctypes.CDLL, text: str, *, voice: str, seed: int
    ) -> tuple[np.ndarray, int]:
        """Return the samples of a freshly loaded library and their rate."""
        sample_rate = library.espeak_Initialize(SYNCHRONOUS, 0, b".", 0)
        if sample_rate <= 0:
            raise ValueError("espeak-ng: does not start; install it again")
        name = f"{self._languages[voice]}+{voice}"
        if library.espeak_SetVoiceByName(name.encode()) != 0:
            raise ValueError(f"espeak-ng: unknown voice {name}; check its language")
        self._pieces.clear()
        encoded = text.encode() + b"\0"
        library.espeak_SetSynthCallback(self._callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(seed))  # breath is random
        library.espeak_Synth(
            encoded, len(encoded), 0, POSITION_CHARACTER, 0, CHARS_UTF8, None, None
        )
        library.espeak_Synchronize()
        if not self._pieces:
            raise ValueError(
                f"espeak-ng: no audio for '{text}' with voice {name}; change the text"
            )
        wave_S = np.frombuffer(b"".join(self._pieces), dtype=np.int16)
        return wave_S.astype(np.float64) / 32768, sample_rate


def _unload(library: ctypes.CDLL) -> None:
    """Close the library; ctypes has no public function for it."""
    close = getattr(_ctypes, "dlclose", None) or getattr(_ctypes, "FreeLibrary")  # noqa: B009
    close(library._handle)


def _write_data(source: Path, target: Path, voices: dict[str, dict[str, str]]) -> None:
    """Write the data of the languages and a variant file per voice."""
    languages = sorted(
        {voice["language"].partition("-")[0] for voice in voices.values()}
    )
    dictionaries = [f"{language}_dict" for language in languages]
    (target / "voices" / "!v").mkdir(parents=True)
    for name in ("phondata", "phonindex", "phontab", "intonations", *dictionaries):
        shutil.copyfile(source / name, target / name)
    for path in (source / "lang").rglob("*"):
        if path.is_file() and path.name.partition("-")[0] in languages:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    for name, voice in voices.items():
        (target / "voices" / "!v" / name).write_text(voice["variant"])


def main() -> int:
    """Run all jobs; after an error, print one line to stderr and return 1."""
    work = json.loads(Path(sys.argv[1]).read_text())
    try:
        with tempfile.TemporaryDirectory() as folder:
            synthesizer = Synthesizer(work["voices"], Path(folder))
            for job in work["jobs"]:
                wave_S = synthesizer.speak(
                    job["text"], voice=job["voice"], seed=job["seed"]
                )
                Path(job["path"]).parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(job["path"], wave_S, SAMPLE_RATE, subtype="PCM_16")
            os.chdir(TOOLS.parent)  # some systems cannot remove the current directory
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

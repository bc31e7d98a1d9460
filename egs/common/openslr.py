"""Noise and rooms that may be downloaded: MUSAN (openslr.org/17) and RIRS_NOISES (openslr.org/28).

In: the folders of --noise and --rirs. Out: what is not there, downloaded and unpacked beside.
URLs and md5: egs/voxceleb/sv-cam++/local/download_data.sh:25,27 and :32,34 of
github.com/modelscope/3D-Speaker at 09e7806; the archives unpack to the folders named here
(prepare_data.sh:44,48 there).
"""

from pathlib import Path

from egs.common.archives import unpack
from egs.common.fetch import download

# folder that the archive unpacks to -> (URL, md5)
ARCHIVES = {
    "musan": (
        "https://openslr.elda.org/resources/17/musan.tar.gz",
        "md5:0c472d4fc0c5141eca47ad1ffeb2a7df",
    ),
    "RIRS_NOISES": (
        "https://us.openslr.org/resources/28/rirs_noises.zip",
        "md5:e6f48e257286e05de56413b4779d8ffb",
    ),
}


def download_noise_and_rooms(*, noise: Path | None, rirs: Path | None) -> None:
    """Fetch what is asked for: a folder that is not there and bears the name in its archive."""
    for option, folder, name in (("noise", noise, "musan"), ("rirs", rirs, "RIRS_NOISES")):
        if folder is None or folder.exists():
            continue
        if folder.name != name:
            raise FileNotFoundError(
                f"--{option}: no such folder, got {folder}; correct it, or name one that ends in "
                f"/{name} to have that archive downloaded"
            )
        url, checksum = ARCHIVES[name]
        archive = folder.parent / url.rpartition("/")[2]
        download(url, archive, checksum=checksum)
        unpack([archive], folder.parent)
        print(f"{folder}: downloaded; {archive} may be deleted")

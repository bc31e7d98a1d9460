"""Names of files and folders that systems, editors and file managers leave beside those of users.

They are never recordings, speakers, tables or trial lists.
"""

import re

# In lower case. Names that begin with a dot, such as ._NAME, .DS_Store, .Trash-1000 and
# .ipynb_checkpoints, need no list.
OF_SYSTEMS = {
    "__macosx",
    "__pycache__",
    "icon\r",
    "network trash folder",
    "temporary items",
    "thumbs.db",
    "ehthumbs.db",
    "ehthumbs_vista.db",
    "desktop.ini",
    "$recycle.bin",
    "recycler",
    "recycled",
    "system volume information",
    "lost.dir",
    "lost+found",
    "@eadir",
    "@tmp",
    "@sharebin",
    "@recycle",
    "@transcode",
    "@recently-snapshot",
    "#recycle",
    "#snapshot",
    "~snapshot",
}
# Endings of backups and of unfinished downloads, in lower case.
OF_EDITORS = (
    "~",
    ".bak",
    ".backup",
    ".old",
    ".orig",
    ".rej",
    ".swp",
    ".swo",
    ".swn",
    ".save",
    ".autosave",
    ".kate-swp",
    ".unison",
    ".dpkg-old",
    ".dpkg-new",
    ".dpkg-dist",
    ".rpmsave",
    ".rpmnew",
    ".tmp",
    ".temp",
    ".part",
    ".partial",
    ".filepart",
    ".crdownload",
    ".download",
    ".opdownload",
    ".!ut",
    ".aria2",
)
COPIES = re.compile(
    # Dropbox, Nextcloud, Syncthing, Seafile, ownCloud and rclone keep both versions of a file that
    # two hosts have changed.
    r".*\((.* )?conflicted copy.*\).*|.*\(case conflict.*\).*|.*\.sync-conflict-\d+.*"
    r"|.*\(sfconflict .*\).*|.*_conflict-\d{8}-\d{6}.*|.*\.conflict\d+"
    # Numbered backups, such as utt2spk.bak2 and utt2spk.orig.1.
    r"|.+\.(bak|backup|old|orig)[-._]?\d+"
    # Windows' chkdsk puts what it has recovered into found.000, found.001, ...
    r"|found\.\d{3}"
    # Emacs saves FILE as #FILE#; Office locks FILE by ~$FILE.
    r"|#.+#|~\$.+",
    re.IGNORECASE | re.DOTALL,
)


def is_leftover(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or left by a program."""
    lower = name.lower()
    if name.startswith(".") or lower in OF_SYSTEMS:
        return True
    # A name that is nothing but such an ending is a name like any other.
    is_backup = lower.endswith(OF_EDITORS) and lower not in OF_EDITORS
    return is_backup or COPIES.fullmatch(name) is not None


def name_leftovers(names: list[str]) -> str:
    """Return how many there are, with examples: "3 ..., such as .DS_Store and x~"."""
    examples = sorted({repr(name)[1:-1] for name in names})[:3]
    number = "1 file or folder"
    if len(names) > 1:
        number = f"{len(names)} files and folders"
    text = f"{number} of systems and editors"
    return f"{text}, such as {', '.join(examples)}"

"""The front end: int16 waves in, features out, batched, on the device that the model is on.

    Batch.wave_BS -> Augment (speed, room, noise, ...) -> wave_BS -> Fbank -> feats_BTF -> masks

`Fbank` belongs to the published model: training, extraction and export share it. `augment/` exists
in training only; its draws are made by the data workers and arrive in the `Batch`. Everything here
is float32 under autocast too, holds no parameters, and adds nothing to a state dict.
"""

"""The front end: int16 waves in, features out, batched, on the device that the model is on.

    Batch.wave_BS -> Augment (speed, room, noise) -> wave_BS -> Fbank -> feats_BTF -> SpecAugment

`Fbank` belongs to the published model: training, extraction and export share it. `Augment` and
`SpecAugment` exist in training only and draw nothing themselves: what is done to a row arrives in
its `Batch`. Everything here is float32 whatever autocast says, holds no parameters, and leaves no
trace in a state dict.
"""

"""Commands of `speakerlab`, one file each: parse the options, build the objects, call them."""

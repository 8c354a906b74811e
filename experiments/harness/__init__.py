"""What all studies share: mixers, result tables, pages, pictures, command lines, turns on a device."""

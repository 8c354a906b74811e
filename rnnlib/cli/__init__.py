"""The command line: `rnnlib train | eval | generate | mixers | tokenizer`."""

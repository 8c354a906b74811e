"""A second register of text beside source code: documentation and prose from Debian's packages."""

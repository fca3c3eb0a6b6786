"""Bytes at an offset: local files, members of archives, decoded streams, and the write protocol. Imports only core."""

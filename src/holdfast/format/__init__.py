"""The format of a run: records, index, data files, codecs, digests, values. Pure: bytes in, bytes out; no torch, no files."""

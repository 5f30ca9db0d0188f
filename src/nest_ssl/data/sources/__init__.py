"""Where utterances come from: files, tar shards, lhotse."""

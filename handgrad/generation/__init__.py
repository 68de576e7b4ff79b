"""Writes text: decoding with a cache of keys and values, sampling, streams, files of prompts."""

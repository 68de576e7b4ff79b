"""Text generation: decoding with a KV cache, sampling, streaming, prompt files."""

"""From raw text to batches of tokens; the data flows down this list.

stories, stories_grammar   a built-in corpus whose entropy is known exactly
sources, hub, download     local files and datasets of the hub, as streams of documents
cutting                    where a long text may be cut without changing a token
tokenizer                  text <-> token ids: GPT-2's vocabulary, bytes, or one trained here
pieces, workers, writer    documents -> units of work -> tokens -> shards
prepare                    the three together: a source -> a folder of shards, in parallel, resumable
shards                     that folder, opened and verified
permutation, batches       sample i of a run, a pure function of (seed, i)
"""

"""From raw text to batches of tokens, without torch. The data flows down this list; start at `prepare`.

stories, stories_grammar   a built-in corpus whose entropy is known exactly
sources, hub, download     local files and datasets of the hub, as streams of documents
cutting                    cuts of a long text that change no token
tokenizer, model_tokenizer text <-> token ids: GPT-2's vocabulary, bytes, one trained here, a model's own
tokenizer_names            other names for them
vocabulary                 the same as transformers keeps them, in files
chat, questions            conversations: of files, built in
chat_template              conversations -> tokens, and the stretches of the assistant
confined                   programs in foreign files, within bounds: templates, the expressions of tokenizers
pieces, workers, writer    documents -> units of work -> tokens -> shards
recipe, prepare            a source -> a folder of shards, in parallel, resumable
shards                     that folder, opened and verified
permutation, packing,      sample i of a run, a pure function of (seed, i)
batches
llmc_header                the first kilobyte of shards and of llm.c's other files
"""

"""From raw text to batches of tokens, without torch. The data flows down this list; start at `prepare`.

stories                    a built-in corpus whose entropy is known exactly
sources, hub               local files and datasets of the hub, as streams of documents
tokenizer, model_tokenizer text <-> token ids: GPT-2's vocabulary, bytes, one trained here; a model's own
tokenizer_loading          finds a tokenizer by the user's name for it, or by a manifest
chat, questions            conversations: from files, built in
chat_template              conversations -> tokens, and the stretches that the assistant says
confined                   runs untrusted programs under limits: chat templates, the expressions of tokenizers
pieces, writer             documents -> units of work -> tokens -> shards
recipe, prepare            a source -> a folder of shards, in parallel, resumable
shards                     opens and verifies that folder
batches                    sample i of a run, a pure function of (seed, i)
recommended                the `prepare` commands that messages suggest
llmc_header                the header (first kilobyte) of shards and of llm.c's other files
"""

"""From text to tokens and back: tokenizer, chat template, incremental detokenising. Shared by router and worker; no torch."""

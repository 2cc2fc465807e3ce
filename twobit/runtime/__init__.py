"""Running packed models: the C runtime, tokenizer, chat template and generation. Never imports torch."""

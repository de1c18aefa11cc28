"""Run a bundle: tokenizer, chat template, token stream and engine."""

"""Tokenizers and chat templates as tables that the native runtime maps, so that no device parses JSON or Jinja."""
